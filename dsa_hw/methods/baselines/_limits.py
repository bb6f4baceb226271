"""The widths that a problem allows, and the most of something that keeps its budgets: what all baselines need."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from dsa_hw.errors import BudgetError
from dsa_hw.methods.baselines._units import ranks
from dsa_hw.methods.costs import last_feasible
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.methods.rounding import allowed_widths
from dsa_hw.utils.arrays import Floats, Ints

__all__ = ["Limits", "dense_proposal"]


class Limits:
    """The costs of a problem, and the widths that its grid and minimum allow.

    Attributes:
        costs: The costs with their limits.
        sizes: Widths (K,) of the dense network.
        allowed: K ascending arrays of widths.
        floor: Keep ratios (K,) of the smallest allowed widths. Everything between the floor and 1 can be rounded.
        met: Whether the dense network keeps every budget, so that there is nothing to do.
    """

    def __init__(self, problem: Problem, *, check: bool = True) -> None:
        """Find the allowed widths; with ``check``, raise InfeasibleBudgetError where the floor exceeds a limit."""
        if not 0.0 <= problem.minimum <= 1.0:
            raise BudgetError(f"The smallest keep ratio must lie in [0, 1]; got {problem.minimum}.")
        self.costs = problem.costs
        self.sizes: Ints = problem.groups.sizes
        steps = np.broadcast_to(np.asarray(1 if problem.grid is None else problem.grid, np.int64), self.sizes.shape)
        self.allowed = [allowed_widths(int(c), int(g), problem.minimum) for c, g in zip(self.sizes, steps, strict=True)]
        self.floor: Floats = np.array([w[0] for w in self.allowed], np.float64) / self.sizes
        self.met = bool(self.costs.keeps(np.ones(self.sizes.size)))
        if check and not self.met:
            self.costs.check_feasible(self.floor)

    def clip(self, alpha: Floats) -> Floats:
        """Clip keep ratios to between the floor and 1."""
        return np.clip(alpha, self.floor, 1.0)

    def nearest(self, alpha: Floats) -> Ints:
        """Return the nearest whole widths (K,), at least 1."""
        return np.maximum(np.rint(alpha * self.sizes).astype(np.int64), 1)

    def largest(self, path: Callable[[float], Floats], high: float) -> Floats:
        """Return ``path(t)`` with the largest t up to ``high`` that keeps the limits; ``path(0)`` must keep them."""
        return last_feasible(lambda t: self.clip(path(t)), self.costs.keeps, high)

    def scaled(self, alpha: Floats) -> Floats:
        """Return ``omega * alpha`` between the floor and 1, with the largest omega that keeps the limits."""
        top = 1.0 / max(float(alpha.min()), 1e-9) if alpha.size else 1.0
        return self.largest(lambda omega: omega * alpha, top)

    def threshold(self, importance: list[Floats], at: float | None = None) -> tuple[Ints, float]:
        """Remove the least important channels of all groups, as few as keep the limits.

        Args:
            importance: K arrays (C_k,), comparable between groups. No group falls below its floor.
            at: Remove every channel of at most this importance instead, whatever the limits are.

        Returns:
            Widths (K,) and the importance of the last channel that was removed.
        """
        owner = np.repeat(np.arange(self.sizes.size), self.sizes)
        score = np.concatenate(importance)
        floor = np.array([w[0] for w in self.allowed])
        rank = np.concatenate(ranks(importance))
        removable = np.flatnonzero(rank >= floor[owner])
        # Of equally important channels the last one of its group goes first.
        order = removable[np.lexsort((-rank[removable], score[removable]))]

        def widths(removed: int) -> Ints:
            return np.asarray(self.sizes - np.bincount(owner[order[:removed]], minlength=self.sizes.size), np.int64)

        if at is not None:
            return widths(int(np.searchsorted(score[order], at, "right"))), at
        # Removing all of ``order`` leaves the floor, which keeps the limits.
        few = bisect_left(range(order.size), True, key=lambda n: bool(self.costs.keeps(widths(n) / self.sizes)))
        return widths(few), float(score[order[few - 1]]) if few else 0.0


def dense_proposal(problem: Problem) -> Proposal:
    """Return the proposal that keeps every channel, for budgets that the dense network meets."""
    return Proposal(np.ones(len(problem.groups)), problem.model)
