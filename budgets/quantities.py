"""Parse quantities: ``"5ms"``, ``"60%"``, ``"1.2G"``, ``5 * ms`` or pint's.

Nothing is guessed. A bare number has no unit, ``"5MS"`` is not milliseconds, ``"64M"`` could be megabytes or mebibytes:
each is refused with the spelling that would have been accepted.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

from dsa_hw.errors import BudgetError
from dsa_hw.units import UNITS, Quantity, format_magnitude

__all__ = ["parse"]

_NUMBER: Final = re.compile(
    r"^\s*([+-]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?:nan|inf(?:inity)?))\s*(.*?)\s*$", re.I
)
# Where the dimension is already known to be a count, a prefix alone is unambiguous ("1.2G", "2M").
_PREFIXES: Final = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_PINT_BASE: Final = {"time": "second", "energy": "joule", "memory": "byte"}
_NAMES: Final = {"time": "time", "energy": "energy", "memory": "memory", "flops": "FLOPs", "params": "parameters"}
_EXAMPLES: Final = {
    "time": ("5ms", "800us", "60%"),
    "energy": ("40mJ", "1.5J", "60%"),
    "memory": ("64MiB", "50MB", "60%"),
    "flops": ("1.2G", "600 MMACs", "50%"),
    "params": ("2M", "850k", "50%"),
}


def parse(text: object, dimension: str, who: str = "parse") -> Quantity:
    """Parse a positive quantity of ``dimension``, or a share of the dense network.

    >>> parse("5ms", "time")
    Quantity(magnitude=0.005, dimension='time')
    >>> parse("60%", "time")
    Quantity(magnitude=0.6, dimension='fraction')

    Args:
        text: A string, a ``dsa_hw.units.Quantity`` or a pint quantity.
        dimension: ``"time"``, ``"energy"``, ``"memory"``, ``"flops"`` or ``"params"``.
        who: Name for the error message, e.g. ``"LatencyBudget"``.

    Returns:
        A quantity in base units, of ``dimension`` or of dimension ``"fraction"`` (0 < fraction <= 1).

    Raises:
        BudgetError: The text is not such a quantity; the message has a spelling that is accepted.
    """
    quantity = _read(text, dimension, who)
    asked = f"{who}({_shown(text)})"
    if math.isnan(quantity.magnitude) or math.isinf(quantity.magnitude):
        raise BudgetError(f"{asked}: the budget must be finite. {_remedy(who, dimension)}")
    if quantity.magnitude <= 0:
        kind = "zero" if quantity.magnitude == 0 else "negative"
        raise BudgetError(f"{asked}: the budget must be more than 0, but it is {kind}. {_remedy(who, dimension)}")
    if quantity.dimension == "fraction" and quantity.magnitude > 1:
        raise BudgetError(
            f"{asked}: {format_magnitude(quantity.magnitude, 'fraction')} is above the dense network, so there is "
            f"nothing to prune. Use at most 100%, e.g. {who}('60%')."
        )
    return quantity


def _read(text: object, dimension: str, who: str) -> Quantity:
    if isinstance(text, Quantity):
        return _same_dimension(text, dimension, who, text)
    if isinstance(text, str):
        return _read_string(text, dimension, who)
    if hasattr(text, "magnitude") and hasattr(text, "dimensionality") and hasattr(text, "to"):
        return _read_pint(text, dimension, who)
    if isinstance(text, (int, float)) or hasattr(text, "__float__"):
        raise BudgetError(f"{who}({_shown(text)}): a bare number has no unit. {_remedy(who, dimension, text)}")
    raise BudgetError(f"{who}({_shown(text)}): a {type(text).__name__} is not a quantity. {_remedy(who, dimension)}")


def _read_string(text: str, dimension: str, who: str) -> Quantity:
    match = _NUMBER.match(text)
    if match is None:
        raise BudgetError(f"{who}({text!r}): it does not start with a number. {_remedy(who, dimension)}")
    number, symbol = float(match[1].replace("_", "")), match[2]
    if not symbol:
        raise BudgetError(f"{who}({text!r}): a bare number has no unit. {_remedy(who, dimension, number)}")
    if dimension in ("flops", "params") and symbol in _PREFIXES:
        return Quantity(number * _PREFIXES[symbol], dimension)
    unit = UNITS.get(symbol)
    if unit is None:
        near = _nearest(match[1], symbol, dimension)
        raise BudgetError(f"{who}({text!r}): unknown unit {symbol!r}{near}. {_remedy(who, dimension)}")
    return _same_dimension(Quantity(number * unit.factor, unit.dimension), dimension, who, text)


def _read_pint(value: Any, dimension: str, who: str) -> Quantity:
    unit = str(value.units)
    # To pint, bytes and percent are dimensionless; the name of the unit tells them apart.
    if unit in ("percent", "%"):
        return Quantity(float(value.to("dimensionless").magnitude), "fraction")
    known = unit.endswith(("byte", "bit")) if dimension == "memory" else not value.dimensionless
    base = _PINT_BASE.get(dimension)
    if known and base is not None and value.is_compatible_with(base):
        return Quantity(float(value.to(base).magnitude), dimension)
    if value.dimensionless and not unit.endswith(("byte", "bit")):
        raise BudgetError(f"{who}({_shown(value)}): a dimensionless quantity has no unit. {_remedy(who, dimension)}")
    raise BudgetError(f"{who}({_shown(value)}): {unit} is not a unit of {_NAMES[dimension]}. {_remedy(who, dimension)}")


def _same_dimension(quantity: Quantity, dimension: str, who: str, text: object) -> Quantity:
    if quantity.dimension in (dimension, "fraction"):
        return quantity
    raise BudgetError(
        f"{who}({_shown(text)}): {who} limits {_NAMES[dimension]}, not {_NAMES[quantity.dimension]}. "
        f"{_remedy(who, dimension)}"
    )


def _remedy(who: str, dimension: str, number: object = None) -> str:
    """Return spellings that are accepted, with the user's number if it fits."""
    first, second, share = _EXAMPLES[dimension]
    if isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number) and number > 0:
        unit = {"time": "ms", "energy": "mJ", "memory": "MiB"}.get(dimension)
        if 0 < number <= 1:
            share = f"{100 * number:g}%"
        if unit is not None:
            first = f"{number:g}{unit}"
        else:
            first = format_magnitude(number, dimension, digits=15).replace(" ", "")
    return f"Use {who}({first!r}), {who}({second!r}) or, of the dense network, {who}({share!r})."


def _nearest(number: str, symbol: str, dimension: str) -> str:
    """Return units that differ in case only, or that a prefix could mean."""
    folded = symbol.casefold().replace(" ", "")
    near = [name for name, unit in UNITS.items() if unit.dimension == dimension and name.casefold() == folded]
    if not near and dimension == "memory":
        near = [name for name in UNITS if name in (f"{symbol}B", f"{symbol}iB")]
    if not near and dimension in ("flops", "params"):
        near = [name for name in _PREFIXES if name.casefold() == folded]
    return f" (did you mean {' or '.join(repr(number + name) for name in near)}?)" if near else ""


def _shown(value: object) -> str:
    if isinstance(value, str):
        return repr(value)
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
