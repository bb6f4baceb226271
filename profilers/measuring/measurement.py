"""Raw runs of a network, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from dsa_hw.utils.arrays import Bools, Floats, Ints
from dsa_hw.utils.text import percent
from profilers.measuring import report, statistics
from profilers.measuring.rules import MeasuringRules
from profilers.measuring.sittings import Scatter
from profilers.measuring.statistics import Estimate

__all__ = ["Measurement", "Samples", "pooled"]

_FREEDOM = 4.0  # with which the disagreement of two estimates is counted as a variance


@dataclass(frozen=True, eq=False)
class Samples:
    """Raw runs; every array has the shape (n,).

    Attributes:
        values: Seconds of each run; joules where energy is measured.
        before: The dense network's last run before it, in the unit of ``values``; infinity where there is none.
        after: The dense network's next run after it, likewise.
        block: The block that each run belongs to; in each block, networks are loaded again.
        sitting: The sitting that each run belongs to: one process at one time.
        extra: Further arrays by name.
    """

    values: Floats
    before: Floats
    after: Floats
    block: Ints
    sitting: Ints
    extra: Mapping[str, Floats] = field(default_factory=dict)

    @staticmethod
    def empty() -> Samples:
        """Return no runs."""
        none, no = np.zeros(0), np.zeros(0, np.int64)
        return Samples(none, none, none, no, no)

    @staticmethod
    def of(
        values: Floats,
        before: float | Floats,
        after: float | Floats,
        block: int = 0,
        sitting: int = 0,
        extra: Mapping[str, Floats] | None = None,
    ) -> Samples:
        """Return runs of one block; arguments as for the class."""
        n = len(values)
        first, last = (np.broadcast_to(np.asarray(side, np.float64), (n,)) for side in (before, after))
        runs = np.asarray(values, np.float64)
        return Samples(runs, first, last, np.full(n, block), np.full(n, sitting), extra or {})

    @staticmethod
    def joined(parts: Sequence[Samples]) -> Samples:
        """Return all runs of ``parts``."""
        if not parts:
            return Samples.empty()
        return Samples(
            np.concatenate([p.values for p in parts]),
            np.concatenate([p.before for p in parts]),
            np.concatenate([p.after for p in parts]),
            np.concatenate([p.block for p in parts]),
            np.concatenate([p.sitting for p in parts]),
            {
                name: np.concatenate([p.extra.get(name, np.full(len(p), np.nan)) for p in parts])
                for name in dict.fromkeys(key for p in parts for key in p.extra)
            },
        )

    def __len__(self) -> int:
        return len(self.values)

    def of_sitting(self, sitting: int | None) -> Samples:
        """Return the runs of one sitting."""
        here = self.sitting == sitting
        times = self.values[here], self.before[here], self.after[here]
        extra = {name: array[here] for name, array in self.extra.items()}
        return Samples(*times, self.block[here], self.sitting[here], extra)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(np.unique(np.stack([self.sitting, self.block]), axis=1).T) if len(self) else 0

    @property
    def _whole(self) -> Bools:
        """Which runs have two neighbours."""
        return np.isfinite(self.before) & np.isfinite(self.after)

    def logs(self) -> Floats:
        """Return the logarithms of the runs over the faster one of their two neighbours, where there are two.

        Interference that hits one of the neighbours does not count.
        """
        whole = self._whole
        return np.log(self.values[whole] / np.minimum(self.before, self.after)[whole])

    def ratios(self) -> dict[tuple[int, int], float]:
        """Return the median of `logs` by sitting and block."""
        whole, logs = self._whole, self.logs()
        sitting, block = self.sitting[whole], self.block[whole]
        keys = sorted(set(zip(sitting.tolist(), block.tolist(), strict=True)))
        return {(s, b): float(np.median(logs[(sitting == s) & (block == b)])) for s, b in keys}


def block_logs(samples: Samples, dense: Samples) -> dict[int, Floats]:
    """Return the ratio of a network to the dense network in each block, as logarithms, by sitting.

    Runs of the dense network are compared with their neighbours in the same way, and the ratio is that of the two
    comparisons: what choosing the faster neighbour does to them cancels.
    """
    own, whole = samples.ratios(), dense.ratios()
    found: dict[int, list[float]] = {}
    for (sitting, block), log in own.items():
        found.setdefault(sitting, []).append(log - whole.get((sitting, block), 0.0))
    return {sitting: np.asarray(logs) for sitting, logs in found.items()}


def pooled(samples: Sequence[Samples], dense: Samples) -> float:
    """Return the variance of a block's ratio, over all networks and sittings.

    Where every sitting has a single block, the variance of the median of its runs is taken if it is larger.
    """
    found = [s for s in samples if len(s)]
    groups = [values for s in found for values in block_logs(s, dense).values()]
    variance = statistics.pooled_variance(groups)[0]
    if any(len(values) > 1 for values in groups):
        return variance
    return max(variance, _variance_of_median([s.logs() for s in found], dense.logs()))


def _variance_of_median(runs: Sequence[Floats], dense: Floats) -> float:
    """Return the variance of the median of a network's runs, from the spread of all runs around their medians."""
    several = [logs - np.median(logs) for logs in (*runs, dense) if len(logs) > 1]
    if not several:
        return 0.0
    low, high = np.quantile(np.concatenate(several), [0.16, 0.84])
    return float(math.pi / 2 * ((high - low) / 2) ** 2 / np.median([len(logs) for logs in runs] or [1]))


