"""Measuring time on a machine that other processes use as well.

Interference comes and goes, and slows neighbouring runs alike. Every run of a network is therefore made between two
runs of the dense network, and counts as a ratio to the faster one. Networks are visited one run at a time in random
rounds, with enough copies of each in turn that no network finds its own weights in the caches: so every run begins
alike, with few networks in the round or with many. A block is some rounds with freshly loaded networks; the scatter of
blocks gives the error of a ratio. Nothing is rejected. The dense network's own time is the one absolute number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from dsa_hw.errors import MeasurementError
from dsa_hw.utils.arrays import Floats
from profilers import machine
from profilers.measuring import environment as environments
from profilers.measuring.measurement import Measurement, Samples, pooled
from profilers.measuring.rules import MeasuringRules
from profilers.measuring.sittings import Scatter, Sitting, SittingFile, sitting_key
from profilers.networks.loaded import Loadable, Loaded
from profilers.targets import Target

__all__ = ["DENSE", "Bench", "Enough", "OnRound", "dense_samples"]

DENSE = "dense"
"""The name of the dense network among the networks and runs of a measurement."""

_MOST_COPIES = 64  # of one network
_MOST_BYTES = 2**31  # of all copies
_LONGEST_LOADING = 5.0  # seconds of loading that a block lasts as long as
_STEP = 0.010  # seconds of one visit on an accelerator, where a single run is mostly launching
_MOST_RUNS = 50  # in such a visit

OnRound = Callable[[Mapping[str, Samples]], None]
"""Called after each round with the new runs of every network and of the dense one."""
Enough = Callable[[Mapping[str, Measurement]], bool]
"""Called after a block with the measurements so far; True ends measuring."""


class Bench:
    """A target where the time of networks is measured, as ratios to a dense network.

    A target that computes its times (``target.estimated``) is asked once for each network.

    Args:
        target: Where networks run.
        network: Fingerprint and inputs of the dense network, under which sittings are compared; None compares none.
        rules: The rules of measuring; the defaults if None.
        sittings: Where the scatter of sittings is kept; the user's cache folder if None.
        environment: Versions, device and settings; determined if None.
        seed: Seed of the order of visits.
        clock: Returns seconds; the host's monotonic clock.

    Attributes:
        key: The digest of the environment.
        scatter: How much sittings of this network differ here.
    """

    measurement_class: ClassVar[type[Measurement]] = Measurement

    def __init__(
        self,
        target: Target,
        *,
        network: tuple[str, Sequence[Any]] | None = None,
        rules: MeasuringRules | None = None,
        sittings: SittingFile | None = None,
        environment: Mapping[str, str] | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = target
        self.rules = rules or MeasuringRules()
        self.environment = dict(environments.environment(target) if environment is None else environment)
        self.key = environments.digest(self.environment)
        self.sittings = sittings or SittingFile()
        self._sitting_key = sitting_key(self.key, *network, self.rules.statistic) if network else None
        self.scatter = self.sittings.scatter(self._sitting_key) if self._sitting_key else Scatter()
        self._rng = np.random.default_rng(seed)
        self._clock = clock
        self._blocks = 0

    def record(self, anchor: Measurement) -> None:
        """Keep what this sitting found of the anchor pair, for the intervals of later sittings."""
        if self._sitting_key is None or anchor.estimated or not anchor.rules.paired or anchor.samples.blocks < 2:
            return
        scale = replace(anchor, scatter=Scatter(ratio=0.0, scale=0.0)).scale
        self.sittings.add(self._sitting_key, Sitting(anchor.within, scale, round(time.time(), 3)))
        self.scatter = self.sittings.scatter(self._sitting_key)

    def measure(
        self,
        networks: Mapping[str, Loadable],
        dense: Loadable,
        *,
        limit: float = 60.0,
        earlier: Mapping[str, Samples] | None = None,
        sitting: int = 0,
        on_round: OnRound | None = None,
        enough: Enough | None = None,
        rules: MeasuringRules | None = None,
    ) -> dict[str, Measurement]:
        """Measure networks in blocks until every one is finished, or for ``limit`` seconds.

        At least one block is made, so that there is always an answer.

        Args:
            networks: Networks by name.
            dense: The network that every run is compared with.
            limit: Seconds after which to stop.
            earlier: Runs of the same environment that are counted in, by name; those of the dense network as `DENSE`.
            sitting: Number of this sitting, different from those of ``earlier``.
            on_round: Called after each round, to store runs and to show progress.
            enough: Asked after each block, from the second, whether to stop. Without it, measuring stops when all
                networks are finished. It may look at the width of intervals. To decide by their position, see ``look``
                of `judged`.
            rules: The rules of measuring; those of the bench if None.

        Returns:
            A measurement of each network and of the dense one.
        """
        rules = rules or self.rules
        parts = {name: [earlier[name]] if earlier and name in earlier else [] for name in (DENSE, *networks)}

        def keep(new: Mapping[str, Samples]) -> None:
            for name, samples in new.items():
                parts[name].append(samples)
            if on_round is not None:
                on_round(new)

        if self.target.estimated is not None:
            self._compute(networks, dense, parts, keep)
            return self.judged({name: Samples.joined(p) for name, p in parts.items()}, rules)
        end, blocks = self._clock() + limit, 0
        found = self.judged({name: Samples.joined(p) for name, p in parts.items()}, rules)
        with self.target.active():
            kept: dict[str, list[Loaded]] = {}
            while True:
                pending = [n for n in networks if enough is not None or not found[n].finished]
                if (networks and not pending) or (not networks and found[DENSE].finished):
                    break
                if not self.target.slow_to_load:
                    kept = {}
                self._block(pending, networks, dense, kept, rules, sitting, end, keep)
                blocks += 1
                found = self.judged({name: Samples.joined(p) for name, p in parts.items()}, rules)
                if self._clock() >= end or (enough is not None and blocks >= rules.least_blocks and enough(found)):
                    break
        return found

    def judged(self, runs: Mapping[str, Samples], rules: MeasuringRules, look: int = 0) -> dict[str, Measurement]:
        """Return the measurements of runs.

        Args:
            runs: The runs by name; those of the dense network as `DENSE`.
            rules: The rules of measuring.
            look: Which look at growing data this is, where looks decide whether to go on: intervals allow for it.
        """
        dense = runs[DENSE]
        variance = pooled([samples for name, samples in runs.items() if name != DENSE], dense)
        return {
            name: self._judge(name, samples, dense, rules, variance, self.scatter, look)
            for name, samples in runs.items()
        }

    def _judge(
        self,
        name: str,
        samples: Samples,
        dense: Samples,
        rules: MeasuringRules,
        variance: float,
        scatter: Scatter,
        look: int = 0,
    ) -> Measurement:
        return self.measurement_class(
            name, self.target.title, samples, dense, rules, self.environment, scatter, variance, look
        )

    def _compute(
        self,
        networks: Mapping[str, Loadable],
        dense: Loadable,
        parts: Mapping[str, Sequence[Samples]],
        keep: Callable[[Mapping[str, Samples]], None],
    ) -> None:
        """Ask the target for the time of each network that is not known yet."""
        whole = float(parts[DENSE][0].values[0]) if parts[DENSE] else float(dense.load().run(1)[0])
        if not parts[DENSE]:
            keep({DENSE: Samples.of(np.asarray([whole]), whole, whole)})
        for name, network in networks.items():
            if not parts[name]:
                keep({name: Samples.of(network.load().run(1), whole, whole)})

    def _block(
        self,
        pending: Sequence[str],
        networks: Mapping[str, Loadable],
        dense: Loadable,
        kept: dict[str, list[Loaded]],
        rules: MeasuringRules,
        sitting: int,
        end: float,
        keep: Callable[[Mapping[str, Samples]], None],
    ) -> None:
        """Load networks and visit them in rounds.

        At the end of the time a block is cut short. One whose loading took up the time is not: it has all its rounds,
        or lasts as long again, because a single run says nothing.
        """
        copies = self._copies([networks[name].size for name in pending], dense.size)
        loading = self._clock()
        for name in (DENSE, *pending):
            wanted = copies[0] if name == DENSE else copies[1]
            have = kept.setdefault(name, [])
            while len(have) < wanted:
                have.append((dense if name == DENSE else networks[name]).load())
                if self.target.warms_up:
                    self._warm_up(have[-1])
        # A block measures for about as long as it took to load: fast networks are visited more often.
        least = max(rules.least_seconds, min(self._clock() - loading, _LONGEST_LOADING))
        begin, rounds, number = self._clock(), 0, self._blocks
        self._blocks += 1
        turn, last = 0, math.inf
        while rounds < rules.rounds or self._clock() - begin < least:
            order = [str(n) for n in self._rng.permutation(list(pending))] if pending else [DENSE]
            steps = [kept[DENSE][turn % copies[0]]]
            for i, name in enumerate(order):
                if pending:
                    steps.append(kept[name][rounds % copies[1]])
                steps.append(kept[DENSE][(turn + 1 + i) % copies[0]])
            turn += len(order) + 1  # the copy that ended a round must not begin the next
            new = self._round(order if pending else [], steps, number, sitting)
            new[DENSE].before[0] = last  # the dense network's last run of the round before
            last = float(new[DENSE].values[-1])
            keep(new)
            rounds += 1
            if self._clock() >= end and (rounds >= rules.rounds or self._clock() - begin >= least):
                break

    def _copies(self, sizes: Sequence[int], dense: int) -> tuple[int, int]:
        """Return how many copies of the dense network, and of each other, take turns.

        Between two runs of the same copy, other networks with more weights than the caches hold are run.
        """
        if self.target.slow_to_load:
            return 1, 1
        most = min(_MOST_COPIES, max(_MOST_BYTES // max(dense + sum(sizes), 1), 1))
        whole = len(sizes) * dense + sum(sizes)  # of one round, which runs the dense network beside each other
        wanted = 2 * self.target.cache
        pivots, others = (math.ceil(wanted / max(b, 1)) for b in (whole / len(sizes) if sizes else dense, whole))
        return min(max(pivots, 2), most), min(max(others, 1), most)

    def _warm_up(self, loaded: Loaded) -> None:
        """Run until memory is allocated and kernels are chosen."""
        best, stable = float(loaded.run(1)[0]), 0
        for _ in range(1 if self.target.device == "cpu" else 20):
            now = float(loaded.run(1)[0])
            stable = stable + 1 if now >= 0.97 * best else 0
            best = min(best, now)
            if stable >= 3:
                break

    def _round(self, order: Sequence[str], steps: Sequence[Loaded], block: int, sitting: int) -> dict[str, Samples]:
        """Run steps (dense, network, dense, network, ..., dense) and return the runs by name."""
        runs = self._run(steps)
        typical = [float(np.median(values)) for values in runs]
        found: dict[str, Samples] = {}
        for i, name in enumerate(order):
            found[name] = Samples.of(runs[2 * i + 1], typical[2 * i], typical[2 * i + 2], block, sitting)
        found[DENSE] = dense_samples([runs[i] for i in range(0, len(runs), 2 if order else 1)], block, sitting)
        return found

    def _run(self, steps: Sequence[Loaded]) -> list[Floats]:
        """Return the seconds of each step: one run on a CPU, some milliseconds of runs on an accelerator."""
        if self.target.remote_device is not None:
            return self.target.remote_device.sequence([(loaded, 1) for loaded in steps])
        if self.target.device == "cpu":
            return [loaded.run(1) for loaded in steps]
        return [_visit(loaded) for loaded in steps]

    def now(self) -> float:
        """Return the seconds of the clock that time limits refer to."""
        return self._clock()

    def least_seconds(self, networks: int) -> float:
        """Return the least time that `measure` needs for a number of networks; 0 where it is negligible."""
        return 0.0

    def refuse(self, doubtful: Mapping[str, Measurement], limit: float) -> MeasurementError:
        """Return the error for measurements that are less precise than required: how many, why, and what to do.

        Args:
            doubtful: The measurements by name.
            limit: The time limit in seconds.
        """
        name, worst = max(doubtful.items(), key=lambda item: item[1].halfwidth)
        count = "1 measurement" if len(doubtful) == 1 else f"{len(doubtful)} measurements"
        away = self.target.remote_device
        process = machine.busiest_process() if away is None else away.busiest_process()
        return MeasurementError(
            f"{count} on {self.target.title} cannot be used (time limit {limit:.0f} s). {name}: {worst.doubt}. "
            + (f"{process}. " if process else "")
            + "Repeat the command, which continues; give more time with --time-limit; or require less with --require."
        )


def dense_samples(steps: Sequence[Floats], block: int, sitting: int) -> Samples:
    """Return the dense network's runs of one round, each beside those before and after it."""
    typical = [math.inf, *(float(np.median(values)) for values in steps), math.inf]
    parts = [Samples.of(values, typical[i], typical[i + 2], block, sitting) for i, values in enumerate(steps)]
    return Samples.joined(parts)


def _visit(loaded: Loaded) -> Floats:
    """Return the runs of one visit to an accelerator, without the first third, in which clocks and caches settle."""
    first = float(loaded.run(1)[0])
    count = min(max(math.ceil(_STEP / first), 1), _MOST_RUNS)
    return loaded.run(count)[count // 3 :]
