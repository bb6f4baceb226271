"""Budgets on the command line: those of `budgets.notation`, and ranges, ``latency=30%..90%:7``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from budgets.budget import Budget
from budgets.notation import parse_budget, parse_budgets
from dsa_hw.errors import BudgetError
from dsa_hw.utils.text import one_line

__all__ = ["expand_budgets", "parse_budget", "parse_budgets"]

_RANGE = re.compile(
    r"(?P<low>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[^\d.\s]*)\.\.(?P<high>[0-9]+(?:\.[0-9]+)?)\s*(?P<end>[^\d.\s:]+)"
    r":(?P<count>[0-9]{1,4})"
)
_MOST = 100


def expand_budgets(texts: Sequence[str]) -> list[Budget]:
    """Return alternative budgets; a range stands for several, evenly spaced.

    >>> [str(budget.quantity) for budget in expand_budgets(["latency=30%..90%:3", "flops=50%"])]
    ['30%', '60%', '90%', '50%']

    Raises:
        BudgetError: A text is neither a budget nor a range.
    """
    found = []
    for text in texts:
        kind, _, amount = text.partition("=")
        if ".." not in amount:
            found.append(parse_budget(text))
            continue
        match = _RANGE.fullmatch(amount.strip())
        if match is None or match["unit"] not in ("", match["end"]):
            raise BudgetError(
                f"A range has the form latency=30%..90%:7 or latency=2ms..8ms:4; got {one_line(text, 60)!r}."
            )
        low, high, count = float(match["low"]), float(match["high"]), int(match["count"])
        if not (low < high and 2 <= count <= _MOST):
            raise BudgetError(f"A range goes up and has 2 to {_MOST} points, as in latency=30%..90%:7; got {text!r}.")
        steps = (low + (high - low) * i / (count - 1) for i in range(count))
        found += [parse_budget(f"{kind}={step:.6g}{match['end']}") for step in steps]
    return found
