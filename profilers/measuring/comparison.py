"""Comparison of two measured networks."""

from __future__ import annotations

from dataclasses import dataclass

from dsa_hw.errors import ProfileError
from profilers.measuring.measurement import Measurement

__all__ = ["MeasurementComparison", "compare_measurements"]


@dataclass(frozen=True)
class MeasurementComparison:
    """The result of comparing a network b with a network a.

    Attributes:
        verdict: "faster", "slower", "same" or "inconclusive": what b is.
        ratio: Value of b over value of a; below 1, b is faster.
        low: Lower end of the 95% interval of the ratio.
        high: Upper end of the 95% interval of the ratio.
        reason: Why the comparison is doubtful; empty where it is not.
    """

    verdict: str
    ratio: float
    low: float
    high: float
    reason: str = ""

    def __str__(self) -> str:
        text = f"{self.verdict}: ratio {self.ratio:.4f}, 95% CI [{self.low:.4f}, {self.high:.4f}]"
        return f"{text}; {self.reason}" if self.reason else text


def compare_measurements(a: Measurement, b: Measurement, *, margin: float = 0.01) -> MeasurementComparison:
    """Determine whether ``b`` is faster or slower than ``a``, or the same within ``margin``.

    An interval of the ratio that does not contain 1 decides for faster or slower; an interval within the margin around
    1 means the same. Where both were measured beside the same dense network in the same sittings, its time cancels.

    Args:
        a: The first measurement.
        b: The second measurement, of the same statistic.
        margin: Relative difference up to which the two count as the same.

    Returns:
        The verdict with the ratio and its interval; "inconclusive" where a measurement is not trusted.

    Raises:
        ProfileError: The measurements have different statistics.
    """
    if a.rules.statistic != b.rules.statistic:
        raise ProfileError(
            f"Both measurements must have the same statistic; got {a.rules.statistic!r} and {b.rules.statistic!r}."
        )
    doubts = [f"{m.what}: {m.doubt}" for m in (a, b) if m.doubt]
    if a.target != b.target:
        doubts.append(f"the targets differ ({a.target} and {b.target})")
    reason = "; ".join(doubts)
    if not a.runs or not b.runs:
        return MeasurementComparison("inconclusive", float("nan"), 0.0, float("inf"), reason)
    together = len(a.dense) > 0 and a.dense is b.dense
    apart = b.ratio.over(a.ratio) if together else b.absolute.over(a.absolute)
    ratio, (low, high) = apart.value, apart.interval()
    verdict = "inconclusive"
    if all(m.trusted for m in (a, b)):
        if low >= 1 - margin and high <= 1 + margin:
            verdict = "same"
        elif high < 1:
            verdict = "faster"
        elif low > 1:
            verdict = "slower"
    return MeasurementComparison(verdict, ratio, low, high, reason)
