"""Budgets as they are typed: ``latency=5ms``, ``flops=50%``, ``latency.p95=8ms``; the same in every command."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from budgets.budget import BUDGETS, Budget
from dsa_hw.errors import BudgetError

__all__ = ["parse_budget", "parse_budgets"]

_EXAMPLES = (
    "latency=5ms, latency=50%, latency.p95=8ms, flops=50%, params=2M, memory=64MiB, energy=40mJ or estimated_energy=50%"
)


def parse_budget(text: str) -> Budget:
    """``"latency=50%"`` -> ``LatencyBudget("50%")``; ``latency.p95=8ms`` limits the 95th percentile of the runs."""
    name, equals, amount = text.partition("=")
    kind, _, tail = name.strip().lower().partition(".")
    if not equals or not amount.strip():
        raise BudgetError(f"budget {text!r} has no amount; write for example {_EXAMPLES}")
    if kind not in BUDGETS:
        near = difflib.get_close_matches(kind, BUDGETS, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise BudgetError(f"budget {text!r}: {kind!r} is not a cost{hint}; write for example {_EXAMPLES}")
    options: dict[str, Any] = {}
    if tail:
        if kind != "latency" or not re.fullmatch(r"p[1-9]\d?", tail):
            raise BudgetError(f"budget {text!r}: only latency has a percentile, as in latency.p95=8ms")
        options["quantile"] = int(tail[1:]) / 100
    return BUDGETS[kind](amount.strip(), **options)


def parse_budgets(texts: Sequence[str]) -> list[Budget]:
    """Several budgets; the same kind twice is refused, since only one of the two can bind."""
    found = [parse_budget(text) for text in texts]
    for i, budget in enumerate(found):
        for other in found[:i]:
            same = type(budget) is type(other)
            if same and getattr(budget, "quantile", None) == getattr(other, "quantile", None):
                raise BudgetError(f"two budgets for the same cost, {other} and {budget}; keep the smaller one")
    return found
