"""Measuring on a machine that is not ours alone.

Interference only ever adds time. So networks are visited in random rounds with a fixed control workload in between; a
visit counts only if the control before and after it is near an absolute reference and the scheduler kept nobody
waiting; and the statistic is a low quantile of what is left. Between rounds the control runs alone for a moment:
replayed as if it were visits, that recording says how much disturbance the test cannot see, and a machine on which
that is too much is refused.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsa_hw.errors import MeasurementError
from profilers import machine
from profilers.measuring import environment as environments
from profilers.measuring.control import load_control
from profilers.measuring.measurement import Measurement, Samples
from profilers.measuring.reference import Reference, ReferenceFile
from profilers.measuring.rules import MeasuringRules
from profilers.targets import Loaded, Target

__all__ = ["Bench", "Scan", "inflation", "sensitivity", "slope"]

_log = logging.getLogger(__name__)

_DISCARDED = 2  # control runs before a reading: they find the caches full of somebody else's data
_READING = 0.004  # seconds; a single run of the control jitters by several per cent even on a quiet machine
_LONG = 0.015  # seconds; a cold cache costs about 0.1 ms, which no longer matters in a run of this length
_LEAST_SLOPE = 0.1  # of a network over the control, or the two do not see the same
_MOST_RUNS = 50
_RESCAN = 5.0  # seconds between two scans of the control alone, 0.25 s each: a twentieth of the time


@dataclass(frozen=True, eq=False)
class Scan:
    """The control workload back to back, arrays of shape (n,): start (s), seconds, and
    the processor wait of this process until that start (s)."""

    start: NDArray[np.float64]
    seconds: NDArray[np.float64]
    waited: NDArray[np.float64]


def _readings(scan: Scan, block: int) -> NDArray[np.float64]:
    """Mean of every ``block`` consecutive control runs, shape (n - block + 1,)."""
    total = np.concatenate([[0.0], np.cumsum(scan.seconds)])
    return (total[block:] - total[:-block]) / block


def inflation(scans: Sequence[Scan], reference: float, rules: MeasuringRules, length: float, block: int) -> float:
    """The share by which visits of ``length`` seconds that pass the control test would still be inflated.

    Every pair of undisturbed readings (means of ``block`` control runs) with about ``length`` in between is a visit
    that would have been accepted; the control runs in between show what it would have suffered, against the reference.
    The rules' quantile of that, over all such pairs, is what the statistic would be off by. Bursts longer than a
    visit leave clean pairs and give 0; bursts much shorter than a visit sit inside every pair and cannot be escaped.
    Infinity where no pair is accepted; where every scan is shorter than a visit, the mean over all of them.
    """
    found, fits = [np.zeros(0)], False
    whole = [0.0, 0]
    for scan in scans:
        total = np.concatenate([[0.0], np.cumsum(scan.seconds)])
        whole[0] += float(total[-1])
        whole[1] += len(scan.seconds)
        if len(scan.seconds) < 2 * block + 1:
            continue
        reading = _readings(scan, block)
        first = np.arange(len(reading))  # the reading before is runs first .. first + block - 1
        begin = first + block
        begin = begin[begin < len(scan.start)]
        last = np.maximum(np.searchsorted(scan.start, scan.start[begin] + length), begin + 1)  # the reading after
        inside = last < len(reading)
        first, begin, last = first[: len(begin)][inside], begin[inside], last[inside]
        fits = fits or len(first) > 0
        quiet = reading <= reference * (1 + rules.tolerance)
        span = scan.start[last] - scan.start[begin]
        held = (scan.waited[last] - scan.waited[begin]) > rules.waiting * span
        taken = quiet[first] & quiet[last] & ~held
        between = (total[last] - total[begin]) / (last - begin)
        found.append(np.maximum(between / reference - 1, 0.0)[taken])
    if not fits:
        return max(whole[0] / whole[1] / reference - 1, 0.0) if whole[1] else 0.0
    pooled = np.concatenate(found)
    return float(np.quantile(pooled, rules.order)) if len(pooled) else math.inf


def sensitivity(samples: Sequence[Samples]) -> float:
    """How much longer networks take, in per cent, when the control takes one per cent longer; at most 1.5.

    Disturbances of memory and cache hit networks unlike: a ResNet-18 felt a quarter of what the control felt, a narrow
    MobileNetV2 more than all of it. The pooled `slope` of all networks plus two standard errors; 1 until there are
    visits enough to tell.
    """
    found = slope(samples)
    return 1.0 if found is None else min(found[0] + 2 * found[1], 1.5)


def slope(samples: Sequence[Samples]) -> tuple[float, float] | None:
    """Slope of log seconds over log control of the visits of each network, accepted or not, and its standard error.

    One slope for all ``samples``, each around its own medians; None until there are visits enough to tell, and where
    it is next to nothing: bursts in step with the visits hit the network while the control rests, and conversely.
    """
    x, y, used = [np.zeros(0)], [np.zeros(0)], 0
    for part in samples:
        _, first, count = np.unique(part.visit, return_index=True, return_counts=True)
        held = np.nan_to_num(part.wait[first]) > 0.005
        if (~held).sum() < 4:
            continue
        mean = np.add.reduceat(part.values, first) / count
        control = np.log((part.before[first] + part.after[first]) / 2)[~held]
        # Control readings far above the rest are another kind of disturbance; they would only pull at the slope.
        near = control <= np.quantile(control, 0.25) + 0.15
        took = np.log(mean[~held])[near]
        x.append(control[near] - np.median(control[near]))
        y.append(took - np.median(took))
        used += 1
    left, right = np.concatenate(x), np.concatenate(y)
    if len(left) < 30 or not float((left**2).sum()) > 0:
        return None
    keep = np.abs(right) <= 4 * np.median(np.abs(right)) + 1e-12
    left, right = left[keep], right[keep]
    energy = float((left**2).sum())
    if len(left) - used < 10 or not energy > 0:
        return None
    rise = float((left * right).sum()) / energy
    error = math.sqrt(float(((right - rise * left) ** 2).sum()) / (len(left) - used - 1) / energy)
    return (rise, error) if rise + 2 * error >= _LEAST_SLOPE else None


class Bench:
    """A target with its control workload, reference and rules: where networks are measured.

    ``clock`` and ``waited`` are the host's monotonic clock and its account of processor waits; tests replace them.
    A target that computes its times (``target.estimated``) needs no control: each network is asked once.
    """

    def __init__(
        self,
        target: Target,
        *,
        rules: MeasuringRules | None = None,
        references: ReferenceFile | None = None,
        control: Loaded | None = None,
        environment: Mapping[str, str] | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[], float | None] | None = None,
    ) -> None:
        self.target = target
        self.rules = rules or MeasuringRules()
        self.references = references or ReferenceFile()
        self.environment = dict(environments.environment(target) if environment is None else environment)
        self.key = environments.digest(self.environment)
        self._rng = np.random.default_rng(seed)
        self._clock = clock
        # A GPU times itself; the host thread's waits say nothing about it.
        on_host = target.device == "cpu"
        self._waited = waited or (lambda: machine.waited(target.threads > 1) if on_host else None)
        if control is None and target.estimated is None:
            control = load_control(target)
        self._control = control or Loaded.exact(1.0)
        self._block = 2  # control runs in a reading; set by the first warm-up
        self._scans: list[Scan] = []
        self._expected: weakref.WeakKeyDictionary[Loaded, float] = weakref.WeakKeyDictionary()
        self._last: tuple[float, float] | None = None
        self._reference: Reference | None = None

    @property
    def reference(self) -> Reference:
        """What the control takes undisturbed: the stored reference, or a lower one just seen."""
        if self._reference is None:
            self.calibrate()
        assert self._reference is not None
        return self._reference

    def calibrate(self, seconds: float = 0.5) -> Reference:
        """Warm the control up until it is stable, scan it, and compare with the stored reference."""
        if self.target.estimated is not None:
            self._reference = Reference(0.0, time.strftime("%Y-%m-%d"))  # nothing to compare with
            return self._reference
        with self.target.active():
            expected = self._warm_up(self._control)
            self._block = min(max(math.ceil(_READING / expected), 2), _MOST_RUNS)
            self.scan(seconds)
        return self.reference

    def scan(self, seconds: float) -> Scan:
        """Run the control alone for ``seconds`` and keep the record of every run."""
        least = 10 * self._block
        if self.target.remote_device is not None:
            start, waits, durations = self.target.remote_device.scan(self._control, seconds, least).T
        else:
            begin = self._clock()
            rows: list[tuple[float, float, float]] = []
            while (now := self._clock()) - begin < seconds or len(rows) < least:
                rows.append((now - begin, self._waited() or 0.0, float(self._control.run(1)[0])))
            start, waits, durations = (np.asarray(column) for column in zip(*rows, strict=True))
        scan = Scan(start, durations, waits)
        self._scans.append(scan)
        # The 5 % quantile of many readings: in a quiet moment of a busy machine, but no single lucky run.
        self._reference = self.references.lower(self.key, float(np.quantile(_readings(scan, self._block), 0.05)))
        self._last = None
        return scan

    def warm_up(self, loaded: Loaded, limit: float = 2.0) -> float:
        """Run until stable (allocators, autotuning, page faults); seconds that one run is expected to take."""
        if self.target.estimated is not None:
            return float(loaded.run(1)[0])
        with self.target.active():
            expected = self._warm_up(loaded, limit)
        self._expected[loaded] = expected
        return expected

    def _warm_up_new(self, networks: Iterable[Loaded]) -> None:
        for loaded in networks:
            if loaded not in self._expected:
                self._expected[loaded] = self._warm_up(loaded)

    def _warm_up(self, loaded: Loaded, limit: float = 2.0) -> float:
        begin = self._clock()
        best, stable = float(loaded.run(1)[0]), 0
        for _ in range(200):
            now = float(loaded.run(1)[0])
            stable = stable + 1 if now >= 0.97 * best else 0  # no longer getting faster
            best = min(best, now)
            if stable >= 3 or self._clock() - begin > limit:
                break
        return best

    def measure(
        self,
        networks: Mapping[str, Loaded],
        *,
        limit: float = 60.0,
        earlier: Mapping[str, Samples] | None = None,
        on_visit: Callable[[str, Samples, Measurement], None] | None = None,
        rules: MeasuringRules | None = None,
    ) -> dict[str, Measurement]:
        """Measure ``networks`` until every one is finished and trusted, for ``limit`` seconds at most.

        A network whose runs were disturbed too much is measured afresh: what the control cannot see in one attempt says
        nothing about another. Arguments and result as for `measure_once`.
        """
        end, known, rules = self._clock() + limit, dict(earlier or {}), rules or self.rules
        found = self.measure_once(networks, limit=limit, earlier=known, on_visit=on_visit, rules=rules)
        while not all(m.trusted for m in found.values()) and (left := end - self._clock()) > 0:
            if any(m.hidden > rules.worst for m in found.values()) and not self.wait_until_quiet(networks, left, rules):
                break
            known |= {name: m.samples for name, m in found.items() if m.hidden <= rules.worst}
            left = max(end - self._clock(), 0.0)
            found = self.measure_once(networks, limit=left, earlier=known, on_visit=on_visit, rules=rules)
        return found

    def wait_until_quiet(
        self, networks: Mapping[str, Loaded], limit: float, rules: MeasuringRules | None = None
    ) -> bool:
        """Run the control alone until it shows no hidden disturbance of visits to ``networks``; whether it did in time.

        Between two attempts: repeated all the time, a disturbed measurement would be accepted by chance some day.
        """
        rules, end = rules or self.rules, self._clock() + limit
        with self.target.active():
            while self._clock() < end:
                self._scans = []
                self.scan(1.0)
                if self.hidden_so_far(networks, rules) <= rules.worst:
                    return True
        return False

    def measure_once(
        self,
        networks: Mapping[str, Loaded],
        *,
        limit: float = 60.0,
        earlier: Mapping[str, Samples] | None = None,
        on_visit: Callable[[str, Samples, Measurement], None] | None = None,
        rules: MeasuringRules | None = None,
    ) -> dict[str, Measurement]:
        """Measure ``networks`` in random rounds until every one meets the stopping rule, for ``limit`` seconds at most.

        Returns a `Measurement` each, trusted or not. ``earlier`` runs (same environment, judged already) are counted
        in. ``on_visit`` gets the name, the runs of the visit just made, and the measurement so far: for storing and for
        showing. ``rules`` replaces the bench's rules.
        """
        rules = rules or self.rules
        if self.target.estimated is not None:
            return self._ask(networks, rules, earlier or {}, on_visit)
        parts = {name: [earlier[name]] if earlier and name in earlier else [] for name in networks}

        def so_far(names: Iterable[str]) -> dict[str, Measurement]:
            return {n: self._judge(n, parts[n], math.inf, rules) for n in names}

        reference = self.reference.seconds
        found = so_far(networks)
        if all(m.finished for m in found.values()):
            return found
        visits = 0
        with self.target.active():
            self._warm_up_new(networks[name] for name in networks if not found[name].finished)
            self._scans = []  # what hides in these runs shows in the scans between them, not in those of another time
            self.scan(0.5)
            begin = rescanned = self._clock()
            while self._clock() - begin <= limit:
                if self._clock() - rescanned > _RESCAN:
                    self.scan(0.25)
                    rescanned = self._clock()
                if self.reference.seconds < reference:
                    _log.info("The control ran faster than its reference; all runs are judged by the lower one.")
                    reference, found = self.reference.seconds, so_far(networks)
                pending = [str(n) for n in self._rng.permutation([n for n in networks if not found[n].finished])]
                if not pending:
                    break
                self._warm_up_new(networks[name] for name in pending)  # a lower reference can bring in some
                for name in pending:
                    samples = self._visit(networks[name], visits)
                    visits += 1
                    parts[name].append(samples)
                    if on_visit is not None:
                        on_visit(name, samples, found[name])
                    if self._clock() - begin > limit:
                        break
                found |= so_far(pending)
            for _ in range(4):  # a scan can fall into a long burst; the visits had many chances, so give it some more
                if math.isfinite(self.hidden_so_far(networks, rules)):
                    break
                self.scan(0.5)
        felt = sensitivity([Samples.joined(p) for p in parts.values() if p])
        return {n: self._judge(n, parts[n], self._length(networks[n]), rules, felt) for n in networks}

    def hidden_so_far(self, networks: Mapping[str, Loaded], rules: MeasuringRules | None = None) -> float:
        """Inflation that the control cannot see in the longest visit to ``networks``.

        By the scans since `measure_once` began, for networks that feel a disturbance as much as the control does; 0
        where nothing is scanned.
        """
        lengths = [self._length(loaded) for loaded in networks.values()]
        longest = max((length for length in lengths if math.isfinite(length)), default=0.0)
        return inflation(self._scans, self.reference.seconds, rules or self.rules, longest, self._block)

    def _ask(
        self,
        networks: Mapping[str, Loaded],
        rules: MeasuringRules,
        earlier: Mapping[str, Samples],
        on_visit: Callable[[str, Samples, Measurement], None] | None,
    ) -> dict[str, Measurement]:
        """One exact run of each network that is not known yet, without a control (0 s before and after)."""
        found = {}
        for name, loaded in networks.items():
            samples = earlier.get(name, Samples.empty())
            if not len(samples):
                samples = Samples.of_visit(loaded.run(1), 0, 0.0, 0.0, math.nan)
                if on_visit is not None:
                    on_visit(name, samples, self._judge(name, [samples], math.inf, rules))
            found[name] = self._judge(name, [samples], math.inf, rules)
        return found

    def now(self) -> float:
        """Seconds on the clock that time limits refer to."""
        return self._clock()

    def least_seconds(self, networks: int) -> float:
        """What `measure` needs at the very least for so many networks; 0 where that is next to nothing."""
        return 0.0

    def explain(self, doubtful: Mapping[str, Measurement], limit: float) -> MeasurementError:
        """The error for measurements that cannot be trusted: how many, why, who disturbs, what to do."""
        name, worst = max(doubtful.items(), key=lambda item: (item[1].rejected, item[1].halfwidth))
        reference = self.reference
        text = f"{len(doubtful)} measurement(s) on {self.target.title} cannot be trusted (time limit {limit:.0f} s)"
        text += f"; {name}: {worst.doubt}"
        away = self.target.remote_device
        if neighbour := machine.busiest_process() if away is None else away.busiest_process():
            text += f"; {neighbour}"
        return MeasurementError(
            f"{text}. Stop what else is running, give more time with --time-limit, or accept more disturbance with "
            f"--allow 5%; if this machine became slower for good since {reference.day}, use --reset-reference"
        )

    def _judge(
        self, name: str, parts: list[Samples], length: float, rules: MeasuringRules, felt: float = 1.0
    ) -> Measurement:
        hidden, own, samples = 0.0, None, Samples.joined(parts)
        if math.isfinite(length):
            share = inflation(self._scans, self.reference.seconds, rules, length, self._block)
            hidden = felt * share
            if math.isfinite(share) and (found := slope([samples])) is not None:
                own = (share * found[0], share * found[1])
        return Measurement(
            name, self.target.title, samples, self.reference.seconds, rules, self.environment, hidden, own
        )

    def _plan(self, expected: float) -> tuple[int, int]:
        """Runs to discard and runs to keep in one visit of a network that takes ``expected`` seconds.

        Visits are short, so that they fit between the bursts of a neighbour.
        """
        if expected >= _LONG:
            return 0, 1
        discarded = min(math.ceil(self.rules.warm_in / expected), _MOST_RUNS)
        return discarded, min(math.ceil(self.rules.visit / expected), _MOST_RUNS)

    def _length(self, loaded: Loaded) -> float:
        """Seconds between the two control readings of a visit; infinity for a network that was never run here."""
        expected = self._expected.get(loaded)
        return math.inf if expected is None else expected * sum(self._plan(expected))

    def _read_control(self) -> float:
        return float(self._control.run(_DISCARDED + self._block)[_DISCARDED:].mean())

    def _visit(self, loaded: Loaded, number: int) -> Samples:
        discarded, kept = self._plan(self._expected[loaded])
        if self.target.remote_device is not None:
            control = (self._control, _DISCARDED + self._block)
            steps = [control, (loaded, discarded), (loaded, kept), control]
            (first, _), _, (seconds, waits), (final, _) = self.target.remote_device.sequence(steps)
            before, after = float(first[-self._block :].mean()), float(final[-self._block :].mean())
            return Samples.of_visit(seconds, number, before, after, waits / float(seconds.sum()))
        # The control after one visit is the control before the next, unless something came between.
        last = self._last
        fresh = last is not None and self._clock() - last[0] < 1e-3
        before = last[1] if fresh and last is not None else self._read_control()
        if discarded:
            loaded.run(discarded)
        ready = self._waited()
        seconds = loaded.run(kept)
        done = self._waited()
        after = self._read_control()
        self._last = (self._clock(), after)
        wait = math.nan if ready is None or done is None else (done - ready) / float(seconds.sum())
        return Samples.of_visit(seconds, number, before, after, wait)
