"""Readings of a cost, and their judgement against a budget.

A verdict compares intervals, never single numbers. Where the budget is a share of the dense network, the limit is
that share of the cost of the dense network in the same interleaved run, and the uncertainties of both count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from dsa_hw.utils.text import percent

if TYPE_CHECKING:
    from budgets import Budget

__all__ = ["Judgement", "Reading", "Verdict", "judge", "limit_of", "worst_verdict"]


class Verdict(StrEnum):
    """Whether a budget is met.

    Example:
        >>> Verdict("NOT MET") is Verdict.NOT_MET
        True
    """

    MET = "MET"
    """The whole 95% interval is within the limit."""
    NOT_MET = "NOT MET"
    """The whole interval is above the limit."""
    INCONCLUSIVE = "INCONCLUSIVE"
    """The interval contains the limit, or the measurement cannot be trusted."""


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
        doubt: Why the reading cannot be trusted; None where it can.
        estimated: What estimated the value where nothing was run, for example "estimated by Vela 4.2".
        felt: Where the only doubt is interference during the whole session: the share by which it inflates this
            network, and its standard error.
        allowed: The largest inflation that the measuring rules allow.
    """

    value: float
    low: float
    high: float
    runs: int = 0
    statistic: str = "count"
    doubt: str | None = None
    estimated: str | None = None
    felt: tuple[float, float] | None = None
    allowed: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether there is a number at all, trusted or not."""
        return math.isfinite(self.value) and self.value > 0

    def sides(self) -> tuple[float, float]:
        """Return the relative distances of ``low`` and ``high`` from the value."""
        if not self.usable:
            return math.inf, math.inf
        return 1 - self.low / self.value, self.high / self.value - 1

    def doubt_beside(self, other: Reading | None) -> str | None:
        """Return why the ratio to ``other`` from the same interleaved run cannot be trusted; without one, ``doubt``.

        (1 + a) / (1 + b) is off by about a - b: only the difference of the two inflations matters, with two standard
        errors of it.
        """
        doubt = self.doubt or (other.doubt if other is not None else None)
        if doubt is None or other is None or self.felt is None or other.felt is None:
            return doubt
        (mine, error), (its, another) = self.felt, other.felt
        apart, allowed = abs(mine - its) + 2 * math.hypot(error, another), max(self.allowed, other.allowed)
        if apart <= allowed:
            return None
        return (
            f"interference may have slowed the two networks by different amounts (up to {percent(apart)}; tolerance "
            f"{percent(allowed)})"
        )


@dataclass(frozen=True)
class Judgement:
    """The verdict on one reading.

    Attributes:
        verdict: Whether the budget is met.
        limit: The limit in force, in base units.
        used: The value over the limit; NaN where there is none.
        low: Lower end of the 95% interval of ``used``.
        high: Upper end of the 95% interval of ``used``.
        doubt: Why the reading cannot be trusted; None where it can.
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


def judge(budget: Budget, reading: Reading, dense: Reading, *, exact: bool) -> Judgement:
    """Judge a reading against its budget.

    Args:
        budget: The budget.
        reading: The cost of the pruned network.
        dense: The cost of the dense network in the same run.
        exact: Whether the cost is counted, so that the dense network adds no uncertainty.

    Returns:
        The verdict with the limit and the share of it that is used. The two readings are independent, so their
        relative uncertainties add in squares.
    """
    limit = limit_of(budget, dense.value)
    reference = dense if budget.relative and not exact else None
    doubt = reading.doubt_beside(reference)
    if not reading.usable or not limit > 0:
        return Judgement(Verdict.INCONCLUSIVE, limit, math.nan, 0.0, math.inf, doubt)
    below, above = reading.sides()
    if reference is not None:
        other = reference.sides()
        below, above = math.hypot(below, other[1]), math.hypot(above, other[0])
    used = reading.value / limit
    low, high = used * max(1 - below, 0.0), used * (1 + above)
    if doubt is not None or low <= 1 < high:
        verdict = Verdict.INCONCLUSIVE
    else:
        verdict = Verdict.MET if high <= 1 else Verdict.NOT_MET
    return Judgement(verdict, limit, used, low, high, doubt)
