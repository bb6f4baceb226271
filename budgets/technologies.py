"""Published energies of multiply-adds and of bytes at each level of memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dsa_hw.errors import BudgetError

__all__ = ["TECHNOLOGIES", "Technology", "technology"]

PATHS: Final[dict[str, tuple[str, ...]]] = {"weights": ("dram", "large", "small"), "activations": ("large", "small")}
_PICO: Final = 1e-12


@dataclass(frozen=True)
class Technology:
    """Energies of one multiply-add and of one byte per level of memory.

    Attributes:
        name: Of the technology, for reports.
        mac: Picojoules of one multiply-add.
        byte: Level of memory -> picojoules of one byte read or written there.
        width: Bytes of one number.
        paths: The levels that "weights" and "activations" pass on their way to the arithmetic.
        source: Where the figures come from.

    Raises:
        BudgetError: A figure is negative or not a number, or a path names a level without a figure.
    """

    name: str
    mac: float
    byte: Mapping[str, float] = field(hash=False)
    width: float = 4.0
    paths: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: dict(PATHS), hash=False)
    source: str = ""

    def __post_init__(self) -> None:
        """Check."""
        numbers = {"mac": self.mac, "width": self.width, **{f"byte {k}": v for k, v in self.byte.items()}}
        for what, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0 or math.isinf(value):
                raise BudgetError(f"Technology {self.name}: {what} must be a number of at least 0; got {value!r}.")
        if set(self.paths) != set(PATHS) or not self.width > 0:
            raise BudgetError(
                f"Technology {self.name}: it needs paths for weights and activations, and a width above 0."
            )
        for what, levels in self.paths.items():
            for level in levels:
                if level not in self.byte:
                    raise BudgetError(
                        f"Technology {self.name}: {what} pass {level!r}, which has no figure in byte; it has "
                        f"{', '.join(self.byte)}."
                    )

    @property
    def joules_per_mac(self) -> float:
        """Joules of one multiply-add."""
        return _PICO * self.mac

    def joules_per_number(self, what: str) -> float:
        """Return the joules of one number of the "weights" or "activations"."""
        return _PICO * self.width * sum(self.byte[level] for level in self.paths[what])


def _published() -> dict[str, Technology]:
    # pJ of one multiplication and one addition; int8 is accumulated in 32 bits. A memory access is 64 bits wide.
    horowitz = "M. Horowitz, Computing's energy problem, ISSCC 2014, fig. 1.1.9 (45 nm, 0.9 V)"
    jouppi = "N. Jouppi et al., Ten lessons from three generations shaped Google's TPUv4i, ISCA 2021, table 2 (7 nm)"
    nodes: tuple[tuple[str, str, dict[str, float], dict[str, tuple[float, float]]], ...] = (
        (
            "45nm",
            horowitz,
            {"small": 10 / 8, "large": 100 / 8, "dram": 1300 / 8},  # 8 KiB, 1 MiB, the lower end of 1.3-2.6 nJ
            {"": (3.7, 0.9), "-fp16": (1.1, 0.4), "-int8": (0.2, 0.1)},
        ),
        (
            "7nm",
            jouppi,
            {"small": 7.5 / 8, "large": 14 / 8, "dram": 1300 / 8},  # 8 KiB, 1 MiB, DDR4
            {"": (1.31, 0.38), "-fp16": (0.34, 0.16), "-int8": (0.07, 0.03)},
        ),
    )
    widths = {"": 4.0, "-fp16": 2.0, "-int8": 1.0}
    return {
        node + kind: Technology(node + kind, multiply + add, memory, widths[kind], source=source)
        for node, source, memory, arithmetic in nodes
        for kind, (multiply, add) in arithmetic.items()
    }


TECHNOLOGIES: Final[dict[str, Technology]] = _published()
"""Published figures: 45 nm and 7 nm, fp32, fp16 and int8."""


def technology(given: str | Path | Mapping[str, Any] | Technology) -> Technology:
    """Return a technology by name, or make one of the user's own.

    >>> technology("7nm-int8").width
    1.0
    >>> technology({"mac": 2.0, "byte": {"dram": 100.0, "large": 10.0, "small": 1.0}}).joules_per_mac
    2e-12

    Args:
        given: A name in `TECHNOLOGIES`; a mapping, or a JSON file, with the fields of `Technology`, of which ``mac``
            and ``byte`` are required.

    Raises:
        BudgetError: The name is unknown, the file cannot be read, or a field is missing, unknown or wrong.
    """
    if isinstance(given, Technology):
        return given
    if isinstance(given, str) and given in TECHNOLOGIES:
        return TECHNOLOGIES[given]
    # Later, because it imports pydantic and budgets are part of ``dsa-hw --help``.
    from budgets.technology_document import TechnologyDocument
    from dsa_hw.utils.documents import read_document

    what = "mapping"
    if isinstance(given, (str, Path)):
        path, what = Path(given), str(given)
        if path.suffix != ".json":
            raise BudgetError(
                f"Unknown technology {what!r}. Available technologies: {', '.join(TECHNOLOGIES)}, or your own as a "
                "mapping or a .json file."
            )
        found = read_document(path, TechnologyDocument, f"the technology {what}", error=BudgetError)
    elif isinstance(given, Mapping):
        found = read_document(given, TechnologyDocument, "the technology", error=BudgetError)
    else:
        raise BudgetError(f"A technology must be a name, a mapping or a .json file; got {given!r}.")
    paths = {"weights": found.paths.weights, "activations": found.paths.activations}
    name = found.name or Path(what).name
    return Technology(name, found.mac, found.byte, found.width, paths, found.source)
