"""Bring a network to a given latency by its own budget: which FLOPs budget takes exactly as long?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsa_hw.methods.costs import Cost, CostSet
from dsa_hw.methods.dsa.projection import project
from dsa_hw.methods.rounding import narrowest, round_widths

__all__ = ["Match", "match"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_HALVINGS = 12


@dataclass(frozen=True, eq=False)
class Match:
    """A limit, the widths (K,) that it gives, and what they are predicted to take, in seconds."""

    limit: float
    widths: Ints
    seconds: float


def match(
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
    """The limit on ``cost`` at which the keep ratios ``alpha`` (K,), projected to it and rounded, take ``aim`` seconds.

    Latency grows with the limit, so the limit is found by halving; every network on the way counts, the nearest wins.
    Rounding leaves gaps: where nothing on the grid comes within ``close``, a finer grid is tried, since what must
    be equal here is the latency.
    """
    costs = CostSet([cost], sizes)
    whole = float(costs.dense[0])
    found: list[Match] = []

    def at(limit: float, step: Ints, narrow: Ints) -> Match:
        limited = costs.with_limits([limit])
        widths = round_widths(project(alpha, limited, narrow / sizes), limited, step, minimum=minimum)
        return Match(limit, widths, float(latency(widths)))

    step = np.asarray(grid, np.int64)
    while True:
        narrow = narrowest(sizes, step, minimum)
        low, high = float(costs.at_widths(narrow)[0]) * (1 + 1e-9), whole
        for _ in range(_HALVINGS):
            middle = float(np.sqrt(low * high))
            found.append(at(middle, step, narrow))
            low, high = (middle, high) if found[-1].seconds < aim else (low, middle)
        best = min(found, key=lambda m: abs(np.log(m.seconds / aim)))
        if abs(best.seconds / aim - 1) <= close or (step == 1).all():
            return best
        step = np.maximum(step // 2, 1)
