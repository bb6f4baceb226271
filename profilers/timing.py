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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsa_hw.errors import MeasurementError

from . import environment as environments
from .measurement import Measurement, Protocol, Samples
from .micro import artefact_of, control_chain, input_of
from .reference import Reference, ReferenceFile
from .targets import Loaded, Target

__all__ = ["Bench", "Scan", "inflation"]

_log = logging.getLogger(__name__)

_DISCARDED, _KEPT = 2, 2  # control runs per reading: the first ones find the caches full of somebody else's data
_LONG = 0.025  # seconds; a cold cache costs about 0.1 ms, which no longer matters in a run of this length
_MOST_RUNS = 50


@dataclass(frozen=True, eq=False)
class Scan:
    """The control workload back to back, arrays of shape (n,): start (s), seconds, and
    the processor wait of this process until that start (s)."""

    start: NDArray[np.float64]
    seconds: NDArray[np.float64]
    waited: NDArray[np.float64]


def inflation(scans: Sequence[Scan], reference: float, protocol: Protocol, length: float) -> float:
    """The share by which visits of ``length`` seconds that pass the control test would still be inflated.

    Every pair of undisturbed control runs about ``length`` apart is a visit that would have been accepted; the control
    runs between them show what it would have suffered: time of disturbed ones beyond the usual, over usual time. The
    protocol's quantile of that, over all such pairs, is what the statistic would be off by. Bursts longer than a visit
    leave clean pairs and give 0; bursts much shorter than a visit sit inside every pair and cannot be escaped.
    Infinity where no pair is accepted; where every scan is shorter than a visit, the mean over all of them.
    """
    found, fits = [np.zeros(0)], False
    whole = [0.0, 0.0]
    for scan in scans:
        quiet = scan.seconds <= reference * (1 + protocol.tolerance)
        usual = float(np.median(scan.seconds[quiet])) if quiet.any() else reference
        beyond = np.concatenate([[0.0], np.cumsum(np.where(quiet, 0.0, scan.seconds - usual))])
        whole[0] += float(beyond[-1])
        whole[1] += usual * len(quiet)
        first = np.arange(len(quiet))
        last = np.maximum(np.searchsorted(scan.start, scan.start + length), first + 2)
        first, last = first[last < len(quiet)], last[last < len(quiet)]
        fits = fits or len(first) > 0
        span = scan.start[last] - scan.start[first + 1]
        held = (scan.waited[last] - scan.waited[first + 1]) > protocol.waiting * span
        taken = quiet[first] & quiet[last] & ~held
        extra = beyond[last] - beyond[first + 1]
        found.append((extra / (span - extra))[taken])
    if not fits:
        return whole[0] / whole[1] if whole[1] else 0.0
    pooled = np.concatenate(found)
    return float(np.quantile(pooled, protocol.order)) if len(pooled) else math.inf


