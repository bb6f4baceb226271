"""The profile: measured configurations of one network on one target, all that passes from profilers to budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

__all__ = ["COLUMNS", "Profile"]

COLUMNS: dict[str, tuple[str, str]] = {"latency": ("seconds", "s"), "energy": ("joules", "J")}
"""Quantity -> the column of the table that holds its values, and their unit."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Measured configurations of one network on one target.

    Attributes:
        table: A row per configuration: a width per channel group (columns ``names``), the value (column
            ``column``) with its 95% interval ``low`` and ``high``, ``split`` ("dense", "train" or "holdout") and
            ``runs``.
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
        statistic: What a value is of its runs: "quiet", "median", "p90", ...
        noise: Median relative spread of the runs.
        rejected: Share of the runs that were rejected.
        untrusted: Number of configurations that were left out.
        estimated: Where the values are estimates: what estimated them; None for measurements.
        breakdown: Stage -> seconds spent in it.
        prepared: How the networks were made.
        agreement: Largest difference between a narrowed and a shrunk network's outputs; None where not compared.
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
    statistic: str = "quiet"
    noise: float = float("nan")
    rejected: float = 0.0
    untrusted: int = 0
    estimated: str | None = None
    breakdown: Mapping[str, float] = field(default_factory=dict)
    prepared: str = ""
    agreement: float | None = None

    @property
    def column(self) -> str:
        """The column of ``table`` that holds the measured values."""
        return COLUMNS[self.quantity][0]

    @property
    def unit(self) -> str:
        """The unit of the measured values."""
        return COLUMNS[self.quantity][1]

    def __len__(self) -> int:
        return len(self.table)