@dataclass(frozen=True, eq=False, repr=False)
class Measurement:
    """Time of one network on one target, with everything that follows from its runs. The repr is a report.

    The value is the product of a scale (a quantile of the dense network's runs) and of the network's ratio to the
    dense network. A tail ("p95") is a quantile of the runs themselves. A value that the target computed (see
    ``estimated``) is exact.

    Attributes:
        what: Name of the network.
        target: Title of the target.
        samples: The raw runs.
        dense: The runs of the dense network in the same sittings.
        rules: The rules of measuring.
        environment: Versions, device and settings.
        scatter: How much sittings differ from each other.
        block_variance: Variance of a block, pooled over the networks of the same sittings.
        look: Which look at growing data this is, where looks decide whether to go on; 0 where they do not.
    """

    what: str
    target: str
    samples: Samples
    dense: Samples
    rules: MeasuringRules = field(default_factory=MeasuringRules)
    environment: Mapping[str, str] = field(default_factory=dict)
    scatter: Scatter = field(default_factory=Scatter)
    block_variance: float = statistics.PRIOR_BLOCK**2
    look: int = 0

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
    def within(self) -> Estimate:
        """The ratio to the dense network in these sittings, without the scatter between sittings."""
        return self._ratio(None)

    @cached_property
    def ratio(self) -> Estimate:
        """The ratio to the dense network."""
        if not self.rules.paired:
            return self.absolute.over(self._tail(self.dense)) if len(self.dense) else self.absolute
        return self._ratio(self.scatter.ratio)

    @cached_property
    def absolute(self) -> Estimate:
        """The value in seconds or joules."""
        if self.estimated:
            return Estimate(math.log(float(self.samples.values[0])))
        if not self.rules.paired:
            return self._tail(self.samples)
        return self.ratio.times(self.scale)

    @cached_property
    def scale(self) -> Estimate:
        """The dense network's time (or energy): the quantile of its runs that the statistic names, by blocks."""
        runs, order = self.dense, self.rules.order
        parts = []
        for sitting in np.unique(runs.sitting):
            here = runs.sitting == sitting
            values, block = runs.values[here], runs.block[here]
            each = [math.log(np.quantile(values[block == b], order)) for b in np.unique(block)]
            parts.append(statistics.mean_of_blocks(each))
        return _over_sittings(parts, self.scatter.scale, self.scatter.scale_freedom)

    def _ratio(self, between: float | None) -> Estimate:
        if self.samples is self.dense:
            return Estimate(0.0)
        if self.estimated:
            return Estimate(math.log(self.samples.values[0] / self.samples.before[0]))
        logs = block_logs(self.samples, self.dense)
        parts = {s: statistics.mean_of_blocks(values, self.block_variance) for s, values in logs.items()}
        if between is not None:
            parts = {s: part.widened(self._disagreement(s, part.log) ** 2, _FREEDOM) for s, part in parts.items()}
        return _over_sittings(list(parts.values()), between or 0.0, self.scatter.ratio_freedom)

    def _disagreement(self, sitting: int, log: float) -> float:
        """Return how far the ratio of the medians of a sitting's runs is from the median ratio, as logarithms.

        On a machine that is left alone the two agree. Where interference is about as short as the runs, both are off,
        and differently: what they differ by is added to the error.
        """
        own, whole = (part.of_sitting(sitting).values for part in (self.samples, self.dense))
        return math.log(float(np.median(own)) / float(np.median(whole))) - log

    def _tail(self, samples: Samples) -> Estimate:
        _, block = np.unique(np.stack([samples.sitting, samples.block]), axis=1, return_inverse=True)
        found = statistics.quantile_estimate(samples.values, np.ravel(block), self.rules.order)
        sittings = len(np.unique(samples.sitting))
        return found.widened(self.scatter.scale / sittings, self.scatter.scale_freedom)

    @property
    def value(self) -> float:
        """The statistic, in seconds or joules; NaN without runs."""
        return self.absolute.value if self.runs else float("nan")

    @property
    def seconds(self) -> float:
        """The statistic, in seconds."""
        return self.value

    @cached_property
    def _interval(self) -> tuple[float, float]:
        return self.absolute.interval(self.confidence()) if self.runs else (0.0, float("inf"))

    def confidence(self, wanted: float = 0.95) -> float:
        """Return the confidence at which to take an interval, so that all looks together have the wanted one."""
        return statistics.confidence_at_look(wanted, self.look)

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
        """Median of the runs."""
        return self.quantile(0.5)

    @property
    def p90(self) -> float:
        """90th percentile of the runs."""
        return self.quantile(0.9)

    @property
    def p95(self) -> float:
        """95th percentile of the runs."""
        return self.quantile(0.95)

    @property
    def p99(self) -> float:
        """99th percentile of the runs."""
        return self.quantile(0.99)

    def quantile(self, q: float) -> float:
        """Return the ``q`` quantile of the runs, under the conditions met; NaN where there are none."""
        return statistics.quantile(self.samples.values, q) if self.runs else float("nan")

    @property
    def runs(self) -> int:
        """Number of runs."""
        return len(self.samples)

    @property
    def spread(self) -> float:
        """Interquartile range of the runs over their median."""
        return (self.quantile(0.75) - self.quantile(0.25)) / self.median if self.runs else 0.0

    @property
    def halfwidth(self) -> float:
        """Half of the 95% interval over the statistic."""
        return (self.high - self.low) / 2 / self.value if self.runs else float("inf")

    @property
    def finished(self) -> bool:
        """Whether the stopping rule is met: enough blocks, and a narrow interval or as many blocks as are useful."""
        if self.estimated:
            return self.runs > 0
        blocks = self.samples.blocks
        if blocks < self.rules.least_blocks or not self.runs:
            return False
        if not self.rules.paired and self.runs < statistics.runs_for(self.rules.order):
            return False  # a tail must have been seen
        wide = self.within if self.rules.paired else self.absolute
        if self.rules.paired and self.samples is self.dense:
            wide = replace(self, scatter=Scatter(ratio=0.0, scale=0.0)).scale
        require = self.rules.require
        if require is None:
            return blocks >= self.rules.most_blocks or wide.halfwidth() <= self.rules.precision
        return blocks >= 4 * self.rules.most_blocks or wide.halfwidth() <= min(self.rules.precision, require / 2)

    @property
    def trusted(self) -> bool:
        """Whether there is a value, as precise as the rules require."""
        return self.doubt is None

    @property
    def doubt(self) -> str | None:
        """Why the value may not be used; None where it may."""
        if not self.runs:
            return "it was not measured within the time limit"
        if self.rules.require is not None and self.halfwidth > self.rules.require:
            return f"the 95% interval is +/-{percent(self.halfwidth)} (+/-{100 * self.rules.require:g}% is required)"
        return None

    def __repr__(self) -> str:
        return report.latency(self)


def _over_sittings(parts: Sequence[Estimate], variance: float, freedom: float) -> Estimate:
    """Return the mean over sittings, each weighted by its precision, with the scatter between them."""
    if not parts:
        return Estimate(math.nan, math.inf, 1.0)
    each = [part.widened(variance, freedom) for part in parts]
    weights = [1 / max(e.variance, 1e-18) for e in each]
    total = sum(weights)
    log = sum(w * e.log for w, e in zip(weights, each, strict=True)) / total
    return Estimate(log, 1 / total if any(e.variance for e in each) else 0.0, min(e.freedom for e in each))
