"""The profile that passes from profilers to budgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dsa_hw.errors import ProfileError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["QUANTITIES", "MeasuredQuantity", "Profile"]


class MeasuredQuantity(NamedTuple):
    """Column, unit and ``dsa_hw.units`` dimension of a measured quantity."""

    column: str
    unit: str
    dimension: str


QUANTITIES: Final[dict[str, MeasuredQuantity]] = {
    "latency": MeasuredQuantity("seconds", "s", "time"),
    "energy": MeasuredQuantity("joules", "J", "energy"),
}
"""The quantities that can be profiled, by name."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Measured configurations of one network on one target.

    >>> import pandas as pd
    >>> table = pd.DataFrame({"stem": [16, 8], "seconds": [0.004, 0.003], "split": ["dense", "train"]})
    >>> profile = Profile(table, names=("stem",), sizes=(16,), target="onnxruntime/cpu fp32 x1")
    >>> len(profile), profile.column, profile.unit
    (2, 'seconds', 's')

    Attributes:
        table: A row per configuration: a width per channel group (columns ``names``), the value (column ``column``)
            with its 95% interval ``low`` and ``high``, ``error`` (standard deviation of the logarithm of its ratio to
            the dense network), ``split`` ("dense", "train" or "holdout") and ``runs``.
        names: The channel groups.
        sizes: The dense width of each group.
        target: Title of the target: runtime, device, precision, batch size.
        quantity: "latency" or "energy".
        fingerprint: Of the network's channel groups (``ChannelGroups.fingerprint``); None where it is not known.
        network: The name under which the network was profiled.
        inputs: Shape and dtype of each input.
        environment: Versions, device and settings of the measurement.
        grid: Group -> step of the widths that the target runs efficiently.
        grid_evidence: The measurements behind the grid.
        statistic: What a value is of its runs: "quiet", "median", "p90", ...; None where it is not known.
        noise: Median relative spread of the runs.
        interval: Median half-width of the 95% interval of a ratio to the dense network.
        untrusted: Number of configurations that were left out, because they are less precise than required.
        estimated: Where the values are estimates: what estimated them; None for measurements.
        breakdown: Stage -> seconds spent in it.
        prepared: How the networks were made.
        agreement: Largest difference between a narrowed and a shrunk network's outputs; None where not compared.

    Raises:
        ProfileError: The quantity is unknown, or names and sizes differ in number.
    """

    table: pd.DataFrame
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    target: str
    quantity: str = "latency"
    fingerprint: str | None = None
    network: str = ""
    inputs: tuple[Any, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, int] = field(default_factory=dict)
    grid_evidence: tuple[Mapping[str, Any], ...] = ()
    statistic: str | None = None
    noise: float = float("nan")
    interval: float = float("nan")
    untrusted: int = 0
    estimated: str | None = None
    breakdown: Mapping[str, float] = field(default_factory=dict)
    prepared: str = ""
    agreement: float | None = None

    def __post_init__(self) -> None:
        """Turn lists (of JSON, of arrays) into tuples, and check."""
        for name in ("names", "inputs", "grid_evidence"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "sizes", tuple(int(size) for size in self.sizes))
        if self.quantity not in QUANTITIES:
            raise ProfileError(f"Unknown quantity {self.quantity!r}. Available quantities: {', '.join(QUANTITIES)}.")
        if len(self.names) != len(self.sizes):
            raise ProfileError(f"A profile needs a size per channel group; got {len(self.sizes)} for {self.names}.")

    @property
    def column(self) -> str:
        """The column of ``table`` that holds the measured values."""
        return QUANTITIES[self.quantity].column

    @property
    def unit(self) -> str:
        """The unit of the measured values."""
        return QUANTITIES[self.quantity].unit

    def metadata(self) -> dict[str, Any]:
        """Return everything but the table, as plain data."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "table"}

    @classmethod
    def from_metadata(cls, table: pd.DataFrame, metadata: Mapping[str, Any]) -> Profile:
        """Make a profile of a table and what `metadata` returned.

        Unknown fields are ignored.
        """
        known = {f.name for f in dataclasses.fields(cls)} - {"table"}
        return cls(table, **{name: value for name, value in metadata.items() if name in known})

    def __len__(self) -> int:
        return len(self.table)
