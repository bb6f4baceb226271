"""Search for integer widths near given keep ratios that use the budgets.

There are two kinds of costs here. The cost models have gradients and define the direction; the corrected costs know
what was measured and define how far to go. The limits of the models are moved until the corrected cost of the rounded
network is right. So the search has one dimension, and its networks are as near to the keep ratios as rounding allows.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
import torch

from dsa_hw.methods.costs import Cost, CostSet, Valued
from dsa_hw.methods.dsa.projection import project
from dsa_hw.methods.rounding import narrowest, round_widths
from dsa_hw.utils.arrays import Floats, Ints

__all__ = ["WidthSearch"]

_TRIES = 8  # limits that a search tries
_MANY = 64  # above this number of groups rounding is fine enough, and their pairs are too many to try


class WidthSearch:
    """The networks near given keep ratios, from the narrowest to the dense one."""

    def __init__(self, alpha: Floats, sizes: Ints, models: Sequence[Cost], grid: Ints, minimum: float = 0.05) -> None:
        """Set up the search.

        Args:
            alpha: Keep ratios (K,).
            sizes: Dense widths (K,).
            models: J costs with gradients.
            grid: Step of the widths (K,).
            minimum: Smallest keep ratio.
        """
        self.alpha, self.sizes, self.models, self.grid, self.minimum = alpha, sizes, models, grid, minimum
        self.least = narrowest(sizes, grid, minimum)

    def at(self, limits: Floats) -> Ints:
        """Return widths (K,) within limits (J,) on the models."""
        near = self._project(limits)
        return round_widths(near, CostSet(self.models, self.sizes, limits), self.grid, minimum=self.minimum)

    def search(self, costs: CostSet[Valued], enough: float) -> Ints:
        """Find widths whose costs are within their limits and use them well.

        Args:
            costs: J corrected costs with their limits.
            enough: Share of a limit that is enough to stop.

        Returns:
            Widths (K,).

        Raises:
            InfeasibleBudgetError: The narrowest network is not within the limits.
        """
        costs.check_feasible(self.least / self.sizes)
        aims, narrow = costs.limits, costs.at_widths(self.least)
        bottom = CostSet(self.models, self.sizes).at_widths(self.least) * (1 + 1e-9)
        point = torch.from_numpy(self._project(np.maximum(aims, bottom)))
        with torch.no_grad():
            ratios = [float(m.value(point) / c.value(point)) for m, c in zip(self.models, costs.costs, strict=True)]
        limits, low, high, scale = aims * np.array(ratios), 0.0, np.inf, 1.0
        best, used = self.least, float((narrow / aims).max())
        for _ in range(_TRIES):
            widths = self.at(np.maximum(scale * limits, bottom))
            share = float((costs.at_widths(widths) / aims).max())
            if used < share <= 1.0:
                best, used = widths, share
            if enough <= share <= 1.0 or (widths == (self.sizes if share <= 1.0 else self.least)).all():
                break
            # A secant step, as if cost were proportional to the limit, and halving where that leaves the bracket.
            low, high = (scale, high) if share <= 1.0 else (low, scale)
            scale *= 0.5 * (1.0 + enough) / share
            if not low < scale < high:
                scale = 0.5 * (low + high) if np.isfinite(high) else 1.02 * low
        return self._fill(best, costs, enough)

    def neighbour(
        self,
        widths: Ints,
        costs: CostSet[Valued],
        window: tuple[float, float],
        seen: Container[tuple[int, ...]],
    ) -> Ints | None:
        """Find a small change of given widths that uses a certain share of the limits.

        Args:
            widths: Widths (K,) to change.
            costs: J corrected costs with their limits.
            window: Smallest and largest share to use. The middle is preferred: an error to either side does no harm.
            seen: Configurations to avoid.

        Returns:
            Widths (K,), or None where there are none.
        """
        if self.sizes.size > _MANY:
            return None
        rows = np.vstack([self._singles(widths, self.grid), self._pairs(widths)])
        rows = rows[[tuple(row) not in seen for row in rows.tolist()]]
        if not len(rows):
            return None
        use = self._use(rows, costs)
        middle, half = 0.5 * (window[0] + window[1]), 0.5 * (window[1] - window[0])
        for allowed in (0.5 * half, half):
            good = np.flatnonzero(np.abs(use - middle) <= allowed + 1e-9)
            if good.size:
                return np.asarray(rows[good[self._nearest(rows[good])]])
        return None

    def _project(self, limits: Floats) -> Floats:
        return project(self.alpha, CostSet(self.models, self.sizes, limits), self.least / self.sizes)

    def _fill(self, widths: Ints, costs: CostSet[Valued], enough: float) -> Ints:
        """Change ``widths`` a little so that they use ``enough`` of the limits.

        First by other widths on the grid (one group up, another one down), then by a finer step for a single group.
        Off the grid the device is slower than the model predicts; the next measurement shows by how much.
        """
        best = float(self._use(widths, costs))
        steps = [self.grid] if self.sizes.size <= _MANY else []
        while steps[-1:] and (steps[-1] > 1).any():
            steps.append(np.maximum(steps[-1] // 2, 1))
        start = widths
        for number, step in enumerate(steps):
            if best >= enough or (widths == self.sizes).all():
                break
            if number == 1:
                start = widths  # from here on one group, and one only, leaves the grid
            rows = self._singles(start, step) if number else self._pairs(start)
            if len(rows):
                found = self._use(rows, costs)
                good = np.flatnonzero(found >= enough)
                pick = int(good[self._nearest(rows[good])]) if good.size else int(np.argmax(found))
                if found[pick] > best:
                    widths, best = rows[pick], float(found[pick])
        return widths

    def _use(self, rows: Ints, costs: CostSet[Valued]) -> Floats:
        """Return how much of the limits configurations (..., K) use; -inf where one is exceeded."""
        share = costs.at_widths(rows) / costs.limits
        return np.where((share <= 1).all(-1), share.max(-1), -np.inf)

    def _nearest(self, rows: Ints) -> int:
        """Return the index of the configuration (R, K) nearest to the keep ratios, by relative distance."""
        wanted = np.maximum(self.alpha * self.sizes, 1.0)
        return int(np.argmin((np.log(rows / wanted) ** 2).sum(-1)))

    def _pairs(self, widths: Ints) -> Ints:
        """Return all configurations (R, K) with one group up by 1 to 3 steps and another down by 1 to 3."""
        rows = []
        for up in range(widths.size):
            for raised in (1, 2, 3):
                higher = widths[up] + raised * self.grid[up]
                if higher > self.sizes[up]:
                    break
                for down in range(widths.size):
                    for lowered in (1, 2, 3):
                        lower = widths[down] - lowered * self.grid[down]
                        if down == up or lower < self.least[down]:
                            break
                        row = widths.copy()
                        row[up], row[down] = higher, lower
                        rows.append(row)
        return np.array(rows, np.int64).reshape(-1, widths.size)

    def _singles(self, widths: Ints, step: Ints) -> Ints:
        """Return all configurations (R, K) with one group widened by multiples of its step."""
        rows = []
        for k in range(widths.size):
            for width in range(int(widths[k]) + int(step[k]), int(self.sizes[k]), int(step[k])):
                row = widths.copy()
                row[k] = width
                rows.append(row)
        return np.array(rows, np.int64).reshape(-1, widths.size)
