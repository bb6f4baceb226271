"""Budgets on the command line: ``latency=5ms``, ``flops=50%``, ``latency.p95=8ms``, ``latency=30%..90%:7``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from budgets.budget import BUDGETS, Budget
from dsa_hw.errors import BudgetError
from dsa_hw.utils.text import one_line, unknown_name

__all__ = ["expand_budgets", "parse_budget", "parse_budgets"]

_EXAMPLES = (
    "latency=5ms, latency=50%, latency.p95=8ms, flops=50%, params=2M, memory=64MiB, energy=40mJ or estimated_energy=50%"
)
_RANGE = re.compile(
    r"(?P<low>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[^\d.\s]*)\.\.(?P<high>[0-9]+(?:\.[0-9]+)?)\s*(?P<end>[^\d.\s:]+)"
    r":(?P<count>[0-9]{1,4})"
)
_MOST = 100


def parse_budget(text: str) -> Budget:
    """Return a budget; a percentile after the name limits that percentile of the runs.

    >>> parse_budget("flops=50%")
    FlopsBudget(amount='50%', convention='counted')
    >>> print(parse_budget("latency.p95=8ms"))
    latency <= 8 ms in 95% of runs

    Raises:
        BudgetError: The text is not a budget.
    """
    name, equals, amount = text.partition("=")
    kind, _, tail = name.strip().lower().partition(".")
    if not equals or not amount.strip():
        raise BudgetError(f"A budget has the form COST=AMOUNT, for example {_EXAMPLES}; got {one_line(text, 60)!r}.")
    if kind not in BUDGETS:
        raise BudgetError(unknown_name("cost", kind, BUDGETS))
    options: dict[str, Any] = {}
    if tail:
        if kind != "latency" or not re.fullmatch(r"p[1-9][0-9]?", tail):
            raise BudgetError(f"Only latency has percentiles, p1 to p99, as in latency.p95=8ms; got {text!r}.")
        options["quantile"] = int(tail[1:]) / 100
    return BUDGETS[kind](amount.strip(), **options)


def parse_budgets(texts: Sequence[str]) -> list[Budget]:
    """Return several budgets that must all be met.

    Raises:
        BudgetError: Two budgets limit the same cost, so that one of them has no effect.
    """
    found = [parse_budget(text) for text in texts]
    for i, budget in enumerate(found):
        for other in found[:i]:
            same = type(budget) is type(other)
            if same and getattr(budget, "quantile", None) == getattr(other, "quantile", None):
                raise BudgetError(f"Two budgets limit the same cost. Keep the smaller one of {other} and {budget}.")
    return found


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
