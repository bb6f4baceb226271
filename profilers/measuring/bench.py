"""Measuring time on a machine that other processes use as well.

Interference only adds time. Networks are therefore visited in random rounds, with a fixed control workload between the
visits. A visit counts only if the control before and after it is near an absolute reference and the scheduler did not
make the process wait. The reported statistic is a low quantile of the runs that are left. Between rounds the control
runs alone for a moment: treated as if it were visits, that recording shows how much interference the test cannot
detect (see `profilers.measuring.interference`), and measurements on a machine with too much of it are refused.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from dsa_hw.errors import MeasurementError
from profilers import machine
from profilers.measuring import environment as environments
from profilers.measuring.control import load_control
from profilers.measuring.interference import Scan, inflation, readings, sensitivity, slope
from profilers.measuring.measurement import Measurement, Samples
from profilers.measuring.reference import Reference, ReferenceFile
from profilers.measuring.rules import MeasuringRules
from profilers.targets import Loaded, Target

__all__ = ["Bench", "OnVisit"]

_log = logging.getLogger(__name__)

_DISCARDED = 2  # control runs before a reading: the caches still contain the data of another workload
_READING = 0.004  # seconds; a single run of the control varies by several percent even on a quiet machine
_LONG = 0.015  # seconds; a cold cache costs about 0.1 ms, which does not matter in a run of this length
_MOST_RUNS = 50
_RESCAN = 5.0  # seconds between two scans of the control alone, 0.25 s each: a twentieth of the time

OnVisit = Callable[[str, Samples, Measurement], None]
"""Called after each visit with the name of the network, the runs of the visit and the measurement before it."""


class Bench:
    """A target with its control workload, reference and rules, where the time of networks is measured.

    A target that computes its times (``target.estimated``) needs no control: each network is run once.

    Args:
        target: Where networks run.
        rules: The rules of measuring; the defaults if None.
        references: Where references are kept; the user's cache folder if None.
        control: The control workload; the target's own if None.
        environment: Versions, device and settings; determined if None.
        seed: Seed of the order of visits.
        clock: Returns seconds; the host's monotonic clock.
        waited: Returns the seconds that this process has waited for a processor, or None where that is not known.

    Attributes:
        key: The digest of the environment.
    """

    measurement_class: ClassVar[type[Measurement]] = Measurement

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
        # A GPU has its own clock; the waits of the host thread do not affect it.
        on_host = target.device == "cpu"
        self._waited = waited or (lambda: machine.waited(target.threads > 1) if on_host else None)
        if control is None and target.estimated is None:
            control = load_control(target)
        self._control = control or Loaded.exact(1.0)
        self._block = 2  # control runs in a reading; set by the first warm-up
        self._scans: list[Scan] = []
        self._scanned = -math.inf  # when the last scan ended
        self._expected: weakref.WeakKeyDictionary[Loaded, float] = weakref.WeakKeyDictionary()
        self._last: tuple[float, float] | None = None
        self._reference: Reference | None = None

    @property
    def reference(self) -> Reference:
        """The undisturbed control: the stored reference, or a lower one that was just measured."""
        if self._reference is None:
            self.calibrate()
        assert self._reference is not None
        return self._reference

    def calibrate(self, seconds: float = 0.5) -> Reference:
        """Warm up the control, scan it for ``seconds``, and return the lower of its time and the stored reference."""
        if self.target.estimated is not None:
            self._reference = Reference(0.0, time.strftime("%Y-%m-%d"))  # there is nothing to compare with
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
        # The 5% quantile of many readings is that of a quiet moment, but does not depend on a single fast run.
        self._reference = self.references.lower(self.key, float(np.quantile(readings(scan, self._block), 0.05)))
        self._last = None
        self._scanned = self._clock()
        return scan

    def warm_up(self, loaded: Loaded, limit: float = 2.0) -> float:
        """Run until times are stable (allocators, autotuning, page faults).

        Args:
            loaded: The network.
            limit: Seconds after which to stop.

        Returns:
            The seconds that one run is expected to take.
        """
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
        on_visit: OnVisit | None = None,
        rules: MeasuringRules | None = None,
    ) -> dict[str, Measurement]:
        """Measure ``networks`` until every one is finished and trusted, for ``limit`` seconds at most.

        A network whose runs were disturbed too much is measured again from the beginning, because the interference
        that the control cannot detect differs between attempts. Arguments and result are those of `measure_once`.
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

    def measure_once(
        self,
        networks: Mapping[str, Loaded],
        *,
        limit: float = 60.0,
        earlier: Mapping[str, Samples] | None = None,
        on_visit: OnVisit | None = None,
        rules: MeasuringRules | None = None,
    ) -> dict[str, Measurement]:
        """Measure ``networks`` in random rounds until every one meets the stopping rule.

        Args:
            networks: Networks by name.
            limit: Seconds after which to stop.
            earlier: Runs of the same environment that are counted in, by name.
            on_visit: Called after each visit, to store runs and to show progress.
            rules: The rules of measuring; those of the bench if None.

        Returns:
            A measurement of each network, trusted or not.
        """
        rules = rules or self.rules
        if self.target.estimated is not None:
            return self._compute(networks, rules, earlier or {}, on_visit)
        parts = {name: [earlier[name]] if earlier and name in earlier else [] for name in networks}

        def judge(names: Iterable[str]) -> dict[str, Measurement]:
            return {name: self._judge(name, Samples.joined(parts[name]), rules) for name in names}

        reference = self.reference.seconds
        found = judge(networks)
        if all(m.finished for m in found.values()):
            return found
        visits = 0
        with self.target.active():
            self._warm_up_new(networks[name] for name in networks if not found[name].finished)
            self._before_rounds()
            begin = self._clock()
            while self._clock() - begin <= limit:
                self._between_rounds()
                if self.reference.seconds < reference:
                    _log.info("The control was faster than its reference. All runs are judged by the lower one.")
                    reference, found = self.reference.seconds, judge(networks)
                pending = [str(n) for n in self._rng.permutation([n for n in networks if not found[n].finished])]
                if not pending:
                    break
                self._warm_up_new(networks[name] for name in pending)  # a lower reference can add some
                for name in pending:
                    samples = self._visit(networks[name], visits)
                    visits += 1
                    parts[name].append(samples)
                    if on_visit is not None:
                        on_visit(name, samples, found[name])
                    if self._clock() - begin > limit:
                        break
                found |= judge(pending)
            self._after_rounds(networks, rules)
        return self._with_hidden(networks, judge(networks), rules)

    def _before_rounds(self) -> None:
        """Prepare for visits; networks are warmed up."""
        self._scans = []  # interference in these runs shows in the scans between them, not in earlier ones
        self.scan(0.5)

    def _between_rounds(self) -> None:
        """Do what is due before the next round of visits."""
        if self._clock() - self._scanned > _RESCAN:
            self.scan(0.25)

    def _after_rounds(self, networks: Mapping[str, Loaded], rules: MeasuringRules) -> None:
        """Complete the session after the last visit."""
        for _ in range(4):  # one scan can be within a long burst; the visits had many chances
            if math.isfinite(self.hidden_so_far(networks, rules)):
                break
            self.scan(0.5)

    def _with_hidden(
        self, networks: Mapping[str, Loaded], judged: Mapping[str, Measurement], rules: MeasuringRules
    ) -> dict[str, Measurement]:
        """Return measurements with the inflation that the control cannot detect."""
        response = sensitivity([m.samples for m in judged.values()])
        found = dict(judged)
        for name, measurement in judged.items():
            length = self._length(networks[name])
            if not math.isfinite(length):
                continue
            share = inflation(self._scans, self.reference.seconds, rules, length, self._block)
            own = slope([measurement.samples]) if math.isfinite(share) else None
            found[name] = replace(
                measurement,
                hidden=response * share,
                own=None if own is None else (share * own[0], share * own[1]),
            )
        return found

    def _judge(self, name: str, samples: Samples, rules: MeasuringRules) -> Measurement:
        return self.measurement_class(name, self.target.title, samples, self.reference.seconds, rules, self.environment)

    def _compute(
        self,
        networks: Mapping[str, Loaded],
        rules: MeasuringRules,
        earlier: Mapping[str, Samples],
        on_visit: OnVisit | None,
    ) -> dict[str, Measurement]:
        """Run each network that is not known yet once, without a control (0 s before and after)."""
        found = {}
        for name, loaded in networks.items():
            samples = earlier.get(name, Samples.empty())
            if not len(samples):
                samples = Samples.of_visit(loaded.run(1), 0, 0.0, 0.0, math.nan)
                if on_visit is not None:
                    on_visit(name, samples, self._judge(name, samples, rules))
            found[name] = self._judge(name, samples, rules)
        return found

    def wait_until_quiet(
        self, networks: Mapping[str, Loaded], limit: float, rules: MeasuringRules | None = None
    ) -> bool:
        """Run the control alone until it shows no hidden interference in visits to ``networks``.

        Called between two attempts: attempts repeated without waiting would eventually be accepted by chance.

        Args:
            networks: Networks by name.
            limit: Seconds after which to stop.
            rules: The rules of measuring; those of the bench if None.

        Returns:
            Whether the machine became quiet in time.
        """
        rules, end = rules or self.rules, self._clock() + limit
        with self.target.active():
            while self._clock() < end:
                self._scans = []
                self.scan(1.0)
                if self.hidden_so_far(networks, rules) <= rules.worst:
                    return True
        return False

    def hidden_so_far(self, networks: Mapping[str, Loaded], rules: MeasuringRules | None = None) -> float:
        """Return the inflation that the control cannot detect in the longest visit to ``networks``.

        It is determined from the scans since `measure_once` began, for networks that are slowed as much as the control;
        0 without scans.
        """
        lengths = [self._length(loaded) for loaded in networks.values()]
        longest = max((length for length in lengths if math.isfinite(length)), default=0.0)
        return inflation(self._scans, self.reference.seconds, rules or self.rules, longest, self._block)

    def now(self) -> float:
        """Return the seconds of the clock that time limits refer to."""
        return self._clock()

    def least_seconds(self, networks: int) -> float:
        """Return the least time that `measure` needs for a number of networks; 0 where it is negligible."""
        return 0.0

    def explain(self, doubtful: Mapping[str, Measurement], limit: float) -> MeasurementError:
        """Return the error for measurements that cannot be trusted: how many, why, and what to do.

        Args:
            doubtful: The measurements by name.
            limit: The time limit in seconds.
        """
        name, worst = max(doubtful.items(), key=lambda item: (item[1].rejected, item[1].halfwidth))
        count = "1 measurement" if len(doubtful) == 1 else f"{len(doubtful)} measurements"
        away = self.target.remote_device
        process = machine.busiest_process() if away is None else away.busiest_process()
        return MeasurementError(
            f"{count} on {self.target.title} cannot be trusted (time limit {limit:.0f} s). {name}: {worst.doubt}. "
            + (f"{process}. " if process else "")
            + "Stop other processes, give more time with --time-limit, or allow more disturbance with --allow 5%. If "
            f"this machine has become slower since {self.reference.day}, use --reset-reference."
        )

    def _plan(self, expected: float) -> tuple[int, int]:
        """Return the runs to discard and to keep in one visit to a network that takes ``expected`` seconds.

        Visits are short, so that they fit between the bursts of another process.
        """
        if expected >= _LONG:
            return 0, 1
        discarded = min(math.ceil(self.rules.warm_in / expected), _MOST_RUNS)
        return discarded, min(math.ceil(self.rules.visit / expected), _MOST_RUNS)

    def _length(self, loaded: Loaded) -> float:
        """Return the seconds between the two control readings of a visit; infinity for a network that was never run."""
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
        # The control after one visit is the control before the next, unless time has passed between.
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
