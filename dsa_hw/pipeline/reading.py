"""Readings of a cost, and their judgement against a budget.

A verdict compares intervals, never single numbers. Where the budget is a share of the dense network, it is compared
with the measured ratio to the dense network, in runs next to each other; the time of the dense network does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from profilers.measuring.statistics import Estimate, confidence_at_look

if TYPE_CHECKING:
    from budgets import Budget

__all__ = ["CONFIDENCE", "Judgement", "Reading", "Verdict", "judge", "limit_of", "worst_verdict"]


CONFIDENCE = 0.9
"""Of the interval that decides a verdict, unless the user chooses another."""
_NORMAL = 1.96  # standard deviations to each side of a 95% interval


class Verdict(StrEnum):
    """Whether a budget is met.

    Example:
        >>> Verdict("NOT MET") is Verdict.NOT_MET
        True
    """

    MET = "MET"
    """The whole interval is within the limit."""
    NOT_MET = "NOT MET"
    """The whole interval is above the limit."""
    INCONCLUSIVE = "INCONCLUSIVE"
    """The interval contains the limit, or there is no measurement as precise as required."""


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Return NOT MET if any is, MET if there are some and all are, else INCONCLUSIVE."""
    found = set(verdicts)
    if Verdict.NOT_MET in found:
        return Verdict.NOT_MET
    return Verdict.MET if found == {Verdict.MET} else Verdict.INCONCLUSIVE


@dataclass(frozen=True)
class Reading:
    """One cost of one network, in base units (s, J, FLOPs, parameters, B).

    Attributes:
        value: The cost.
        low: Lower end of its 95% interval.
        high: Upper end of its 95% interval.
        runs: Number of runs; 0 where nothing had to be run.
        statistic: What ``value`` is of the runs.
        doubt: Why the reading cannot be used; None where it can.
        estimated: What estimated the value where nothing was run, for example "estimated by Vela 4.2".
        cost: The value with its error, where it was measured.
        share: The ratio to the dense network with its error, where it was measured.
        look: Which look at growing data this is, where looks decide whether to go on; 0 where they do not.
    """

    value: float
    low: float
    high: float
    runs: int = 0
    statistic: str = "count"
    doubt: str | None = None
    estimated: str | None = None
    cost: Estimate | None = None
    share: Estimate | None = None
    look: int = 0

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Reading:
        """Read what ``dataclasses.asdict`` made of a reading."""
        parts = {name: Estimate(**content[name]) if content[name] else None for name in ("cost", "share")}
        return cls(**{**content, **parts})

    @property
    def usable(self) -> bool:
        """Whether there is a number at all, trusted or not."""
        return math.isfinite(self.value) and self.value > 0

    def sides(self) -> tuple[float, float]:
        """Return the relative distances of ``low`` and ``high`` from the value."""
        if not self.usable:
            return math.inf, math.inf
        return 1 - self.low / self.value, self.high / self.value - 1

    def estimate(self) -> Estimate:
        """Return the value with its error, from its interval where nothing better is known."""
        if self.cost is not None or not self.usable:
            return self.cost or Estimate(math.nan, math.inf, 1.0)
        if not 0 < self.low <= self.high < math.inf:
            return Estimate(math.log(self.value), math.inf, 1.0)
        below, above = math.log(self.value / self.low), math.log(self.high / self.value)
        return Estimate(math.log(self.value), (max(below, above) / _NORMAL) ** 2)


@dataclass(frozen=True)
class Judgement:
    """The verdict on one reading.

    Attributes:
        verdict: Whether the budget is met.
        limit: The limit in force, in base units.
        used: The value over the limit; NaN where there is none.
        low: Lower end of the interval of ``used``.
        high: Upper end of the interval of ``used``.
        doubt: Why the reading cannot be used; None where it can.
    """

    verdict: Verdict
    limit: float
    used: float
    low: float
    high: float
    doubt: str | None = None


def limit_of(budget: Budget, dense: float) -> float:
    """Return the limit in force, from the budget alone; a share is taken of ``dense``, read in the same run."""
    return budget.quantity.magnitude * (dense if budget.relative else 1.0)


def judge(
    budget: Budget, reading: Reading, dense: Reading, *, exact: bool, confidence: float = CONFIDENCE
) -> Judgement:
    """Judge a reading against its budget.

    Args:
        budget: The budget.
        reading: The cost of the pruned network.
        dense: The cost of the dense network in the same run.
        exact: Whether the cost is counted, so that nothing is uncertain.
        confidence: Of the interval that must be on one side of the limit. Each side is wrong with half of the rest.

    Returns:
        The verdict with the limit and the share of it that is used.
    """
    limit = limit_of(budget, dense.value)
    if not reading.usable or not limit > 0:
        return Judgement(Verdict.INCONCLUSIVE, limit, math.nan, 0.0, math.inf, reading.doubt)
    used = reading.value / limit
    if exact:
        low = high = used
    else:
        found = reading.estimate()
        if budget.relative:
            found = reading.share if reading.share is not None else found.over(dense.estimate())
            used = found.value / budget.quantity.magnitude
        level = confidence_at_look(confidence, reading.look)
        low, high = (used * side for side in Estimate(0.0, found.variance, found.freedom).interval(level))
    if reading.doubt is not None or low <= 1 < high:
        verdict = Verdict.INCONCLUSIVE
    else:
        verdict = Verdict.MET if high <= 1 else Verdict.NOT_MET
    return Judgement(verdict, limit, used, low, high, reading.doubt)
