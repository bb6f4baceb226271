"""The rules of measuring: when to stop, and what to accept."""

from __future__ import annotations

from dataclasses import dataclass

from profilers.measuring import statistics

__all__ = ["MeasuringRules"]


@dataclass(frozen=True)
class MeasuringRules:
    """The rules of measuring. Times in seconds; the rest are shares.

    ``precision``: stop when the 95 % interval of the statistic is within this share of it. ``worst``: refuse a
    measurement whose interval, or whose undetected inflation, is larger. ``tolerance``: a control reading (the mean
    of a few milliseconds) within this share of the reference counts as undisturbed. ``waiting``: a visit that stood
    without a processor for more than this share of its time is rejected. ``least_windows`` stands for ``least_runs``
    and ``least_visits`` where energy is measured: a window is many runs already.
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
        """Rules that allow a disturbance of ``share`` (0.02 is the default): more gives an answer on a busy machine."""
        return cls(statistic, tolerance=max(cls.tolerance, share), worst=share)

    @property
    def order(self) -> float:
        """The quantile that the statistic is."""
        return statistics.order_of(self.statistic)
