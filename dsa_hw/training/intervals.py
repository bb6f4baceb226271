"""Confidence intervals of a metric that is the mean of a score over inputs, and of the difference of two networks.

Scores that are all 0 or 1, such as correct predictions, get score intervals, which keep their coverage with few inputs
and near 0 and 1; other scores get Student's t. Both networks are scored on the same inputs, so differences are paired.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from dsa_hw.utils.arrays import Floats

__all__ = ["Interval", "difference_interval", "mean_interval", "ratio_interval", "share_interval"]


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; an end that is not bounded is infinite."""

    value: float
    low: float
    high: float


def share_interval(count: int, total: int, confidence: float) -> Interval:
    """Return ``count / total`` with the interval of Wilson (1927), the binomial proportions that a score test accepts.

    >>> found = share_interval(9, 10, 0.95)
    >>> round(found.low, 3), round(found.high, 3)
    (0.596, 0.982)

    Args:
        count: Successes.
        total: Trials, at least 1.
        confidence: Of the interval.
    """
    z, p = _normal(confidence), count / total
    centre = (p + z**2 / (2 * total)) / (1 + z**2 / total)
    reach = z / (1 + z**2 / total) * math.sqrt(p * (1 - p) / total + z**2 / (4 * total**2))
    # At 0 and 1 the ends are exact; rounding must not move them across the value.
    return Interval(p, min(max(centre - reach, 0.0), p), max(min(centre + reach, 1.0), p))


def mean_interval(scores: Floats, confidence: float) -> Interval:
    """Return the mean of scores (N,) with its interval: Wilson's if all are 0 or 1, else Student's t."""
    if _are_binary(scores):
        return share_interval(int(scores.sum()), len(scores), confidence)
    return _student(scores, float(scores.mean()), confidence)


def difference_interval(a: Floats, b: Floats, confidence: float) -> Interval:
    """Return the mean of ``a - b`` over the same inputs, with its interval.

    For scores of 0 and 1 it is that of Bonett and Price (2012): Wald's, after one more input of each kind on which the
    two differ. It has a width even where they differ nowhere. Other scores have Student's t of the differences.

    Args:
        a: Scores of one network (N,).
        b: Scores of the other on the same inputs (N,).
        confidence: Of the interval.
    """
    difference = np.asarray(a, np.float64) - b
    value = float(difference.mean())
    if not (_are_binary(a) and _are_binary(b)):
        return _student(difference, value, confidence)
    total = len(difference) + 2
    won, lost = (difference > 0).sum() + 1, (difference < 0).sum() + 1
    centre = float(won - lost) / total
    reach = _normal(confidence) * math.sqrt(((won + lost) / total - centre**2) / total)
    return Interval(value, max(min(centre - reach, value), -1.0), min(max(centre + reach, value), 1.0))


def ratio_interval(parts: Floats, confidence: float) -> Interval:
    """Return the mean over outputs of sqrt(sum of errors / sum of squares), linearised about the sums for its interval.

    Args:
        parts: Squared error and squared output of each input and output, shape (N, outputs, 2).
        confidence: Of the interval.
    """
    mean = parts.mean(0)  # (outputs, 2)
    root = np.sqrt(mean[:, 0] / mean[:, 1])
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(root > 0, 0.5 / (root * mean[:, 1]), 0.0)
    influence = (slope * (parts[..., 0] - root**2 * parts[..., 1])).mean(1)
    found = _student(influence, float(root.mean()), confidence)
    return Interval(found.value, max(found.low, 0.0), found.high)


def _student(values: Floats, centre: float, confidence: float) -> Interval:
    count = len(values)
    if count < 2:
        return Interval(centre, -math.inf, math.inf)
    quantile = float(stats.t.ppf(0.5 + confidence / 2, count - 1))
    reach = quantile * float(values.std(ddof=1)) / math.sqrt(count)
    return Interval(centre, centre - reach, centre + reach)


def _normal(confidence: float) -> float:
    return float(stats.norm.ppf(0.5 + confidence / 2))


def _are_binary(scores: Floats) -> bool:
    return bool(np.isin(scores, (0.0, 1.0)).all())
