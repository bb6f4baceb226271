"""Raw runs of a network, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np

from dsa_hw.utils.arrays import Bools, Floats, Ints
from dsa_hw.utils.text import percent
from profilers.measuring import report, statistics
from profilers.measuring.rules import MeasuringRules

__all__ = ["Measurement", "Samples"]


@dataclass(frozen=True, eq=False)
class Samples:
    """Raw runs; every array has the shape (n,).

    Attributes:
        values: Seconds of each run; joules where energy is measured.
        visit: The visit that each run belongs to.
        before: The control reading before that visit, in the unit of ``values``.
        after: The control reading after that visit, in the unit of ``values``.
        wait: Share of the visit spent waiting for a processor; NaN where the system does not report it.
        extra: Further arrays by name.
    """

    values: Floats
    visit: Ints
    before: Floats
    after: Floats
    wait: Floats
    extra: Mapping[str, Floats] = field(default_factory=dict)

    @staticmethod
    def empty() -> Samples:
        """Return no runs."""
        none = np.zeros(0)
        return Samples(none, np.zeros(0, np.int64), none, none, none)

    @staticmethod
    def of_visit(values: Floats, visit: int, before: float, after: float, wait: float) -> Samples:
        """Return the runs of one visit; arguments as for the class."""
        n = len(values)
        return Samples(values, np.full(n, visit), np.full(n, before), np.full(n, after), np.full(n, wait))

    @staticmethod
    def joined(parts: Sequence[Samples]) -> Samples:
        """Return all runs of ``parts``; visits are renumbered so that those of different parts stay different."""
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

    def accepted(self, reference: float, rules: MeasuringRules) -> Bools:
        """Return which runs count, shape (n,): both control readings near the reference, and no waiting between."""
        limit = reference * (1 + rules.tolerance)
        near = (self.before <= limit) & (self.after <= limit)
        held = np.nan_to_num(self.wait, nan=0.0) > rules.waiting
        return np.asarray(near & ~held)


@dataclass(frozen=True, eq=False, repr=False)
class Measurement:
    """Time of one network on one target, with everything that follows from its runs. The repr is a report.

    A time that the target computed (see ``estimated``) is one exact run, and trusted.

    Attributes:
        what: Name of the network.
        target: Title of the target.
        samples: The raw runs.
        reference: The control reading on the undisturbed machine; NaN where it is not known.
        rules: The rules by which the runs are judged.
        environment: Versions, device and settings.
        hidden: Upper bound of the inflation that the control cannot detect, see
            `profilers.measuring.interference.inflation`.
        own: How much of it this network shows, with a standard error; None where there were too few visits to tell.
    """

    what: str
    target: str
    samples: Samples
    reference: float
    rules: MeasuringRules = field(default_factory=MeasuringRules)
    environment: Mapping[str, str] = field(default_factory=dict)
    hidden: float = 0.0
    own: tuple[float, float] | None = None

    #: What is measured, and the columns of a profile table that only this quantity has.
    quantity: ClassVar[str] = "latency"
    further_columns: ClassVar[tuple[str, ...]] = ()

    def further(self) -> dict[str, float]:
        """Return the values of ``further_columns``."""
        return {}

    @property
    def estimated(self) -> str | None:
        """What computed the value, where the target did; None for what was measured."""
        return self.environment.get("estimated")

    @cached_property
    def accepted(self) -> Bools:
        """Which of the samples count, shape (n,)."""
        if self.estimated:
            return np.ones(len(self.samples), np.bool_)
        return self.samples.accepted(self.reference, self.rules)

    @cached_property
    def accepted_runs(self) -> tuple[Floats, Ints]:
        """Values and visits of the runs that count."""
        return self.samples.values[self.accepted], self.samples.visit[self.accepted]

    @cached_property
    def _interval(self) -> tuple[float, float]:
        if self.estimated and self.runs:
            return self.value, self.value
        return statistics.interval(*self.accepted_runs, self.rules.order)

    @property
    def value(self) -> float:
        """The statistic of the accepted runs, in seconds or joules."""
        return self.quantile(self.rules.order)

    @property
    def seconds(self) -> float:
        """The statistic of the accepted runs, in seconds."""
        return self.value

    @property
    def low(self) -> float:
        """Lower end of the 95% interval of the statistic."""
        return self._interval[0]

    @property
    def high(self) -> float:
        """Upper end of the 95% interval of the statistic."""
        return self._interval[1]

    @property
    def median(self) -> float:
        """Median of the accepted runs."""
        return self.quantile(0.5)

    @property
    def p90(self) -> float:
        """90th percentile of the accepted runs."""
        return self.quantile(0.9)

    @property
    def p95(self) -> float:
        """95th percentile of the accepted runs."""
        return self.quantile(0.95)

    @property
    def p99(self) -> float:
        """99th percentile of the accepted runs."""
        return self.quantile(0.99)

    def quantile(self, q: float) -> float:
        """Return the ``q`` quantile of the accepted runs; NaN where there are none."""
        return statistics.quantile(self.accepted_runs[0], q) if self.runs else float("nan")

    @property
    def runs(self) -> int:
        """Number of accepted runs."""
        return len(self.accepted_runs[0])

    @property
    def visits(self) -> int:
        """Number of visits with accepted runs."""
        return len(np.unique(self.accepted_runs[1]))

    @property
    def rejected(self) -> float:
        """Share of all runs that was rejected."""
        return 1 - self.runs / len(self.samples) if len(self.samples) else 0.0

    @property
    def spread(self) -> float:
        """Interquartile range of the accepted runs over their median."""
        return (self.quantile(0.75) - self.quantile(0.25)) / self.median if self.runs else 0.0

    @property
    def halfwidth(self) -> float:
        """Half of the 95% interval over the statistic."""
        return (self.high - self.low) / 2 / self.value if self.runs else float("inf")

    @property
    def needed(self) -> tuple[int, int]:
        """Accepted runs and visits that the rules require."""
        return self.rules.least_runs, self.rules.least_visits

    @property
    def finished(self) -> bool:
        """Whether the stopping rule is met: enough runs and visits, and a narrow interval."""
        if self.estimated:
            return self.runs > 0
        runs, visits = self.needed
        return self.runs >= runs and self.visits >= visits and self.halfwidth <= self.rules.precision

    @property
    def trusted(self) -> bool:
        """Whether the value may be used."""
        return self.doubt is None

    @property
    def doubt(self) -> str | None:
        """Why the value may not be used; None where it may."""
        if self.flaw is not None or self.estimated or self.hidden <= self.rules.worst:
            return self.flaw
        if self.hidden == float("inf"):
            return "the control workload, run alone, was never undisturbed for as long as a visit takes"
        return (
            f"interference too short for the control workload to detect inflates every run by about "
            f"{percent(self.hidden)} ({percent(self.rules.worst)} is allowed)"
        )

    @cached_property
    def flaw(self) -> str | None:
        """Why the value may not be used, apart from hidden inflation; None where nothing else is wrong."""
        if self.estimated:
            return None if self.runs else "the target has not computed it yet"
        if math.isnan(self.reference):
            return "the store has no reference of the control workload for these runs"
        runs, visits = self.needed
        if self.runs < runs or self.visits < visits:
            text = (
                f"{self.runs} of {len(self.samples)} runs were accepted, in {self.visits} visits "
                f"({runs} runs in {visits} visits are needed)"
            )
            return f"{text}; {report.interference(self)}" if self.rejected > 0.2 else text
        if self.halfwidth > self.rules.worst:
            return f"the 95% interval is +/-{percent(self.halfwidth)} (+/-{percent(self.rules.worst)} is allowed)"
        return None

    @property
    def warning(self) -> str | None:
        """What a reader should know before using the value; None where there is nothing."""
        return report.warning(self)

    def __repr__(self) -> str:
        return report.latency(self)
