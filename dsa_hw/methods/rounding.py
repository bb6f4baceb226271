"""Rounding of keep ratios to integer widths on a grid, within every budget.

The allowed widths of group k are the multiples of its grid g_k and its full width C_k. Each keep ratio lies between
two of them. Choosing one of the two for each group is a knapsack: maximise the kept importance with every cost,
predicted at the widths, within its limit. What the budgets then still allow is used for further channels, free ones
first. Costs are evaluated in batches: a search over pairs of groups is one product of a few thousand rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dsa_hw.errors import WidthError
from dsa_hw.methods.costs import Cost, CostSet
from dsa_hw.utils.arrays import Floats, Ints

__all__ = ["allowed_widths", "narrowest", "round_widths"]

# Up to this many combinations of the two neighbours are enumerated; above, local search.
_ENUMERATE = 16384
# Moves of one local search, at most.
_ROUNDS = 200
# Restarts of the local search from a perturbed best configuration.
_KICKS = 40


def round_widths(
    alpha: ArrayLike,
    costs: CostSet[Cost],
    grid: ArrayLike | None = None,
    importance: Sequence[ArrayLike] | None = None,
    minimum: ArrayLike | None = None,
) -> Ints:
    """Round keep ratios to widths within every limit.

    Without ``importance`` the kept importance of group k is alpha_k dF/dalpha_k log(width): the concave function whose
    best allocation of the cost is ``alpha`` itself. Deterministic.

    >>> import dsa_hw, torch
    >>> from dsa_hw.methods.costs import CostSet
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 4, 3))
    >>> groups = dsa_hw.find_groups(model, torch.zeros(1, 3, 8, 8))
    >>> costs = CostSet.of(dsa_hw.FlopsBudget("60%"), groups)
    >>> dsa_hw.round_widths([0.6], costs, grid=8).tolist()
    [16]

    Args:
        alpha: Keep ratios (K,).
        costs: J costs with their limits.
        grid: Step of the widths, a number or (K,); 1 if not given.
        importance: Importance of the channels of each group, K vectors (C_k,), comparable between groups.
        minimum: Smallest keep ratio, a number or (K,).

    Returns:
        Widths (K,).

    Raises:
        InfeasibleBudgetError: The smallest allowed widths exceed a limit.
        WidthError: Keep ratios, grid, minimum or importance do not fit the groups.
    """
    problem = _Problem(alpha, costs, grid, importance, minimum)
    return problem.widths(problem.top_up(problem.round()))


class _Problem:
    """The allowed widths of each group as a list; a configuration is K positions in these lists."""

    def __init__(
        self,
        alpha: ArrayLike,
        costs: CostSet[Cost],
        grid: ArrayLike | None,
        importance: Sequence[ArrayLike] | None,
        minimum: ArrayLike | None,
    ) -> None:
        self.costs, self.sizes, self.limits = costs, costs.sizes, costs.limits
        self.alpha = np.asarray(alpha, dtype=np.float64)
        count = self.sizes.size
        if self.sizes.shape != (count,) or count == 0 or self.sizes.min() < 1 or self.alpha.shape != (count,):
            raise WidthError(
                f"A keep ratio and a size of at least 1 are needed per group; got the shapes {self.alpha.shape} and "
                f"{self.sizes.shape}."
            )
        if not ((self.alpha >= 0.0) & (self.alpha <= 1.0)).all():
            raise WidthError(f"Keep ratios must lie in [0, 1]; got {self.alpha.min()} to {self.alpha.max()}.")
        steps = np.ones(count, np.int64) if grid is None else np.broadcast_to(np.asarray(grid, np.int64), (count,))
        least = np.broadcast_to(np.asarray(0.0 if minimum is None else minimum, np.float64), (count,))
        if steps.min() < 1 or not ((least >= 0.0) & (least <= 1.0)).all():
            raise WidthError(
                f"`grid` must be at least 1 and `minimum` in [0, 1]; got {steps.min()} and {least.tolist()}."
            )
        rows = zip(self.sizes, steps, least, strict=True)
        self.allowed = [allowed_widths(int(size), int(step), float(low)) for size, step, low in rows]
        self.table = _padded(self.allowed)
        self.last = np.array([len(widths) - 1 for widths in self.allowed])
        self.worth = _padded(self._worth(importance))
        # Makes several budgets comparable.
        self.unit = np.maximum(np.abs(self.limits), np.finfo(float).tiny)

    def _worth(self, importance: Sequence[ArrayLike] | None) -> list[Floats]:
        """Return the kept importance at every allowed width of every group."""
        if importance is None:
            at = np.clip(self.alpha, 1.0 / self.sizes, 1.0)
            scale = (self.costs.gradients(at) / np.abs(self.limits)[:, None]).sum(0) * at
            # Channels of a group that costs nothing still need a positive worth.
            scale = np.maximum(scale, 1e-6 * max(float(scale.max()), np.finfo(float).tiny))
            return [s * np.log(widths) for s, widths in zip(scale, self.allowed, strict=True)]
        vectors = [np.sort(np.asarray(vector, np.float64).reshape(-1))[::-1] for vector in importance]
        found = [vector.size for vector in vectors]
        if found != self.sizes.tolist() or not all(np.isfinite(v).all() and v.min() >= 0.0 for v in vectors):
            raise WidthError(
                f"Importances must be finite, non-negative and of the lengths {self.sizes.tolist()}; got {found}."
            )
        return [np.cumsum(v)[widths - 1] for v, widths in zip(vectors, self.allowed, strict=True)]

    def widths(self, position: Ints) -> Ints:
        """Return the widths (..., K) of positions (..., K)."""
        return np.asarray(self.table[np.arange(self.sizes.size), position], np.int64)

    def kept(self, position: Ints) -> Floats:
        """Return the kept importance (...) of positions (..., K)."""
        return np.asarray(self.worth[np.arange(self.sizes.size), position].sum(-1))

    def predict(self, position: Ints) -> Floats:
        """Return the costs (..., J) of positions (..., K)."""
        return self.costs.at_widths(self.widths(position))

    def keeps(self, cost: Floats) -> NDArray[np.bool_]:
        """Return whether costs (..., J) are within the limits (...)."""
        return np.asarray((cost <= self.limits).all(-1))

    def round(self) -> Ints:
        """Return the best choice between the two allowed neighbours of every keep ratio."""
        wanted = self.alpha * self.sizes
        # A keep ratio that came from a width must give that width, whatever its last bit is.
        low = np.array([max(np.searchsorted(w, x * (1 + 1e-12), "right") - 1, 0) for w, x in self._pairs(wanted)])
        high = np.array([min(np.searchsorted(w, x * (1 - 1e-12), "left"), len(w) - 1) for w, x in self._pairs(wanted)])
        low = self._shrink_to_fit(low)
        open_groups = np.flatnonzero(high > low)
        if 2**open_groups.size <= _ENUMERATE and int((high - low).max()) <= 1:
            bits = np.arange(2**open_groups.size)[:, None] >> np.arange(open_groups.size) & 1
            choices = np.tile(low, (len(bits), 1))
            choices[:, open_groups] += bits
            return self._best(choices)
        return self._search(low, high)

    def _search(self, low: Ints, high: Ints) -> Ints:
        """Search locally from several greedy starts, then from perturbed copies of the best; seeded."""
        prices = [None, *np.eye(len(self.costs))] if len(self.costs) > 1 else [None]
        found = [self._exchange(self._fill(low, high, price), low, high) for price in prices]
        best = max(found, key=lambda position: float(self.kept(position)))
        rng = np.random.default_rng(0)
        movable = np.flatnonzero(high > low)
        for _ in range(_KICKS):
            kicked = best.copy()
            groups = rng.choice(movable, size=min(6, movable.size), replace=False)
            kicked[groups] = low[groups] + high[groups] - kicked[groups]
            raised = rng.permutation(np.flatnonzero(kicked > low))
            while not self.keeps(self.predict(kicked)):
                kicked[raised[0]], raised = low[raised[0]], raised[1:]
            kicked = self._exchange(self._fill(kicked, high), low, high)
            if float(self.kept(kicked)) > float(self.kept(best)):
                best = kicked
        return best

    def _pairs(self, wanted: Floats) -> list[tuple[Ints, float]]:
        return list(zip(self.allowed, wanted.tolist(), strict=True))

    def top_up(self, position: Ints) -> Ints:
        """Use what the budgets still allow, the most kept importance per cost first."""
        return self._fill(position, self.last)

    def _best(self, choices: Ints) -> Ints:
        cost = self.predict(choices)
        good = np.flatnonzero(self.keeps(cost))
        worth, used = self.kept(choices[good]), (cost[good] / self.unit).max(-1)
        order = np.lexsort((used, -worth))  # of equally good configurations the cheapest
        return np.asarray(choices[good[order[0]]])

    def _fill(self, position: Ints, high: Ints, weights: Floats | None = None) -> Ints:
        """Widen one group at a time, the most kept importance per cost first, while the limits allow it.

        With several budgets the cost is their largest, or their sum with ``weights`` (J,), in units of the limits.
        """
        position = position.copy()
        here = self.predict(position)
        while True:
            groups, jumps = self._raises(position, high)
            if groups.size == 0:
                return position
            trial = np.tile(position, (groups.size, 1))
            trial[np.arange(groups.size), groups] += jumps
            cost = self.predict(trial)
            fits = self.keeps(cost)
            if not fits.any():
                return position
            gain = self.kept(trial) - self.kept(position)
            more = (cost - here) / self.unit
            price = np.maximum(more.max(-1) if weights is None else more @ weights, 0.0)
            score = np.where(fits, gain / np.maximum(price, 1e-15), -np.inf)
            pick = int(np.lexsort((groups, -jumps, -score))[0])
            position, here = trial[pick], cost[pick]

    def _raises(self, position: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return groups and by how many allowed widths they can grow: 1, or 2, which may cost less on a staircase."""
        pairs = [(k, j) for j in (1, 2) for k in range(self.sizes.size) if position[k] + j <= high[k]]
        return np.array([k for k, _ in pairs], np.int64), np.array([j for _, j in pairs], np.int64)

    def _exchange(self, position: Ints, low: Ints, high: Ints) -> Ints:
        """Move one or two groups within their range while that improves the kept importance."""
        for _ in range(_ROUNDS):
            flip = np.where(position > low, -1, np.where(high > position, 1, 0))
            movable = np.flatnonzero(flip)
            first, second = np.triu_indices(movable.size, 0)
            # A pair that narrows both groups cannot be better.
            useful = (flip[movable[first]] > 0) | (flip[movable[second]] > 0)
            first, second = first[useful], second[useful]
            if first.size == 0:
                break
            trial = np.tile(position, (first.size, 1))
            rows = np.arange(first.size)
            trial[rows, movable[first]] += flip[movable[first]]
            different = first != second
            trial[rows[different], movable[second[different]]] += flip[movable[second[different]]]
            gain = self.kept(trial) - self.kept(position)
            better = np.flatnonzero(gain > 1e-12 * abs(float(self.kept(position))))
            better = better[np.argsort(-gain[better], kind="stable")]
            fits = self.keeps(self.predict(trial[better])) if better.size else np.zeros(0, bool)
            if not fits.any():
                break
            position = trial[better[int(fits.argmax())]]
        return position

    def _shrink_to_fit(self, position: Ints) -> Ints:
        """Narrow groups, the least kept importance per saved cost first, until every limit is met."""
        position = position.copy()
        while True:
            here = self.predict(position)
            if self.keeps(here):
                return position
            groups = np.flatnonzero(position > 0)
            if groups.size == 0:
                raise self.costs.infeasible(here)
            trial = np.tile(position, (groups.size, 1))
            trial[np.arange(groups.size), groups] -= 1
            over = here > self.limits
            saved = ((here - self.predict(trial)) / self.unit)[:, over].sum(-1)
            lost = self.kept(position) - self.kept(trial)
            # On the flat part of a staircase no group saves anything; then narrow the widest.
            score = np.where(saved > 0.0, lost / np.maximum(saved, 1e-300), 1e300 - self.widths(position)[groups])
            position = trial[int(np.argmin(score))]


def allowed_widths(size: int, step: int, least: float) -> Ints:
    """Return the multiples of ``step`` and the full width that are at least 1 and ``least * size``, ascending."""
    bottom = max(1, int(np.ceil(least * size * (1.0 - 1e-12))))
    widths = np.arange(step, size + 1, step, dtype=np.int64)
    return np.union1d(widths[widths >= bottom], [size]).astype(np.int64)


def narrowest(sizes: Ints, grid: ArrayLike | None, minimum: float) -> Ints:
    """Return the smallest allowed width of every group (K,)."""
    steps = np.broadcast_to(np.asarray(1 if grid is None else grid, np.int64), sizes.shape)
    pairs = zip(sizes.tolist(), steps.tolist(), strict=True)
    return np.array([allowed_widths(size, step, minimum)[0] for size, step in pairs], np.int64)


def _padded(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    table = np.zeros((len(rows), max(len(row) for row in rows)), rows[0].dtype)
    for k, row in enumerate(rows):
        table[k, : len(row)] = row
    return table
