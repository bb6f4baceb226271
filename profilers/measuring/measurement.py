"""What was measured, raw, and what can be said about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from profilers.measuring import statistics
from profilers.measuring.rules import MeasuringRules

__all__ = ["Measurement", "Samples"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Samples:
    """Raw runs, arrays of shape (n,): values (seconds), the visit each belongs to, the control before and after that
    visit (seconds), and the share of the visit spent waiting for a processor (NaN where the system does not say).

    Where energy is measured, ``values``, ``before`` and ``after`` are joules. ``extra`` has further arrays by name.
    """

    values: Floats
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
    def of_visit(values: Floats, visit: int, before: float, after: float, wait: float) -> Samples:
        """The runs of one visit."""
        n = len(values)
        return Samples(values, np.full(n, visit), np.full(n, before), np.full(n, after), np.full(n, wait))

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
            np.concatenate([p.values for p in parts]),
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
        return len(self.values)

    def accepted(self, reference: float, rules: MeasuringRules) -> NDArray[np.bool_]:
        """Which runs count, shape (n,): control before and after near the reference, and no waiting in between."""
        limit = reference * (1 + rules.tolerance)
        near = (self.before <= limit) & (self.after <= limit)
        held = np.nan_to_num(self.wait, nan=0.0) > rules.waiting
        return np.asarray(near & ~held)


@dataclass(frozen=True, eq=False, repr=False)
class Measurement:
    """One network on one target: raw runs, the reference they are judged by, and everything derived from both.

    ``seconds`` is the statistic of ``rules`` over the accepted runs, ``[low, high]`` its 95 % interval. ``hidden``
    is the inflation that the control cannot see, at most (see `profilers.measuring.bench.inflation`); ``own`` what
    this very
    network feels of it, with a standard error, where there were visits enough to tell. The repr is the report.
    A time that the target computed (``estimated`` says who) is one exact run, and trusted as that.
    """

    what: str
    target: str
    samples: Samples
    reference: float
    rules: MeasuringRules = field(default_factory=MeasuringRules)
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
        return self.samples.accepted(self.reference, self.rules)

    @cached_property
    def _runs(self) -> tuple[Floats, NDArray[np.int64]]:
        return self.samples.values[self._accepted], self.samples.visit[self._accepted]

    @cached_property
    def _interval(self) -> tuple[float, float]:
        if self.estimated and self.runs:
            return self.value, self.value
        return statistics.interval(*self._runs, self.rules.order)

    @property
    def seconds(self) -> float:
        """The statistic, in seconds."""
        return self.value

    @property
    def value(self) -> float:
        """The statistic in the base unit of what is measured: seconds, or joules."""
        return self.quantile(self.rules.order)

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
        return self.runs >= least_runs and self.visits >= least_visits and self.halfwidth <= self.rules.precision

    @property
    def _least(self) -> tuple[int, int]:
        """Runs and visits that are needed."""
        return self.rules.least_runs, self.rules.least_visits

    @property
    def trusted(self) -> bool:
        """Whether the number may be used at all."""
        return self.doubt is None

    @property
    def doubt(self) -> str | None:
        """Why the number may not be used; None where it may."""
        if self.flaw is not None or self.estimated or self.hidden <= self.rules.worst:
            return self.flaw
        if self.hidden == float("inf"):
            return "the control workload, run alone, showed no undisturbed moment as long as a visit"
        return (
            f"short disturbances that the control cannot tell from quiet inflate every run by about "
            f"{_percent(self.hidden)}, {_percent(self.rules.worst)} is allowed"
        )

    @cached_property
    def flaw(self) -> str | None:
        """Why the number may not be used whatever the hidden inflation; None where nothing else stands against it."""
        if self.estimated:
            return None if self.runs else "the target has not computed it yet"
        if math.isnan(self.reference):
            return "the store has no reference of the control workload for these runs, so they cannot be judged"
        rule = self.rules
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
            return f"the interval is wider than the {_percent(self.rules.precision)} aimed at; measure longer"
        if self.rejected > 0.5:
            return f"{_percent(self.rejected)} of the runs were rejected; {self._disturbance()}"
        return None

    def _disturbance(self) -> str:
        controls = np.concatenate([self.samples.before, self.samples.after])
        slow = float(np.median(controls)) / self.reference if len(controls) else float("nan")
        held = float(np.mean(np.nan_to_num(self.samples.wait) > self.rules.waiting)) if len(self.samples) else 0.0
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
            f"[{scale * self.low:.4g}, {scale * self.high:.4g}] ({self.rules.statistic}, 95 % interval)",
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