class Bench:
    """A target with its control workload, reference and rules: where networks are measured.

    ``clock`` and ``waited`` are the host's monotonic clock and its account of processor waits; tests replace them.
    """

    def __init__(
        self,
        target: Target,
        *,
        protocol: Protocol | None = None,
        references: ReferenceFile | None = None,
        control: Loaded | None = None,
        environment: Mapping[str, str] | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[], float | None] | None = None,
    ) -> None:
        self.target = target
        self.protocol = protocol or Protocol()
        self.references = references or ReferenceFile()
        self.environment = dict(environments.environment(target) if environment is None else environment)
        self.key = environments.digest(self.environment)
        self._rng = np.random.default_rng(seed)
        self._clock = clock
        # A GPU times itself; the host thread's waits say nothing about it.
        on_host = target.device == "cpu"
        self._waited = waited or (lambda: environments.waited(target.threads > 1) if on_host else None)
        if control is None:
            chain = control_chain(target.device)
            control = target.load(artefact_of(chain, target), (input_of(chain, precision=target.precision),))
        self._control = control
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
        with self.target.active():
            self._warm_up(self._control)
            self.scan(seconds)
        return self.reference

    def scan(self, seconds: float) -> Scan:
        """Run the control alone for ``seconds`` and keep the record of every run."""
        begin = self._clock()
        rows: list[tuple[float, float, float]] = []
        while (now := self._clock()) - begin < seconds or len(rows) < 50:
            rows.append((now - begin, self._waited() or 0.0, float(self._control.run(1)[0])))
        start, waits, durations = (np.asarray(column) for column in zip(*rows, strict=True))
        scan = Scan(start, durations, waits)
        self._scans.append(scan)
        # The 10 % quantile of many: in a quiet moment of a busy machine, but no single lucky run.
        self._reference = self.references.lower(self.key, float(np.quantile(durations, 0.1)))
        self._last = None
        return scan

    def warm_up(self, loaded: Loaded, limit: float = 2.0) -> float:
        """Run until stable (allocators, autotuning, page faults); seconds that one run is expected to take."""
        with self.target.active():
            expected = self._warm_up(loaded, limit)
        self._expected[loaded] = expected
        return expected

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
        protocol: Protocol | None = None,
    ) -> dict[str, Measurement]:
        """Measure ``networks`` in random rounds until every one meets the stopping rule, for ``limit`` seconds at most.

        Returns a `Measurement` each, trusted or not. ``earlier`` runs (same environment) are counted in. ``on_visit``
        gets the name, the runs of the visit just made, and the measurement so far: for storing and for showing.
        ``protocol`` replaces the bench's rules.
        """
        rules = protocol or self.protocol
        reference = self.reference.seconds
        parts = {name: [earlier[name]] if earlier and name in earlier else [] for name in networks}
        found = {name: self._judge(name, parts[name], math.inf, rules) for name in networks}
        visits = 0
        with self.target.active():
            for name, loaded in networks.items():
                if loaded not in self._expected and not found[name].finished:
                    self._expected[loaded] = self._warm_up(loaded)
            begin = rescanned = self._clock()
            while pending := [name for name in networks if not found[name].finished]:
                if self._clock() - begin > limit:
                    break
                if self._clock() - rescanned > 10:
                    self.scan(0.25)
                    rescanned = self._clock()
                for name in self._rng.permutation(pending):
                    samples = self._visit(networks[str(name)], visits)
                    visits += 1
                    parts[str(name)].append(samples)
                    if on_visit is not None:
                        on_visit(str(name), samples, found[str(name)])
                    if self._clock() - begin > limit:
                        break
                found |= {n: self._judge(n, parts[n], math.inf, rules) for n in map(str, pending)}
        if self.reference.seconds < reference:
            _log.info("the control ran faster than its reference; all runs are judged by the lower one")
        lengths = {n: self._length(networks[n]) for n in networks}
        longest = max((length for length in lengths.values() if math.isfinite(length)), default=0.0)
        with self.target.active():
            for _ in range(4):  # a scan can fall into a long burst; the visits had many chances, so give it some more
                if math.isfinite(inflation(self._scans, self.reference.seconds, rules, longest)):
                    break
                self.scan(0.5)
        return {n: self._judge(n, parts[n], lengths[n], rules) for n in networks}

    def explain(self, doubtful: Mapping[str, Measurement], limit: float) -> MeasurementError:
        """The error for measurements that cannot be trusted: how many, why, who disturbs, what to do."""
        name, worst = max(doubtful.items(), key=lambda item: (item[1].rejected, item[1].halfwidth))
        reference = self.reference
        text = f"{len(doubtful)} measurement(s) on {self.target.title} cannot be trusted after {limit:.0f} s"
        text += f"; {name}: {worst.doubt}"
        if neighbour := environments.busiest():
            text += f"; {neighbour}"
        return MeasurementError(
            f"{text}. Stop what else is running, or give more time with --time-limit; if this machine became slower "
            f"for good since {reference.day}, use --reset-reference"
        )

    def _judge(self, name: str, parts: list[Samples], length: float, rules: Protocol) -> Measurement:
        hidden = 0.0
        if math.isfinite(length):
            hidden = inflation(self._scans, self.reference.seconds, rules, length)
        return Measurement(
            name,
            self.target.title,
            Samples.joined(parts),
            self.reference.seconds,
            rules,
            self.environment,
            hidden,
        )

    def _plan(self, expected: float) -> tuple[int, int]:
        """Runs to discard and runs to keep in one visit of a network that takes ``expected`` seconds.

        Visits are short, so that they fit between the bursts of a neighbour.
        """
        if expected >= _LONG:
            return 0, 1
        discarded = min(math.ceil(self.protocol.warm_in / expected), _MOST_RUNS)
        return discarded, min(math.ceil(self.protocol.visit / expected), _MOST_RUNS)

    def _length(self, loaded: Loaded) -> float:
        """Seconds between the two control readings of a visit; infinity for a network that was never run here."""
        expected = self._expected.get(loaded)
        return math.inf if expected is None else expected * sum(self._plan(expected))

    def _read_control(self) -> float:
        return float(self._control.run(_DISCARDED + _KEPT)[_DISCARDED:].mean())

    def _visit(self, loaded: Loaded, number: int) -> Samples:
        discarded, kept = self._plan(self._expected[loaded])
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
