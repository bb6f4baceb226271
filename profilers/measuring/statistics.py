"""Quantiles of runs that come in visits, and intervals for them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dsa_hw.errors import ProfileError

__all__ = ["STATISTICS", "interval", "order_of", "quantile", "resampled"]

# Interference only adds time, so what it does to a sample is in the upper part. The lower quartile stays a value of
# the undisturbed distribution until three quarters of the accepted runs are disturbed; unlike the minimum it does not
# fall with the number of runs.
STATISTICS: Mapping[str, float] = MappingProxyType({"quiet": 0.25, "median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99})

_RESAMPLES = 400


def order_of(statistic: str) -> float:
    """The quantile that a statistic's name stands for."""
    if statistic not in STATISTICS:
        raise ProfileError(f"statistic {statistic!r} is not known; choose one of {', '.join(STATISTICS)}")
    return STATISTICS[statistic]


def quantile(values: NDArray[np.float64], q: float) -> float:
    """The ``q`` quantile of ``values`` (n,), linear between order statistics."""
    return float(np.quantile(values, q))


def resampled(values: NDArray[np.float64], visits: NDArray[np.int64], q: float, seed: int = 0) -> NDArray[np.float64]:
    """Quantiles of bootstrap resamples, shape (400,).

    Runs of one visit share their moment, so whole visits are drawn, not runs. A resample is a multinomial weight per
    visit; its quantile is the first value, in order, where the cumulated weight reaches q of the total.
    """
    _, index = np.unique(visits, return_inverse=True)
    count = int(index.max()) + 1
    order = np.argsort(values, kind="stable")
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(count, np.full(count, 1 / count), _RESAMPLES)[:, index[order]]
    cumulated = np.cumsum(weights, axis=1)
    reached = cumulated >= q * cumulated[:, -1:]
    chosen: NDArray[np.float64] = values[order][np.argmax(reached, axis=1)]
    return chosen


def interval(
    values: NDArray[np.float64], visits: NDArray[np.int64], q: float, confidence: float = 0.95
) -> tuple[float, float]:
    """Confidence interval of the ``q`` quantile of ``values`` (n,) that came in ``visits`` (n,).

    The wider of two on each side: the bootstrap over visits (right when runs of a visit are alike, too narrow for few
    visits) and the order-statistic interval (exact for independent runs of any distribution: the number of runs
    below the quantile is binomial). With too few runs for the order statistics the end is the extreme run, and beyond
    the largest run nothing is known: infinity.
    """
    n = len(values)
    if n == 0:
        return 0.0, float("inf")
    tail = (1 - confidence) / 2
    ordered = np.sort(values)
    below = int(stats.binom.ppf(tail, n, q)) - 1
    above = int(stats.binom.ppf(1 - tail, n, q))
    low = float(ordered[max(below, 0)])
    high = float(ordered[above]) if above < n else float("inf")
    draws = np.quantile(resampled(values, visits, q), [tail, 1 - tail])
    return min(low, float(draws[0])), max(high, float(draws[1]))
