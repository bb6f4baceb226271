"""The rules of measuring: when to stop, and which runs and results to accept."""

from __future__ import annotations

from dataclasses import dataclass

from profilers.measuring import statistics

__all__ = ["MeasuringRules"]


@dataclass(frozen=True)
class MeasuringRules:
    """The rules of measuring; shares are relative, times are in seconds.

    >>> MeasuringRules(statistic="p95").order
    0.95
    >>> MeasuringRules.allowing(0.05).worst
    0.05

    Attributes:
        statistic: What is reported of the accepted runs: "quiet" (the lower quartile), "median", "p90", "p95" or
            "p99".
        precision: Stop when the 95% interval of the statistic is within this share of it.
        worst: Refuse a measurement whose interval or undetected inflation is larger than this share.
        tolerance: A control reading within this share of the reference counts as undisturbed.
        waiting: Reject a visit that waited for a processor for more than this share of its time.
        least_runs: Accepted runs that a measurement needs.
        least_visits: Visits with accepted runs that a measurement needs.
        least_windows: Replaces ``least_runs`` and ``least_visits`` for energy, where a window is many runs.
        visit: Length of a visit to a network.
        warm_in: Length of the runs that are discarded at the beginning of a visit.
    """

    statistic: str = "quiet"
    precision: float = 0.01
    worst: float = 0.02
    tolerance: float = 0.03
    waiting: float = 0.005
    least_runs: int = 12
    least_visits: int = 6
    least_windows: int = 4
    visit: float = 0.010
    warm_in: float = 0.005

    @classmethod
    def allowing(cls, share: float, statistic: str = "quiet") -> MeasuringRules:
        """Return rules that allow a disturbance of ``share``; more than 0.02 gives results on a busy machine."""
        return cls(statistic, tolerance=max(cls.tolerance, share), worst=share)

    @property
    def order(self) -> float:
        """The quantile that the statistic is."""
        return statistics.order_of(self.statistic)
