"""Find the limit on one cost at which a network takes a given latency."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dsa_hw.methods.costs import Cost, CostSet
from dsa_hw.methods.dsa.projection import project
from dsa_hw.methods.rounding import narrowest, round_widths
from dsa_hw.utils.arrays import Floats, Ints

__all__ = ["Match", "match_latency"]

_HALVINGS = 12


@dataclass(frozen=True, eq=False)
class Match:
    """A limit, the widths (K,) that it gives, and their predicted latency in seconds."""

    limit: float
    widths: Ints
    seconds: float


def match_latency(
    alpha: Floats,
    sizes: Ints,
    cost: Cost,
    latency: Callable[[Ints], float],
    aim: float,
    grid: Ints,
    *,
    minimum: float = 0.05,
    close: float = 0.01,
) -> Match:
    """Find the limit at which keep ratios, projected to it and rounded, take ``aim`` seconds.

    Latency grows with the limit, so the limit is found by bisection; the nearest network on the way is returned.
    Rounding leaves gaps: where nothing on the grid is within ``close``, a finer grid is tried, because here the
    latency must be equal.

    Args:
        alpha: Keep ratios (K,).
        sizes: Dense widths (K,).
        cost: The cost that is limited.
        latency: Predicts the seconds of a configuration.
        aim: The seconds wanted.
        grid: Step of the widths (K,).
        minimum: Smallest keep ratio.
        close: Relative difference of latencies that counts as equal.

    Returns:
        The network nearest to the aim.
    """
    dense = float(CostSet([cost], sizes).dense[0])
    found: list[Match] = []

    def at(limit: float, step: Ints, narrow: Ints) -> Match:
        costs = CostSet([cost], sizes, [limit])
        widths = round_widths(project(alpha, costs, narrow / sizes), costs, step, minimum=minimum)
        return Match(limit, widths, float(latency(widths)))

    step = np.asarray(grid, np.int64)
    while True:
        narrow = narrowest(sizes, step, minimum)
        low, high = float(CostSet([cost], sizes).at_widths(narrow)[0]) * (1 + 1e-9), dense
        for _ in range(_HALVINGS):
            middle = float(np.sqrt(low * high))
            found.append(at(middle, step, narrow))
            low, high = (middle, high) if found[-1].seconds < aim else (low, middle)
        best = min(found, key=lambda m: abs(np.log(m.seconds / aim)))
        if abs(best.seconds / aim - 1) <= close or (step == 1).all():
            return best
        step = np.maximum(step // 2, 1)
