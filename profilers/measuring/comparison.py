"""Which of two measured networks is faster."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsa_hw.errors import ProfileError
from profilers.measuring import statistics
from profilers.measuring.measurement import Measurement

__all__ = ["MeasurementComparison", "compare_measurements"]


@dataclass(frozen=True)
class MeasurementComparison:
    """``ratio`` is b over a (below 1: b is faster) with its 95 % interval; ``verdict`` says what b is."""

    verdict: str
    ratio: float
    low: float
    high: float
    reason: str = ""

    def __str__(self) -> str:
        text = f"{self.verdict}: {self.ratio:.4f} times as long [{self.low:.4f}, {self.high:.4f}]"
        return f"{text}; {self.reason}" if self.reason else text


def compare_measurements(a: Measurement, b: Measurement, *, margin: float = 0.01) -> MeasurementComparison:
    """Is ``b`` "faster" or "slower" than ``a``, the "same" within ``margin``, or "cannot tell"?

    The ratio of the two statistics is bootstrapped over visits, both sides independently. An interval wholly on one
    side of 1 by more than nothing decides; one wholly within the margin is the same; anything else cannot be told.
    """
    if a.rules.statistic != b.rules.statistic:
        raise ProfileError(
            f"a is a {a.rules.statistic}, b a {b.rules.statistic}; compare measurements of the same statistic"
        )
    doubts = [f"{m.what}: {m.doubt}" for m in (a, b) if m.doubt]
    if a.target != b.target:
        doubts.append(f"different targets, {a.target} and {b.target}")
    if not a.runs or not b.runs:
        return MeasurementComparison("cannot tell", float("nan"), 0.0, float("inf"), "; ".join(doubts))
    draws = [statistics.resampled(*m._runs, m.rules.order, seed=i) for i, m in enumerate((a, b))]
    low, high = (float(v) for v in np.quantile(draws[1] / draws[0], [0.025, 0.975]))
    ratio = b.seconds / a.seconds
    low, high = min(low, ratio), max(high, ratio)
    if any(m.doubt for m in (a, b)):
        verdict = "cannot tell"
    elif low >= 1 - margin and high <= 1 + margin:
        verdict = "same"
    elif high < 1:
        verdict = "faster"
    elif low > 1:
        verdict = "slower"
    else:
        verdict = "cannot tell"
    return MeasurementComparison(verdict, ratio, low, high, "; ".join(doubts))
