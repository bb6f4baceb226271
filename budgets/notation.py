"""Budgets as text, ``latency=5ms``, ``latency.p95=8ms`` or ``memory.sram=256KiB``, and several in one argument."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from budgets.budget import BUDGETS, Budget, MemoryBudget
from dsa_hw.errors import BudgetError
from dsa_hw.utils.text import one_line, unknown_name

__all__ = ["BudgetLike", "as_budgets", "parse_budget", "parse_budgets"]

BudgetLike = Budget | str
"""A budget, or its text."""
_EXAMPLES = (
    "latency=5ms, latency=50%, latency.p95=8ms, flops=50%, params=2M, memory=64MiB, memory.sram=256KiB, "
    "memory.flash=1MiB, energy=40mJ or estimated_energy=50%"
)


def parse_budget(text: str) -> Budget:
    """Return a budget; what follows the name after a dot is a percentile of the runs, or a part of the memory.

    >>> parse_budget("flops=50%")
    FlopsBudget(amount='50%', convention='counted')
    >>> print(parse_budget("latency.p95=8ms"))
    latency <= 8 ms in 95% of runs
    >>> print(parse_budget("memory.sram.tflite-micro=256KiB"))
    SRAM (int8 arena, tflite-micro) <= 256 KiB

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
    if tail and kind == "memory":
        options = _memory_part(tail, text)
    elif tail:
        if kind != "latency" or not re.fullmatch(r"p[1-9][0-9]?", tail):
            raise BudgetError(f"Only latency has percentiles, p1 to p99, as in latency.p95=8ms; got {text!r}.")
        options["quantile"] = int(tail[1:]) / 100
    return BUDGETS[kind](amount.strip(), **options)


def _memory_part(tail: str, text: str) -> dict[str, Any]:
    """Return the options of ``sram``, ``flash``, and of either with a planner behind another dot."""
    part, dot, planner = tail.partition(".")
    if part not in ("sram", "flash") or (dot and planner not in (MemoryBudget.file_options["planner"] or ())):
        raise BudgetError(
            "Memory has the parts sram and flash, as in memory.sram=256KiB (Arm Ethos-U, as Vela plans it) or "
            f"memory.sram.tflite-micro=256KiB; got {one_line(text, 60)!r}."
        )
    return {"part": part, **({"planner": planner} if dot else {})}


def parse_budgets(texts: Sequence[str]) -> list[Budget]:
    """Return several budgets that must all be met.

    Raises:
        BudgetError: Two budgets limit the same cost, so that one of them has no effect.
    """
    found = [parse_budget(text) for text in texts]
    for i, budget in enumerate(found):
        for other in found[:i]:
            named = ("quantile", "part", "planner")
            if type(budget) is type(other) and all(getattr(budget, n, None) == getattr(other, n, None) for n in named):
                raise BudgetError(f"Two budgets limit the same cost. Keep the smaller one of {other} and {budget}.")
    return found


def as_budgets(budget: Any) -> list[Budget]:
    """Return one budget or several, or their texts, as a list.

    >>> [str(budget) for budget in as_budgets("latency=5ms, flops=50%")]
    ['latency <= 5 ms', 'FLOPs <= 50% of the dense network']

    Raises:
        BudgetError: There is none, or something is not a budget.
    """
    given = list(budget) if isinstance(budget, (list, tuple)) else [budget]
    budgets: list[Any] = []
    for each in given:
        budgets += [parse_budget(part) for part in each.split(",")] if isinstance(each, str) else [each]
    wrong = [b for b in budgets if not isinstance(b, Budget)]
    if wrong or not budgets:
        got = repr(wrong[0]) if wrong else "an empty list"
        raise BudgetError(
            f"`budget` must be a Budget or a list of Budgets, e.g. LatencyBudget('5ms') or 'latency=5ms'; got {got}."
        )
    return budgets
