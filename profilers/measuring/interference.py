"""Interference from other processes: how much of it the control workload detects, and how much it does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsa_hw.utils.arrays import Floats
from profilers.measuring.measurement import Samples
from profilers.measuring.rules import MeasuringRules

__all__ = ["Scan", "inflation", "readings", "sensitivity", "slope"]

_LEAST_SLOPE = 0.1  # below it, network and control do not respond to the same interference


@dataclass(frozen=True, eq=False)
class Scan:
    """Runs of the control workload back to back; every array has the shape (n,).

    Attributes:
        start: When each run began, in seconds.
        seconds: How long it took.
        waited: How long this process had waited for a processor until then, in seconds.
    """

    start: Floats
    seconds: Floats
    waited: Floats


def readings(scan: Scan, block: int) -> Floats:
    """Return the mean of every ``block`` consecutive control runs, shape (n - block + 1,)."""
    total = np.concatenate([[0.0], np.cumsum(scan.seconds)])
    return (total[block:] - total[:-block]) / block


def inflation(scans: Sequence[Scan], reference: float, rules: MeasuringRules, length: float, block: int) -> float:
    """Estimate by how much visits that pass the control test are still inflated.

    Every pair of undisturbed readings with about ``length`` seconds between them is a visit that would have been
    accepted. The control runs between the two readings show how much longer such a visit takes. The result is the
    quantile of that, over all pairs, by which the reported statistic would be off. Bursts longer than a visit leave
    undisturbed pairs and give 0. Bursts much shorter than a visit are inside every pair and cannot be avoided.

    Args:
        scans: Runs of the control workload alone.
        reference: Seconds of an undisturbed control run.
        rules: The rules by which readings are accepted, and the statistic.
        length: Seconds between the two control readings of a visit.
        block: Control runs in a reading.

    Returns:
        A share; infinity where no pair is accepted. Where every scan is shorter than a visit, the mean over all scans.
    """
    found, fits = [np.zeros(0)], False
    whole = [0.0, 0]
    for scan in scans:
        total = np.concatenate([[0.0], np.cumsum(scan.seconds)])
        whole[0] += float(total[-1])
        whole[1] += len(scan.seconds)
        if len(scan.seconds) < 2 * block + 1:
            continue
        reading = readings(scan, block)
        first = np.arange(len(reading))  # the reading before is runs first .. first + block - 1
        begin = first + block
        begin = begin[begin < len(scan.start)]
        last = np.maximum(np.searchsorted(scan.start, scan.start[begin] + length), begin + 1)  # the reading after
        inside = last < len(reading)
        first, begin, last = first[: len(begin)][inside], begin[inside], last[inside]
        fits = fits or len(first) > 0
        quiet = reading <= reference * (1 + rules.tolerance)
        span = scan.start[last] - scan.start[begin]
        held = (scan.waited[last] - scan.waited[begin]) > rules.waiting * span
        taken = quiet[first] & quiet[last] & ~held
        between = (total[last] - total[begin]) / (last - begin)
        found.append(np.maximum(between / reference - 1, 0.0)[taken])
    if not fits:
        return max(whole[0] / whole[1] / reference - 1, 0.0) if whole[1] else 0.0
    pooled = np.concatenate(found)
    return float(np.quantile(pooled, rules.order)) if len(pooled) else math.inf


def sensitivity(samples: Sequence[Samples]) -> float:
    """Return an upper bound of how many percent longer networks take when the control takes one percent longer.

    Interference through memory and cache slows networks by different amounts: a ResNet-18 slowed by a quarter of what
    the control did, a narrow MobileNetV2 by more than all of it. The bound is the pooled `slope` of all networks plus
    two standard errors, at most 1.5; it is 1 until there are enough visits to determine a slope.
    """
    found = slope(samples)
    return 1.0 if found is None else min(found[0] + 2 * found[1], 1.5)


def slope(samples: Sequence[Samples]) -> tuple[float, float] | None:
    """Fit one slope of log time over log control reading to all visits, accepted or not.

    Each network is centred on its own medians.

    Returns:
        The slope and its standard error. None where there are too few visits, and where the slope is next to zero:
        bursts in step with the visits slow the network while the control is undisturbed, and conversely.
    """
    x, y, used = [np.zeros(0)], [np.zeros(0)], 0
    for part in samples:
        _, first, count = np.unique(part.visit, return_index=True, return_counts=True)
        held = np.nan_to_num(part.wait[first]) > 0.005
        if (~held).sum() < 4:
            continue
        mean = np.add.reduceat(part.values, first) / count
        control = np.log((part.before[first] + part.after[first]) / 2)[~held]
        # Control readings far above the rest come from another kind of interference, and would dominate the slope.
        near = control <= np.quantile(control, 0.25) + 0.15
        took = np.log(mean[~held])[near]
        x.append(control[near] - np.median(control[near]))
        y.append(took - np.median(took))
        used += 1
    left, right = np.concatenate(x), np.concatenate(y)
    if len(left) < 30 or not float((left**2).sum()) > 0:
        return None
    keep = np.abs(right) <= 4 * np.median(np.abs(right)) + 1e-12
    left, right = left[keep], right[keep]
    energy = float((left**2).sum())
    if len(left) - used < 10 or not energy > 0:
        return None
    rise = float((left * right).sum()) / energy
    error = math.sqrt(float(((right - rise * left) ** 2).sum()) / (len(left) - used - 1) / energy)
    return (rise, error) if rise + 2 * error >= _LEAST_SLOPE else None
