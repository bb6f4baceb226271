"""Measuring energy: joules of one inference, gross and net, with a counter that is updated in steps.

A counter is updated every millisecond (RAPL) to every 100 ms (NVML). A window therefore starts and ends at an update.
Both are found while the network runs, so that they are noticed with similar delays, which cancel. A window lasts at
least 50 updates. Before a window the network runs for a while, because power and the counter's own averaging need time
to settle.

A round is: idle, dense network, network, dense network, another network, ..., dense network, idle. As when latency is
measured, a window counts as a ratio to the dense network's windows before and after it, because what other processes
add to the counter lasts longer than a pair of windows. Gross joules are the counted joules over the number of
inferences. Net joules exclude what idling for as long takes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from dsa_hw.errors import MeasurementError, ProfileError
from dsa_hw.utils.arrays import Floats
from profilers.measuring import environment as environments
from profilers.measuring import report, statistics
from profilers.measuring.bench import DENSE, Bench
from profilers.measuring.counters import Counter, Total, find
from profilers.measuring.measurement import Measurement, Samples
from profilers.measuring.rules import MeasuringRules
from profilers.measuring.sittings import SittingFile
from profilers.targets import Loaded, Target

__all__ = ["EnergyBench", "EnergyMeasurement", "Window", "update_period"]

_UPDATES = 50  # in a window: with unaligned ends, one update is 2%
_IDLE_UPDATES = 10  # with aligned ends, ten updates are enough to detect 3%
_ROUNDS = 2  # in a block: a window is already many runs
_BLUR = 80  # a window is this many times longer than the uncertainty of each of its ends
_LEAST_SECONDS = 0.25  # of a window, for fast counters
_LEAST_IDLE = 1.0  # of an idle period: idle boards have pulses of 10 to 100 ms (recorded traces of MLPerf Tiny)
_SETTLE = 0.5  # seconds under load before a window; and five updates
_STILL = 5.0  # seconds without an update after which a counter counts as stopped


def update_period(counter: Counter, changes: int = 20) -> float:
    """Return the seconds between two updates of ``counter``, the median over ``changes`` of them.

    Raises:
        MeasurementError: The counter does not move.
    """
    total = Total(counter)
    began = counter.clock()
    stamps: list[float] = []
    while len(stamps) <= changes:
        if total.read():
            stamps.append(counter.clock())
            continue
        waited = counter.clock() - (stamps[-1] if stamps else began)
        if waited > _STILL:
            raise _stopped(counter, _STILL)
        counter.sleep(max(waited / 100, 2e-5))  # a slow counter need not be read often
    if not total.joules > 0:
        raise _stopped(counter, counter.clock() - began)
    return float(np.median(np.diff(stamps)))


def _reading_takes(counter: Counter, times: int = 20) -> float:
    """Return the seconds that one reading takes."""
    began = counter.clock()
    for _ in range(times):
        counter.read_joules()
    return max((counter.clock() - began) / times, 0.0)


def _stopped(counter: Counter, seconds: float) -> MeasurementError:
    return MeasurementError(
        f"Counter {counter.name} did not move for {seconds:.1f} s, although the machine uses energy. It is disabled or "
        "not available in this virtual machine or container. Update the driver (NVIDIA: nvidia-smi -q -d POWER), run "
        "on the host, or use another meter with --counter package.module:function."
    )


@dataclass(frozen=True)
class Window:
    """The energy between two updates of a counter, and the inferences in that time."""

    joules: float
    seconds: float
    inferences: int
    updates: int

    @property
    def watts(self) -> float:
        """Mean power."""
        return self.joules / self.seconds


@dataclass(frozen=True, eq=False, repr=False)
class EnergyMeasurement(Measurement):
    """Energy of one inference of one network on one target; every window is one run of ``samples``."""

    quantity: ClassVar[str] = "energy"
    further_columns: ClassVar[tuple[str, ...]] = ("net", "watts", "idle_watts", "temperature")

    @property
    def joules(self) -> float:
        """Gross joules of one inference: the statistic of the windows."""
        return self.value

    @property
    def seconds(self) -> float:
        """Median seconds of one inference while energy was measured."""
        return self._median("seconds")

    @property
    def net(self) -> float:
        """Joules of one inference beyond idling."""
        idle = self._of("idle_watts") * self._of("seconds")
        net = self.samples.values - idle
        return statistics.quantile(net, self.rules.order) if len(net) else math.nan

    @property
    def watts(self) -> float:
        """Median power of the windows."""
        return self._median("watts")

    @property
    def idle_watts(self) -> float:
        """Median power before and after the windows, without load."""
        return self._median("idle_watts")

    @property
    def temperature(self) -> float:
        """Median temperature at the end of the windows in degrees Celsius; NaN where it is not known."""
        return self._median("temperature")

    def further(self) -> dict[str, float]:
        """Return the values of ``further_columns``."""
        return {name: float(getattr(self, name)) for name in self.further_columns}

    def _of(self, name: str) -> Floats:
        """Return an extra array of the windows; NaN where it is missing."""
        values = self.samples.extra.get(name)
        return np.full(self.runs, np.nan) if values is None else np.asarray(values, np.float64)

    def _median(self, name: str) -> float:
        values = self._of(name)
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else math.nan

    def __repr__(self) -> str:
        return report.energy(self)


class EnergyBench(Bench):
    """A target with its energy counter, where the energy of networks is measured.

    Args:
        target: Where networks run.
        counter: What `Counter.of` takes; the device's own counter if None.
        rules: The rules of measuring; the defaults if None.
        network: Fingerprint and inputs of the dense network, under which sittings are compared; None compares none.
        sittings: Where the scatter of sittings is kept; the user's cache folder if None.
        environment: Versions, device and settings; determined if None.
        seed: Seed of the order of visits.

    Raises:
        ProfileError: The target computes its times.
        MissingDependencyError: The device has no counter.
        MeasurementError: The counter does not move.
    """

    measurement_class = EnergyMeasurement

    def __init__(
        self,
        target: Target,
        counter: Any = None,
        *,
        rules: MeasuringRules | None = None,
        network: tuple[str, Sequence[Any]] | None = None,
        sittings: SittingFile | None = None,
        environment: Mapping[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        if target.estimated is not None:
            raise ProfileError(
                f"Energy cannot be measured on {target.name}: its times are {target.estimated}. Use a device with a "
                "counter, or EstimatedEnergyBudget(...)."
            )
        self.counter = find(target.device) if counter is None else Counter.of(counter)
        self.period = update_period(self.counter)
        about = dict(environments.environment(target) if environment is None else environment)
        about |= {"quantity": "energy", "counter": self.counter.name}
        if cap := self.counter.state().get("power_cap"):
            about["power cap"] = f"{cap:g} W"
        super().__init__(
            target,
            network=network,
            rules=replace(rules or MeasuringRules(), rounds=_ROUNDS, least_seconds=0.0),
            sittings=sittings,
            environment=about,
            seed=seed,
            clock=self.counter.clock,
        )
        self._expected: weakref.WeakKeyDictionary[Loaded, float] = weakref.WeakKeyDictionary()
        self._reading = _reading_takes(self.counter)

    def least_seconds(self, networks: int) -> float:
        """Return 1.25 times the time that the required windows of a number of networks take.

        Every network has a window, and the dense network one more than all others; a round begins and ends with an
        idle period. Each is preceded by settling. Networks that take longer than a few updates need more.
        """
        settle = max(5 * self.period, _SETTLE) + self.period
        window = max(_UPDATES * self.period, _LEAST_SECONDS) + settle
        idle = max(_IDLE_UPDATES * self.period, _LEAST_IDLE) + settle
        rounds = self.rules.least_blocks * self.rules.rounds
        return 1.25 * rounds * ((2 * networks + 1) * window + 2 * idle)

    def _copies(self, sizes: Sequence[int], dense: int) -> tuple[int, int]:
        return 1, 1  # a window is many runs of one network

    def _warm_up(self, loaded: Loaded) -> None:
        super()._warm_up(loaded)
        self._expected[loaded] = float(np.median(loaded.run(3)))

    def _round(self, order: Sequence[str], steps: Sequence[Loaded], block: int, sitting: int) -> dict[str, Samples]:
        first = self._idle()
        windows, states = [], []
        for loaded in steps:
            windows.append(self._window(loaded, _UPDATES))
            states.append(self.counter.state())
        second = self._idle()
        joules = [w.joules / w.inferences for w in windows]
        extras = [
            {
                "seconds": w.seconds / w.inferences,
                "watts": w.watts,
                "idle_watts": (first + second) / 2,
                "idle_before": first,
                "idle_after": second,
                "inferences": float(w.inferences),
                "updates": float(w.updates),
                **{name: float(value) for name, value in state.items()},
            }
            for w, state in zip(windows, states, strict=True)
        ]

        def sample(i: int, before: float, after: float) -> Samples:
            extra = {name: np.asarray([value]) for name, value in extras[i].items()}
            return Samples.of(np.asarray([joules[i]]), before, after, block, sitting, extra)

        found = {name: sample(2 * i + 1, joules[2 * i], joules[2 * i + 2]) for i, name in enumerate(order)}
        pivots = list(range(0, len(steps), 2) if order else range(len(steps)))
        sides = [math.inf, *(joules[i] for i in pivots), math.inf]
        found[DENSE] = Samples.joined([sample(i, sides[n], sides[n + 2]) for n, i in enumerate(pivots)])
        return found

    def _window(self, loaded: Loaded, updates: int) -> Window:
        """Return a window over runs of ``loaded`` with at least ``updates`` updates.

        The counter is read eight times per update, but so rarely that reading takes at most 2% of the time. An
        update is noticed with a delay of at most the time between readings, and of at most a period where runs take
        longer. Two such delays, uniform and independent, change a window of 80 times their range by 0.5%.
        """
        expected = self._expected[loaded]
        chunk = max(1, math.ceil(max(self.period / 8, 50 * self._reading) / expected))

        def work() -> int:
            loaded.run(chunk)
            return chunk

        blur = min(chunk * expected, self.period)
        return self._between(work, max(updates * self.period, _BLUR * blur, _LEAST_SECONDS, 5 * chunk * expected))

    def _idle(self) -> float:
        """Return the watts without load."""

        def rest() -> int:
            self.counter.sleep(max(self.period / 8, 50 * self._reading, 1e-4))
            return 0

        return self._between(rest, max(_IDLE_UPDATES * self.period, _LEAST_IDLE)).watts

    def _between(self, work: Callable[[], int], length: float) -> Window:
        """Do ``work`` until power has settled and the counter moves, then until it moves after ``length`` seconds."""
        clock = self._clock
        total = Total(self.counter)
        patience = max(20 * self.period, 2.0)
        settled = clock() + max(5 * self.period, _SETTLE)
        moved = clock()
        while True:  # to the first update under settled load
            work()
            if total.read():
                moved = clock()
                if moved >= settled:
                    break
            elif clock() - moved > patience:
                raise _stopped(self.counter, clock() - moved)
        begin, joules, done, updates = moved, total.joules, 0, 0
        while True:
            done += work()
            if total.read():
                moved = clock()
                updates += 1
                if moved - begin >= length:
                    break
            elif clock() - moved > patience:
                raise _stopped(self.counter, clock() - moved)
        counted = total.joules - joules
        if not counted > 0:
            raise _stopped(self.counter, moved - begin)
        return Window(counted, moved - begin, done, updates)
