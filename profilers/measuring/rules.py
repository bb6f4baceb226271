"""The rules of measuring: what is reported, and when to stop."""

from __future__ import annotations

from dataclasses import dataclass

from profilers.measuring import statistics

__all__ = ["MeasuringRules"]


@dataclass(frozen=True)
class MeasuringRules:
    """The rules of measuring; shares are relative, times are in seconds.

    >>> MeasuringRules(statistic="p95").order
    0.95

    Attributes:
        statistic: What is reported: "quiet" (the lower quartile of the dense network's runs, times the median ratio),
            "median" (with its median instead), or a tail of the runs themselves: "p90", "p95" or "p99".
        precision: Stop when half of the 95% interval, without the scatter between sittings, is within this share.
        require: Refuse a ratio to the dense network (of a network that is measured alone: a time) whose 95% interval
            reaches further than this share to each side; None accepts every interval.
        least_blocks: Blocks that a measurement needs.
        most_blocks: Blocks after which a network is finished, precise or not.
        rounds: Visits to each network in a block, at least.
        least_seconds: Length of a block at least, so that a block of a fast network is not a moment.
    """

    statistic: str = "quiet"
    precision: float = 0.015
    require: float | None = None
    least_blocks: int = 2
    most_blocks: int = 3
    rounds: int = 5
    least_seconds: float = 0.2

    @property
    def order(self) -> float:
        """The quantile that the statistic is."""
        return statistics.order_of(self.statistic)

    @property
    def paired(self) -> bool:
        """Whether the statistic is measured as a ratio to the dense network."""
        return statistics.paired(self.statistic)
