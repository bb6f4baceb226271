"""Estimates on a logarithmic scale, with errors that add up.

Runs are grouped in blocks: in each block the networks are loaded again and visited in turns. A block has one value, the
median over its runs, and the scatter of these values contains what differs between runs and between loads. What
differs between processes and between hours is added by `profilers.measuring.sittings`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from dsa_hw.errors import ProfileError
from dsa_hw.utils.arrays import Floats, Ints
from dsa_hw.utils.text import unknown_name

__all__ = [
    "PRIOR_BLOCK", "STATISTICS", "Estimate", "confidence_at_look", "mean_of_blocks", "order_of",
    "paired", "pooled_variance", "quantile", "quantile_estimate", "runs_for",
]  # fmt: skip

# Interference only adds time, so the lower quartile of the dense network's runs is near its undisturbed time.
STATISTICS: Mapping[str, float] = MappingProxyType({"quiet": 0.25, "median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99})

PRIOR_BLOCK = 0.01
"""Standard deviation of a block that is assumed until there are enough blocks to know it."""
_PRIOR_FREEDOM = 4.0  # how many degrees of freedom that assumption, or the pooled value, counts for


def order_of(statistic: str) -> float:
    """Return the quantile that a statistic's name stands for."""
    if statistic not in STATISTICS:
        raise ProfileError(unknown_name("statistic", statistic, STATISTICS))
    return STATISTICS[statistic]


def paired(statistic: str) -> bool:
    """Return whether a statistic is a typical value, measured as a ratio; tails are quantiles of the runs themselves.

    >>> paired("quiet"), paired("p95")
    (True, False)
    """
    return order_of(statistic) <= 0.5


def quantile(values: Floats, q: float) -> float:
    """Return the ``q`` quantile of ``values`` (n,), linear between order statistics."""
    return float(np.quantile(values, q))


@dataclass(frozen=True)
class Estimate:
    """An estimated positive number: the logarithm is normal around ``log``, up to the error of its variance.

    >>> [round(end, 3) for end in Estimate(math.log(2.0), 1e-4, 30).interval()]
    [1.96, 2.041]

    Attributes:
        log: Natural logarithm of the value.
        variance: Of ``log``.
        freedom: Degrees of freedom with which the variance is known.
    """

    log: float
    variance: float = 0.0
    freedom: float = math.inf

    @property
    def value(self) -> float:
        """The number."""
        return math.exp(self.log)

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Return the interval that contains the number with this confidence (Student's t)."""
        if not self.variance > 0:
            return self.value, self.value
        from scipy import special  # takes longer to import than a command's help takes to print

        reach = float(special.stdtrit(min(self.freedom, 1e9), (1 + confidence) / 2)) * math.sqrt(self.variance)
        return math.exp(self.log - reach), math.exp(min(self.log + reach, 700.0))

    def halfwidth(self, confidence: float = 0.95) -> float:
        """Return half of the interval's length over the value."""
        low, high = Estimate(0.0, self.variance, self.freedom).interval(confidence)  # the value may underflow
        return (high - low) / 2

    def times(self, other: Estimate) -> Estimate:
        """Return the product with an independent number."""
        return Estimate(self.log + other.log, *_added((self.variance, self.freedom), (other.variance, other.freedom)))

    def over(self, other: Estimate) -> Estimate:
        """Return the quotient by an independent number."""
        return self.times(Estimate(-other.log, other.variance, other.freedom))

    def widened(self, variance: float, freedom: float) -> Estimate:
        """Return the same value with a further, independent error."""
        return Estimate(self.log, *_added((self.variance, self.freedom), (variance, freedom)))


def _added(*parts: tuple[float, float]) -> tuple[float, float]:
    """Add variances; the degrees of freedom follow Welch and Satterthwaite."""
    total = sum(variance for variance, _ in parts)
    if not total > 0:
        return 0.0, math.inf
    rest = sum(variance**2 / freedom for variance, freedom in parts)
    return total, total**2 / rest if rest > 0 else math.inf


def pooled_variance(groups: Iterable[Floats]) -> tuple[float, float]:
    """Return the variance of values around the mean of their group, over all groups, and its degrees of freedom.

    The prior `PRIOR_BLOCK` counts for four degrees of freedom, so that a few groups give a plausible value too.
    """
    total, freedom = _PRIOR_FREEDOM * PRIOR_BLOCK**2, _PRIOR_FREEDOM
    for values in groups:
        if len(values) > 1:
            total += float(((values - values.mean()) ** 2).sum())
            freedom += len(values) - 1
    return total / freedom, freedom


def mean_of_blocks(values: Sequence[float] | Floats, pooled: float = PRIOR_BLOCK**2) -> Estimate:
    """Return the mean of block values (logarithms).

    Two or three blocks know their own variance badly. It is therefore moderated: the variance ``pooled`` over other
    networks counts for four degrees of freedom.
    """
    array = np.asarray(values, np.float64)
    own = float(((array - array.mean()) ** 2).sum())
    freedom = _PRIOR_FREEDOM + len(array) - 1
    return Estimate(float(array.mean()), (_PRIOR_FREEDOM * pooled + own) / freedom / len(array), freedom)


def runs_for(q: float) -> int:
    """Return how many runs the ``q`` quantile needs: with fewer, all of them may be below it (2.5%).

    >>> runs_for(0.5), runs_for(0.95), runs_for(0.99)
    (6, 72, 368)
    """
    return math.ceil(math.log(0.025) / math.log(q))


def quantile_estimate(values: Floats, block: Ints, q: float) -> Estimate:
    """Return a quantile of the runs as an estimate.

    Its variance is the larger of two: that of the order statistics, which is exact for independent runs of any
    distribution, and that of the quantiles of the blocks.
    """
    from scipy import stats

    n = len(values)
    ordered = np.sort(values)
    low, high = int(stats.binom.ppf(0.025, n, q)), int(stats.binom.ppf(0.975, n, q))
    reach = math.log(ordered[min(high, n - 1)] / ordered[max(low - 1, 0)]) / 2 / 1.96
    if n < runs_for(q):  # the tail was not seen: the largest run bounds it from below only
        reach *= 3
    each = np.asarray([np.log(np.quantile(values[block == b], q)) for b in np.unique(block)])
    between = float(each.var(ddof=1)) / len(each) if len(each) > 1 else 0.0
    freedom = max(len(each) - 1, _PRIOR_FREEDOM)
    return Estimate(math.log(quantile(values, q)), max(reach**2, between), freedom)


def confidence_at_look(confidence: float, look: int) -> float:
    """Return the confidence to use at the ``look``-th look at growing data; 0 stands for a single look.

    The error rate is divided among the looks as 1/2, 1/6, 1/12, ..., which adds up to 1. By the union bound, all
    intervals together contain the value with the stated confidence, whenever measuring stops.

    >>> [round(confidence_at_look(0.9, look), 3) for look in (0, 1, 2)]
    [0.9, 0.95, 0.983]
    """
    return 1 - (1 - confidence) / (look * (look + 1)) if look else confidence
