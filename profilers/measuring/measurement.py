"""What was measured, raw, and what can be said about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dsa_hw.errors import ProfileError
from profilers.measuring import statistics

__all__ = ["Comparison", "Measurement", "Protocol", "Samples", "compare_measurements"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Protocol:
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
    def allowing(cls, share: float, statistic: str = "quiet") -> Protocol:
        """Rules that allow a disturbance of ``share`` (0.02 is the default): more gives an answer on a busy machine."""
        return cls(statistic, tolerance=max(cls.tolerance, share), worst=share)

    @property
    def order(self) -> float:
        """The quantile that the statistic is."""
        return statistics.order_of(self.statistic)


@dataclass(frozen=True, eq=False)
class Samples:
    """Raw runs, arrays of shape (n,): seconds, the visit each belongs to, the control before and after that visit
    (seconds), and the share of the visit spent waiting for a processor (NaN where the system does not say).

    Where energy is measured, ``seconds``, ``before`` and ``after`` are joules. ``extra`` has further arrays by name.
    """

    seconds: Floats
    visit: NDArray[np.int64]
    before: Floats
    after: Floats
    wait: Floats
    extra: Mapping[str, Floats] = field(default_factory=dict)

    @staticmethod
    def empty() -> Samples:
        """No runs."""
        none = np.zeros(0)
        return Samples(none, np.zeros(0, np.int64), none, none, none)

    @staticmethod
    def of_visit(seconds: Floats, visit: int, before: float, after: float, wait: float) -> Samples:
        """The runs of one visit."""
        n = len(seconds)
        return Samples(seconds, np.full(n, visit), np.full(n, before), np.full(n, after), np.full(n, wait))

    @staticmethod
    def joined(parts: Sequence[Samples]) -> Samples:
        """All runs of ``parts``; visits are renumbered so that those of different parts stay different."""
        if not parts:
            return Samples.empty()
        visits, offset = [], 0
        for part in parts:
            visits.append(part.visit + offset)
            offset += int(part.visit.max(initial=-1)) + 1
        return Samples(
            np.concatenate([p.seconds for p in parts]),
            np.concatenate(visits),
            np.concatenate([p.before for p in parts]),
            np.concatenate([p.after for p in parts]),
            np.concatenate([p.wait for p in parts]),
            {
                name: np.concatenate([p.extra.get(name, np.full(len(p), np.nan)) for p in parts])
                for name in dict.fromkeys(key for p in parts for key in p.extra)
            },
        )

    def __len__(self) -> int:
        return len(self.seconds)

    def accepted(self, reference: float, protocol: Protocol) -> NDArray[np.bool_]:
        """Which runs count, shape (n,): control before and after near the reference, and no waiting in between."""
        limit = reference * (1 + protocol.tolerance)
        near = (self.before <= limit) & (self.after <= limit)
        held = np.nan_to_num(self.wait, nan=0.0) > protocol.waiting
        return np.asarray(near & ~held)


@dataclass(frozen=True, eq=False, repr=False)
class Measurement:
    """One network on one target: raw runs, the reference they are judged by, and everything derived from both.

    ``seconds`` is the statistic of ``protocol`` over the accepted runs, ``[low, high]`` its 95 % interval. ``hidden``
    is the inflation that the control cannot see, at most (see `profilers.measuring.bench.inflation`); ``own`` what
    this very
    network feels of it, with a standard error, where there were visits enough to tell. The repr is the report.
    A time that the target computed (``estimated`` says who) is one exact run, and trusted as that.
    """

    what: str
    target: str
    samples: Samples
    reference: float
    protocol: Protocol = field(default_factory=Protocol)
    environment: Mapping[str, str] = field(default_factory=dict)
    hidden: float = 0.0
    own: tuple[float, float] | None = None

    #: what is measured, its column in a profile table, its base unit, and further columns
    quantity: ClassVar[str] = "latency"
    column: ClassVar[str] = "seconds"
    unit: ClassVar[str] = "s"
    further_columns: ClassVar[tuple[str, ...]] = ()

    def further(self) -> dict[str, float]:
        """Values of ``further_columns``."""
        return {}

    @property
    def estimated(self) -> str | None:
        """Whose word the number is, where the target computed it; None for what was measured."""
        return self.environment.get("estimated")

    @cached_property
    def _accepted(self) -> NDArray[np.bool_]:
        if self.estimated:
            return np.ones(len(self.samples), np.bool_)
        return self.samples.accepted(self.reference, self.protocol)

    @cached_property
    def _runs(self) -> tuple[Floats, NDArray[np.int64]]:
        return self.samples.seconds[self._accepted], self.samples.visit[self._accepted]

    @cached_property
    def _interval(self) -> tuple[float, float]:
        if self.estimated and self.runs:
            return self.value, self.value
        return statistics.interval(*self._runs, self.protocol.order)

    @property
    def seconds(self) -> float:
        """The statistic, in seconds."""
        return self.value

    @property
    def value(self) -> float:
        """The statistic in the base unit of what is measured: seconds, or joules."""
        return self.quantile(self.protocol.order)

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval of the statistic."""
        return self._interval[0]

    @property
    def high(self) -> float:
        """Upper end of the 95 % interval of the statistic."""
        return self._interval[1]

    @property
    def median(self) -> float:
        """Median of the accepted runs, in seconds."""
        return self.quantile(0.5)

    @property
    def p90(self) -> float:
        """90th percentile of the accepted runs, in seconds."""
        return self.quantile(0.9)

    @property
    def p95(self) -> float:
        """95th percentile of the accepted runs, in seconds."""
        return self.quantile(0.95)

    @property
    def p99(self) -> float:
        """99th percentile of the accepted runs, in seconds."""
        return self.quantile(0.99)

    @property
    def runs(self) -> int:
        """Accepted runs."""
        return len(self._runs[0])

    @property
    def visits(self) -> int:
        """Visits with accepted runs."""
        return len(np.unique(self._runs[1]))

    @property
    def rejected(self) -> float:
        """Share of all runs that was rejected."""
        return 1 - self.runs / len(self.samples) if len(self.samples) else 0.0

    @property
    def spread(self) -> float:
        """Interquartile range of the accepted runs over their median: the noise that is left."""
        runs = self._runs[0]
        return (statistics.quantile(runs, 0.75) - statistics.quantile(runs, 0.25)) / self.median if len(runs) else 0.0

    @property
    def halfwidth(self) -> float:
        """Half of the 95 % interval over the statistic."""
        return (self.high - self.low) / 2 / self.value if self.runs else float("inf")

    def quantile(self, q: float) -> float:
        """The ``q`` quantile of the accepted runs, in seconds; NaN without any."""
        return statistics.quantile(self._runs[0], q) if self.runs else float("nan")

    def interval(self, q: float) -> tuple[float, float]:
        """95 % interval of the ``q`` quantile of the accepted runs, in seconds."""
        if self.estimated and self.runs:
            return self._interval
        return statistics.interval(*self._runs, q)

    @property
    def finished(self) -> bool:
        """Whether the stopping rule is met: enough runs and visits, and an interval that is narrow enough."""
        if self.estimated:
            return self.runs > 0
        least_runs, least_visits = self._least
        return self.runs >= least_runs and self.visits >= least_visits and self.halfwidth <= self.protocol.precision

    @property
    def _least(self) -> tuple[int, int]:
        """Runs and visits that are needed."""
        return self.protocol.least_runs, self.protocol.least_visits

    @property
    def trusted(self) -> bool:
        """Whether the number may be used at all."""
        return self.doubt is None

    @property
    def doubt(self) -> str | None:
        """Why the number may not be used; None where it may."""
        if self.flaw is not None or self.estimated or self.hidden <= self.protocol.worst:
            return self.flaw
        if self.hidden == float("inf"):
            return "the control workload, run alone, showed no undisturbed moment as long as a visit"
        return (
            f"short disturbances that the control cannot tell from quiet inflate every run by about "
            f"{_percent(self.hidden)}, {_percent(self.protocol.worst)} is allowed"
        )

    @cached_property
    def flaw(self) -> str | None:
        """Why the number may not be used whatever the hidden inflation; None where nothing else stands against it."""
        if self.estimated:
            return None if self.runs else "the target has not computed it yet"
        if math.isnan(self.reference):
            return "the store has no reference of the control workload for these runs, so they cannot be judged"
        rule = self.protocol
        least_runs, least_visits = self._least
        if self.runs < least_runs or self.visits < least_visits:
            text = (
                f"{self.runs} of {len(self.samples)} runs could be accepted, in {self.visits} visits "
                f"(needed: {least_runs} in {least_visits})"
            )
            return f"{text}; {self._disturbance()}" if self.rejected > 0.2 else text
        if self.halfwidth > rule.worst:
            return (
                f"the 95 % interval is {_percent(self.halfwidth)} wide to each side, {_percent(rule.worst)} is allowed"
            )
        return None

    @property
    def warning(self) -> str | None:
        """What a reader should know before using the number; None where there is nothing."""
        if self.doubt is not None:
            return f"do not use this number: {self.doubt}"
        if not self.finished:
            return f"the interval is wider than the {_percent(self.protocol.precision)} aimed at; measure longer"
        if self.rejected > 0.5:
            return f"{_percent(self.rejected)} of the runs were rejected; {self._disturbance()}"
        return None

    def _disturbance(self) -> str:
        controls = np.concatenate([self.samples.before, self.samples.after])
        slow = float(np.median(controls)) / self.reference if len(controls) else float("nan")
        held = float(np.mean(np.nan_to_num(self.samples.wait) > self.protocol.waiting)) if len(self.samples) else 0.0
        return (
            f"the control workload took {slow:.2f} times its reference of {1e3 * self.reference:.3f} ms in the median, "
            f"and {_percent(held)} of the runs had to wait for a processor"
        )

    def __repr__(self) -> str:
        unit, scale = ("s", 1.0) if self.seconds >= 1 else ("ms", 1e3)
        if self.estimated:
            return f"{self.what} on {self.target}: {scale * self.seconds:.4g} {unit} ({self.estimated})"
        lines = [
            f"{self.what} on {self.target}: {scale * self.seconds:.4g} {unit} "
            f"[{scale * self.low:.4g}, {scale * self.high:.4g}] ({self.protocol.statistic}, 95 % interval)",
            "  "
            + "  ".join(
                f"{name} {scale * value:.4g}"
                for name, value in (
                    ("median", self.median),
                    ("p90", self.p90),
                    ("p95", self.p95),
                    ("p99", self.p99),
                )
            )
            + f" {unit}; {self.runs} runs in {self.visits} visits, {_percent(self.rejected)} rejected, "
            f"spread {_percent(self.spread)}",
        ]
        if self.warning:
            lines.append(f"  WARNING: {self.warning}")
        return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


