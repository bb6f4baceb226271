"""The budgets of a problem as every rival sees them: what keeps them, and the most of something that still does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from dsa_hw.errors import BudgetError, InfeasibleBudgetError
from dsa_hw.methods.registry import Problem, Proposal

# Which widths exist is rounding's business; a second rule here would drift away from it.
from dsa_hw.methods.rounding import allowed_widths

__all__ = ["Floats", "Ints", "Limits", "dense_proposal"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Limits:
    """J costs with their limits, and the widths that grid and minimum allow.

    ``allowed``: K ascending arrays of widths. ``floor`` (K,): keep ratios of the smallest of them, so that whatever
    lies between the floor and 1 can also be rounded. Unless ``check`` is off, raises ``InfeasibleBudgetError`` where
    the floor is over a limit.
    """

    def __init__(self, problem: Problem, *, check: bool = True) -> None:
        count = len(problem.groups)
        if not problem.costs or len(problem.costs) != len(problem.limits):
            raise BudgetError(
                f"Each budget needs a cost and a limit; found {len(problem.costs)} and {len(problem.limits)}."
            )
        if not 0.0 <= problem.minimum <= 1.0:
            raise BudgetError(f"The smallest keep ratio must lie in [0, 1]; found {problem.minimum}.")
        self.sizes: Ints = problem.groups.sizes
        self.limits: Floats = np.array([float(limit) for limit in problem.limits])
        if not np.isfinite(self.limits).all():
            raise BudgetError(f"A limit must be a finite number; found {self.limits.tolist()}.")
        grid = np.ones(count, np.int64) if problem.grid is None else problem.grid
        steps = np.broadcast_to(np.asarray(grid, np.int64), (count,))
        self.allowed = [allowed_widths(int(c), int(g), problem.minimum) for c, g in zip(self.sizes, steps, strict=True)]
        self.floor: Floats = np.array([w[0] for w in self.allowed], np.float64) / self.sizes
        self._costs = tuple(problem.costs)
        self.dense: Floats = self.values(np.ones(count))
        if not (np.isfinite(self.dense) & (self.dense > 0.0)).all():
            raise BudgetError(f"A cost must be positive and finite at alpha = 1; found {self.dense.tolist()}.")
        self.met = bool(self.keeps(np.ones(count)))
        """Whether the dense network keeps every budget, so that there is nothing to do."""
        if check and not self.met:
            self._check_feasible()

    def _check_feasible(self) -> None:
        smallest = self.values(self.floor)
        over = np.flatnonzero(smallest > self.limits)
        if over.size:
            j = int(over[0])
            raise InfeasibleBudgetError(
                f"Budget {j} is {self.limits[j]:.6g}, but the smallest widths that the minimum and the grid allow cost "
                f"{smallest[j]:.6g} (dense: {self.dense[j]:.6g}). Ask for at least that, or allow smaller widths.",
                smallest=float(smallest[j]),
            )

    def values(self, alpha: Floats) -> Floats:
        """Costs (..., J) at keep ratios (..., K)."""
        point = torch.from_numpy(np.ascontiguousarray(alpha, np.float64))
        with torch.no_grad():
            return np.stack([np.asarray(cost.value(point), np.float64) for cost in self._costs], -1)

    def keeps(self, alpha: Floats) -> NDArray[np.bool_]:
        """Whether keep ratios (..., K) are within every limit (...)."""
        return np.asarray((self.values(alpha) <= self.limits).all(-1))

    def gradients(self, alpha: Floats) -> Floats:
        """dF_j/dalpha (J, K) at keep ratios (K,), each over its dense value; costs do not fall, so never negative."""
        rows = np.stack([np.asarray(cost.gradient(alpha), np.float64) for cost in self._costs])
        return np.maximum(rows / self.dense[:, None], 0.0)

    def clip(self, alpha: Floats) -> Floats:
        """Keep ratios between the floor and 1."""
        return np.clip(alpha, self.floor, 1.0)

    def largest(self, path: Callable[[float], Floats], high: float) -> Floats:
        """``path(t)`` with the largest t up to ``high`` that keeps the limits; ``path(0)`` is at most the floor."""
        if self.keeps(self.clip(path(high))):
            return self.clip(path(high))
        low = 0.0
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.keeps(self.clip(path(middle))) else (low, middle)
        return self.clip(path(low))

    def scaled(self, alpha: Floats) -> Floats:
        """``omega * alpha`` between the floor and 1, with the largest omega that keeps the limits."""
        top = 1.0 / max(float(alpha.min()), 1e-9) if alpha.size else 1.0
        return self.largest(lambda omega: omega * alpha, top)

    def threshold(self, importance: list[Floats], at: float | None = None) -> tuple[Ints, float]:
        """Widths (K,) after removing the least important units of all groups, as few as keep the limits; the threshold.

        One order over all units, so importances must be comparable between groups; no group falls below its floor.
        With ``at`` every unit at or below that importance goes, whatever the limits say.
        """
        owner = np.repeat(np.arange(self.sizes.size), self.sizes)
        score = np.concatenate(importance)
        floor = np.array([w[0] for w in self.allowed])
        rank = np.concatenate([np.argsort(np.argsort(-s, kind="stable"), kind="stable") for s in importance])
        removable = np.flatnonzero(rank >= floor[owner])
        # Of equal units the least one of its group goes first.
        order = removable[np.lexsort((-rank[removable], score[removable]))]

        def widths(removed: int) -> Ints:
            return np.asarray(self.sizes - np.bincount(owner[order[:removed]], minlength=self.sizes.size), np.int64)

        if at is not None:
            return widths(int(np.searchsorted(score[order], at, "right"))), at
        few, many = -1, order.size  # widths(many) is the floor, which keeps the limits
        while many - few > 1:
            middle = (few + many) // 2
            few, many = (few, middle) if self.keeps(widths(middle) / self.sizes) else (middle, many)
        return widths(many), float(score[order[many - 1]]) if many else 0.0


def dense_proposal(problem: Problem) -> Proposal:
    """Everything stays: for budgets that the dense network keeps."""
    return Proposal(np.ones(len(problem.groups)), problem.model)
