"""Quantiles of runs that are grouped in visits, and their confidence intervals."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from scipy import stats

from dsa_hw.errors import ProfileError
from dsa_hw.utils.arrays import Floats, Ints
from dsa_hw.utils.text import unknown_name

__all__ = ["STATISTICS", "interval", "order_of", "quantile", "resampled"]

# Interference only adds time, so it affects the upper part of a sample. The lower quartile stays a value of the
# undisturbed distribution until three quarters of the accepted runs are disturbed; in contrast to the minimum it does
# not decrease with the number of runs.
STATISTICS: Mapping[str, float] = MappingProxyType({"quiet": 0.25, "median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99})

_RESAMPLES = 400


def order_of(statistic: str) -> float:
    """Return the quantile that a statistic's name stands for."""
    if statistic not in STATISTICS:
        raise ProfileError(unknown_name("statistic", statistic, STATISTICS))
    return STATISTICS[statistic]


def quantile(values: Floats, q: float) -> float:
    """Return the ``q`` quantile of ``values`` (n,), linear between order statistics."""
    return float(np.quantile(values, q))


def resampled(values: Floats, visits: Ints, q: float, seed: int = 0) -> Floats:
    """Return quantiles of bootstrap resamples, shape (400,).

    Runs of one visit are not independent, so whole visits are drawn, not runs. A resample is a multinomial weight per
    visit; its quantile is the first value, in order, where the cumulated weight reaches q of the total.

    Args:
        values: The runs, shape (n,).
        visits: The visit of each run, shape (n,).
        q: Order of the quantile.
        seed: Seed of the resampling.
    """
    _, index = np.unique(visits, return_inverse=True)
    count = int(index.max()) + 1
    order = np.argsort(values, kind="stable")
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(count, np.full(count, 1 / count), _RESAMPLES)[:, index[order]]
    cumulated = np.cumsum(weights, axis=1)
    reached = cumulated >= q * cumulated[:, -1:]
    chosen: Floats = values[order][np.argmax(reached, axis=1)]
    return chosen


def interval(values: Floats, visits: Ints, q: float, confidence: float = 0.95) -> tuple[float, float]:
    """Return a confidence interval of the ``q`` quantile of runs that are grouped in visits.

    On each side it is the wider of two intervals: the bootstrap over visits, which is correct when the runs of a visit
    are similar but too narrow for few visits, and the order-statistic interval, which is exact for independent runs of
    any distribution because the number of runs below the quantile is binomial. With too few runs for the order
    statistics, the lower end is the smallest run and the upper end is infinity.

    Args:
        values: The runs, shape (n,).
        visits: The visit of each run, shape (n,).
        q: Order of the quantile.
        confidence: Coverage of the interval.

    Returns:
        The lower and the upper end; 0 and infinity without runs.
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