@dataclass(frozen=True)
class Comparison:
    """``ratio`` is b over a (below 1: b is faster) with its 95 % interval; ``verdict`` says what b is."""

    verdict: str
    ratio: float
    low: float
    high: float
    reason: str = ""

    def __str__(self) -> str:
        text = f"{self.verdict}: {self.ratio:.4f} times as long [{self.low:.4f}, {self.high:.4f}]"
        return f"{text}; {self.reason}" if self.reason else text


def compare_measurements(a: Measurement, b: Measurement, *, margin: float = 0.01) -> Comparison:
    """Is ``b`` "faster" or "slower" than ``a``, the "same" within ``margin``, or "cannot tell"?

    The ratio of the two statistics is bootstrapped over visits, both sides independently. An interval wholly on one
    side of 1 by more than nothing decides; one wholly within the margin is the same; anything else cannot be told.
    """
    if a.protocol.statistic != b.protocol.statistic:
        raise ProfileError(
            f"a is a {a.protocol.statistic}, b a {b.protocol.statistic}; compare measurements of the same statistic"
        )
    doubts = [f"{m.what}: {m.doubt}" for m in (a, b) if m.doubt]
    if a.target != b.target:
        doubts.append(f"different targets, {a.target} and {b.target}")
    if not a.runs or not b.runs:
        return Comparison("cannot tell", float("nan"), 0.0, float("inf"), "; ".join(doubts))
    draws = [statistics.resampled(*m._runs, m.protocol.order, seed=i) for i, m in enumerate((a, b))]
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
    return Comparison(verdict, ratio, low, high, "; ".join(doubts))
