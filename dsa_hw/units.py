"""Units of budgets: ``5 * ms``, ``40 * mJ``, ``64 * MiB``, ``60 * percent``.

A unit has a dimension and a factor to the base unit of that dimension (second, joule, byte, FLOP, parameter, the dense
network). `UNITS` is the only list of units in the project; strings such as ``"5ms"`` are parsed with it too
(``budgets.quantities``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, Final

from dsa_hw.errors import BudgetError

__all__ = [
    "BASE_UNITS",
    "GB",
    "MB",
    "UNITS",
    "GFLOPs",
    "GMACs",
    "GiB",
    "J",
    "KiB",
    "MFLOPs",
    "MMACs",
    "MiB",
    "Mparams",
    "Quantity",
    "Unit",
    "kB",
    "mJ",
    "ms",
    "ns",
    "percent",
    "s",
    "uJ",
    "us",
]


@dataclass(frozen=True)
class Quantity:
    """A number in the base unit of a dimension (see `BASE_UNITS`)."""

    magnitude: float
    dimension: str

    def __str__(self) -> str:
        """Return the quantity in a readable unit."""
        return format_magnitude(self.magnitude, self.dimension)


@dataclass(frozen=True)
class Unit:
    """A unit; ``number * unit`` is a `Quantity`.

    >>> print(5 * ms)
    5 ms

    Attributes:
        symbol: As in strings.
        dimension: "time", "energy", "memory", "flops", "params" or "fraction".
        factor: To the base unit of the dimension.
    """

    symbol: str
    dimension: str
    factor: float

    # NumPy scalars would otherwise try to broadcast over the unit instead of calling __rmul__.
    __array_ufunc__: ClassVar[None] = None

    def __rmul__(self, number: Real | float) -> Quantity:
        """Return the quantity, as in ``5 * ms``."""
        if isinstance(number, bool) or not isinstance(number, Real):
            raise BudgetError(f"A unit multiplies one real number, as in 5 * {self.symbol}; got {number!r}.")
        return Quantity(float(number) * self.factor, self.dimension)

    def __mul__(self, number: Real | float) -> Quantity:
        """Return the quantity, as in ``ms * 5``."""
        return self.__rmul__(number)


def _units() -> dict[str, Unit]:
    table: dict[str, tuple[str, float]] = {"%": ("fraction", 0.01), "percent": ("fraction", 0.01)}
    for prefix, factor in (("n", 1e-9), ("u", 1e-6), ("µ", 1e-6), ("μ", 1e-6), ("m", 1e-3), ("", 1.0)):
        table[f"{prefix}s"], table[f"{prefix}J"] = ("time", factor), ("energy", factor)
    table |= {"min": ("time", 60.0), "kJ": ("energy", 1e3)}
    table |= {"mWh": ("energy", 3.6), "Wh": ("energy", 3600.0)}
    for power, prefix in enumerate("KMGT", start=1):
        table[f"{prefix}iB"] = ("memory", 1024.0**power)
        table[f"{'k' if prefix == 'K' else prefix}B"] = ("memory", 1000.0**power)
    table |= {"B": ("memory", 1.0), "KB": ("memory", 1000.0), "bytes": ("memory", 1.0)}
    for power, prefixes in ((0, ("",)), (1, ("k", "K")), (2, ("M",)), (3, ("G", "B")), (4, ("T",))):
        for prefix in prefixes:
            factor = 1000.0**power
            if prefix != "B":
                table[f"{prefix}FLOPs"] = table[f"{prefix}FLOP"] = ("flops", factor)
                # One multiply-add is two floating-point operations, as torch.utils.flop_counter counts.
                table[f"{prefix}MACs"] = table[f"{prefix}MAC"] = ("flops", 2.0 * factor)
            table[f"{prefix}params"] = ("params", factor)
    return {symbol: Unit(symbol, dimension, factor) for symbol, (dimension, factor) in table.items()}


UNITS: Final[dict[str, Unit]] = _units()
BASE_UNITS: Final[dict[str, str]] = {
    "time": "s",
    "energy": "J",
    "memory": "B",
    "flops": "FLOPs",
    "params": "params",
    "fraction": "",
}

ns, us, ms, s = (UNITS[symbol] for symbol in ("ns", "us", "ms", "s"))
uJ, mJ, J = (UNITS[symbol] for symbol in ("uJ", "mJ", "J"))  # noqa: N816 (SI spells joule with a capital)
kB, MB, GB = (UNITS[symbol] for symbol in ("kB", "MB", "GB"))  # noqa: N816
KiB, MiB, GiB = (UNITS[symbol] for symbol in ("KiB", "MiB", "GiB"))
MFLOPs, GFLOPs, MMACs, GMACs = (UNITS[symbol] for symbol in ("MFLOPs", "GFLOPs", "MMACs", "GMACs"))
Mparams = UNITS["Mparams"]
percent = UNITS["percent"]

_READABLE: Final[dict[str, tuple[str, ...]]] = {
    "time": ("ns", "us", "ms", "s"),
    "energy": ("nJ", "uJ", "mJ", "J", "kJ"),
    "memory": ("B", "KiB", "MiB", "GiB", "TiB"),
    "flops": ("FLOPs", "kFLOPs", "MFLOPs", "GFLOPs", "TFLOPs"),
    "params": ("params", "kparams", "Mparams", "Gparams"),
}


def format_magnitude(magnitude: float, dimension: str, digits: int = 4) -> str:
    """Format a magnitude in a readable unit.

    It is the largest unit that leaves a number of at least 1.

    >>> format_magnitude(0.00493, "time")
    '4.93 ms'

    Args:
        magnitude: In the base unit of ``dimension``.
        dimension: See `BASE_UNITS`.
        digits: Significant digits.
    """
    if dimension == "fraction":
        return f"{100 * magnitude:.{digits}g}%"
    if not math.isfinite(magnitude):
        return f"{magnitude} {BASE_UNITS[dimension]}"
    symbols = _READABLE[dimension]
    chosen = UNITS[symbols[0]]
    for symbol in symbols:
        if abs(magnitude) >= UNITS[symbol].factor:
            chosen = UNITS[symbol]
    return f"{magnitude / chosen.factor:.{digits}g} {chosen.symbol}"
