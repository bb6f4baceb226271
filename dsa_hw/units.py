"""Units that a budget can be given in: ``5 * ms``, ``40 * mJ``, ``64 * MiB``, ``1.2 * GFLOPs``, ``60 * percent``.

A unit is a dimension and a factor to that dimension's base unit (second, joule, byte, FLOP, parameter, the dense
network). Counting units convert exactly; a dimension never converts to another one. The table below is the only list of
units in the project: strings such as ``"5ms"`` are read with it too (``budgets.quantities``).
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
    """A size with a dimension: ``magnitude`` in the base unit of ``dimension`` (see ``BASE_UNITS``)."""

    magnitude: float
    dimension: str

    def __str__(self) -> str:
        """Readable form in the unit that keeps the number between 1 and 1000."""
        return format_magnitude(self.magnitude, self.dimension)


@dataclass(frozen=True)
class Unit:
    """``number * unit`` is a ``Quantity``; ``factor`` converts to the base unit of ``dimension``."""

    symbol: str
    dimension: str
    factor: float

    # NumPy scalars would otherwise try to broadcast over the unit instead of calling __rmul__.
    __array_ufunc__: ClassVar[None] = None

    def __rmul__(self, number: Real | float) -> Quantity:
        """``5 * ms``."""
        if isinstance(number, bool) or not isinstance(number, Real):
            raise BudgetError(f"{number!r} * {self.symbol}: a unit multiplies one real number, as in 5 * {self.symbol}")
        return Quantity(float(number) * self.factor, self.dimension)

    def __mul__(self, number: Real | float) -> Quantity:
        """``ms * 5``."""
        return self.__rmul__(number)


def _units() -> dict[str, Unit]:
    table: dict[str, tuple[str, float]] = {"%": ("fraction", 0.01), "percent": ("fraction", 0.01)}
    for symbol, factor in (
        ("ns", 1e-9),
        ("us", 1e-6),
        ("µs", 1e-6),
        ("μs", 1e-6),
        ("ms", 1e-3),
        ("s", 1.0),
        ("min", 60.0),
    ):
        table[symbol] = ("time", factor)
    for symbol, factor in (
        ("nJ", 1e-9),
        ("uJ", 1e-6),
        ("µJ", 1e-6),
        ("μJ", 1e-6),
        ("mJ", 1e-3),
        ("J", 1.0),
        ("kJ", 1e3),
    ):
        table[symbol] = ("energy", factor)
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
    """``0.00493`` seconds -> ``"4.93 ms"``; the largest unit that leaves a number of at least 1."""
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
