"""Measuring energy: joules of one inference, gross and net, by a counter that ticks.

A counter moves in steps: every millisecond (RAPL) to every 100 ms (NVML). A window therefore starts and ends at a
step, both found while the network runs, so that the delays with which they are noticed are alike and cancel; it lasts
at least 50 steps. Before a window the network runs for a while, because power and the counter's own averaging need time
to settle.

A visit is: idle, control, network, control, idle. The control workload's joules are judged as its seconds are when
latency is measured: a neighbour adds to what the counter counts, never takes away, so a visit counts only if the
control before and after it is near the lowest reference ever seen, and the statistic is a low quantile of the windows
that are left. Gross joules are what the counter counted over the inferences done; net joules are those without what
idling for as long would have taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dsa_hw.errors import MeasurementError, ProfileError
from profilers.measuring import environment as environments
from profilers.measuring import statistics
from profilers.measuring.bench import Bench
from profilers.measuring.counters import Counter, Total, find
from profilers.measuring.measurement import Measurement, Samples
from profilers.measuring.reference import Reference, ReferenceFile
from profilers.measuring.rules import MeasuringRules
from profilers.targets import Loaded, Target

__all__ = ["EnergyBench", "EnergyMeasurement", "Window", "update_period"]

_UPDATES = 50  # in a window: with unaligned ends, one update is 2 %
_CONTROL_UPDATES = 10  # aligned as they are, ten updates tell 3 % well enough
_BLUR = 80  # a window is this many times longer than what is unknown about each of its ends
_LEAST_SECONDS = 0.25  # of a window, however fast the counter
_SETTLE = 0.5  # seconds under load before a window; and five updates
_STILL = 5.0  # seconds after which a counter that does not move stands still


def update_period(counter: Counter, changes: int = 20) -> float:
    """Seconds between two updates of ``counter``: the median over ``changes`` of them."""
    total = Total(counter)
    began = counter.clock()
    stamps: list[float] = []
    while len(stamps) <= changes:
        if total.read():
            stamps.append(counter.clock())
            continue
        waited = counter.clock() - (stamps[-1] if stamps else began)
        if waited > _STILL:
            raise _stands_still(counter, _STILL)
        counter.sleep(max(waited / 100, 2e-5))  # a slow counter needs no fast look
    if not total.joules > 0:
        raise _stands_still(counter, counter.clock() - began)
    return float(np.median(np.diff(stamps)))


def _reading_takes(counter: Counter, times: int = 20) -> float:
    """Seconds that one reading takes."""
    began = counter.clock()
    for _ in range(times):
        counter.read_joules()
    return max((counter.clock() - began) / times, 0.0)


def _stands_still(counter: Counter, seconds: float) -> MeasurementError:
    return MeasurementError(
        f"the counter {counter.name} stands still: it did not move for {seconds:.1f} s, although a machine that is on "
        "uses energy. It is switched off or not passed on to this machine: update the driver (NVIDIA: nvidia-smi -q -d "
        "POWER), run outside the virtual machine or container, or give another meter with --counter "
        "package.module:function"
    )


@dataclass(frozen=True)
class Window:
    """What a counter counted between two of its updates, and the inferences that were done meanwhile."""

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
    """Joules of one inference of one network on one target; every window is one "run" of ``samples``.

    ``joules`` (gross) is the statistic over the accepted windows, ``[low, high]`` its 95 % interval; ``net`` is
    without idling, ``watts`` the mean power, ``temperature`` (degrees Celsius) that at the end of the windows.
    """

    quantity: ClassVar[str] = "energy"
    column: ClassVar[str] = "joules"
    unit: ClassVar[str] = "J"
    further_columns: ClassVar[tuple[str, ...]] = ("net", "watts", "idle_watts", "temperature")

    @property
    def joules(self) -> float:
        """Gross joules of one inference."""
        return self.value

    @property
    def seconds(self) -> float:
        """Median seconds of one inference while energy was measured."""
        return self._median("seconds")

    @property
    def net(self) -> float:
        """Joules of one inference beyond idling."""
        idle = self._of("idle_watts") * self._of("seconds")
        net = self._runs[0] - idle
        return statistics.quantile(net, self.rules.order) if len(net) else math.nan

    @property
    def watts(self) -> float:
        """Median power of the windows."""
        return self._median("watts")

    @property
    def temperature(self) -> float:
        """Median temperature at the end of the windows, degrees Celsius; NaN where the counter does not know."""
        return self._median("temperature")

    def further(self) -> dict[str, float]:
        """Values of ``further_columns``."""
        return {
            "net": self.net,
            "watts": self.watts,
            "idle_watts": self._median("idle_watts"),
            "temperature": self.temperature,
        }

    def _of(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        values = self.samples.extra.get(name)
        return np.full(self.runs, np.nan) if values is None else np.asarray(values[self._accepted], np.float64)

    def _median(self, name: str) -> float:
        values = self._of(name)
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else math.nan

    @property
    def _least(self) -> tuple[int, int]:
        return self.rules.least_windows, self.rules.least_windows

    def _disturbance(self) -> str:
        controls = np.concatenate([self.samples.before, self.samples.after])
        more = float(np.median(controls)) / self.reference if len(controls) else math.nan
        return (
            f"the control workload took {more:.2f} times its reference of {1e3 * self.reference:.4g} mJ in the median: "
            "something else runs on this chip, or its clocks changed"
        )

    def __repr__(self) -> str:
        unit, scale = ("J", 1.0) if self.joules >= 1 else ("mJ", 1e3)
        temperature = f", {self.temperature:.0f} degrees" if math.isfinite(self.temperature) else ""
        lines = [
            f"{self.what} on {self.target}: {scale * self.joules:.4g} {unit} [{scale * self.low:.4g}, "
            f"{scale * self.high:.4g}] per inference ({self.rules.statistic}, 95 % interval), net of idling "
            f"{scale * self.net:.4g} {unit}",
            f"  {self.watts:.4g} W while running, {self._median('idle_watts'):.4g} W idle{temperature}; {self.runs} "
            f"windows, {100 * self.rejected:.0f} % rejected; counter {self.environment.get('counter', 'unknown')}",
        ]
        if self.warning:
            lines.append(f"  WARNING: {self.warning}")
        return "\n".join(lines)


class EnergyBench(Bench):
    """A target with its energy counter: as `Bench`, with joules for seconds.

    ``counter`` is whatever `Counter.of` takes; None finds the device's own.
    """

    def __init__(
        self,
        target: Target,
        counter: Any = None,
        *,
        rules: MeasuringRules | None = None,
        references: ReferenceFile | None = None,
        control: Loaded | None = None,
        environment: Mapping[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        if target.estimated is not None:
            raise ProfileError(
                f"{target.name} does not run networks (its times are {target.estimated}), so their energy cannot be "
                "measured; use a device with a counter, or EstimatedEnergyBudget(...)"
            )
        self.counter = find(target.device) if counter is None else Counter.of(counter)
        self.period = update_period(self.counter)
        about = dict(environments.environment(target) if environment is None else environment)
        about |= {"quantity": "energy", "counter": self.counter.name}
        if cap := self.counter.state().get("power_cap"):
            about["power cap"] = f"{cap:g} W"
        super().__init__(
            target,
            rules=rules,
            references=references,
            control=control,
            environment=about,
            seed=seed,
            clock=self.counter.clock,
        )
        self._idle_before: tuple[float, float] | None = None
        self._controls: list[float] = []
        self._reading = _reading_takes(self.counter)

    def calibrate(self, seconds: float = 0.5) -> Reference:
        """Warm the control up, meter it a few times, and compare with the stored reference (joules of one run)."""
        with self.target.active():
            self._expected[self._control] = self._warm_up(self._control)
            for _ in range(4):
                self._read_control()
        return self._refer()

    def _refer(self) -> Reference:
        # A low quantile of the readings of this session: a quiet moment, but no single lucky one.
        self._reference = self.references.lower(self.key, float(np.quantile(self._controls, 0.25)))
        return self._reference

    def measure_once(
        self,
        networks: Mapping[str, Loaded],
        *,
        limit: float = 60.0,
        earlier: Mapping[str, Samples] | None = None,
        on_visit: Callable[[str, Samples, Measurement], None] | None = None,
        rules: MeasuringRules | None = None,
    ) -> dict[str, Measurement]:
        """Meter ``networks`` in random rounds until every one meets the stopping rule; see `Bench.measure_once`."""
        rules = rules or self.rules
        if self._reference is None:
            self.calibrate()
        parts = {name: [earlier[name]] if earlier and name in earlier else [] for name in networks}
        found = {name: self._judge(name, parts[name], math.inf, rules) for name in networks}
        visits = 0
        begin = self._clock()
        with self.target.active():
            self._last = self._idle_before = None  # time has passed since the last call
            while pending := [name for name in networks if not found[name].finished]:
                for name in map(str, self._rng.permutation(pending)):
                    if self._clock() - begin > limit:
                        return {n: self._judge(n, parts[n], math.inf, rules) for n in networks}
                    if networks[name] not in self._expected:
                        self._expected[networks[name]] = self._warm_up(networks[name])
                    samples = self._visit(networks[name], visits)
                    visits += 1
                    parts[name].append(samples)
                    if on_visit is not None:
                        on_visit(name, samples, found[name])
                found |= {n: self._judge(n, parts[n], math.inf, rules) for n in pending}
        return {n: self._judge(n, parts[n], math.inf, rules) for n in networks}

    def least_seconds(self, networks: int) -> float:
        """What `measure` needs for the least number of windows of so many networks, and a quarter more.

        A visit is a window, two controls and one idling (the next one begins where it ends), each behind its settling;
        the first visit idles twice. Networks that take longer than a few updates need more.
        """
        settle = max(5 * self.period, _SETTLE) + self.period
        short = max(_CONTROL_UPDATES * self.period, _LEAST_SECONDS)
        visit = max(_UPDATES * self.period, _LEAST_SECONDS) + 3 * short + 4 * settle
        calibration = 4 * (short + settle) if self._reference is None else 0.0
        return 1.25 * (calibration + networks * self.rules.least_windows * visit + short + settle)

    def _judge(
        self, name: str, parts: list[Samples], length: float, rules: MeasuringRules, felt: float = 1.0
    ) -> Measurement:
        return EnergyMeasurement(
            name, self.target.title, Samples.joined(parts), self.reference.seconds, rules, self.environment
        )

    def _visit(self, loaded: Loaded, number: int) -> Samples:
        # What ends one visit begins the next, unless something came between.
        recent = self._clock() - 2 * self.period - 1e-2
        idle = self._idle_before
        first = idle[1] if idle is not None and idle[0] >= recent else self._idle()
        before = self._read_control()
        window = self._window(loaded, _UPDATES)
        state = self.counter.state()
        after = self._read_control()
        second = self._idle()
        self._idle_before = (self._clock(), second)
        self._refer()
        taken = window.seconds / window.inferences
        extra = {
            "seconds": taken,
            "watts": window.watts,
            "idle_watts": (first + second) / 2,
            "idle_before": first,
            "idle_after": second,
            "inferences": float(window.inferences),
            "updates": float(window.updates),
            **{name: float(value) for name, value in state.items()},
        }
        return Samples(
            np.asarray([window.joules / window.inferences]),
            np.asarray([number]),
            np.asarray([before]),
            np.asarray([after]),
            np.asarray([math.nan]),
            {name: np.asarray([value]) for name, value in extra.items()},
        )

    def _read_control(self) -> float:
        window = self._window(self._control, _CONTROL_UPDATES)
        self._controls.append(window.joules / window.inferences)
        return self._controls[-1]

    def _window(self, loaded: Loaded, updates: int) -> Window:
        """A window over runs of ``loaded``.

        The counter is read eight times per update, but no more often than that reading takes 2 % of the time. An
        update is noticed late by at most the time between readings, and by no more than a period where runs take longer
        than that. Two such delays, uniform and independent, blur a window of 80 times their range by 0.5 %.
        """
        expected = self._expected[loaded]
        chunk = max(1, math.ceil(max(self.period / 8, 50 * self._reading) / expected))

        def work() -> int:
            loaded.run(chunk)
            return chunk

        blur = min(chunk * expected, self.period)
        return self._between(work, max(updates * self.period, _BLUR * blur, _LEAST_SECONDS, 5 * chunk * expected))

    def _idle(self) -> float:
        """Watts of doing nothing."""

        def rest() -> int:
            self.counter.sleep(max(self.period / 8, 50 * self._reading, 1e-4))
            return 0

        return self._between(rest, max(_CONTROL_UPDATES * self.period, _LEAST_SECONDS)).watts

    def _between(self, work: Callable[[], int], length: float) -> Window:
        """Do ``work`` until power has settled and the counter moves, then for at least ``length`` until it moves."""
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
                raise _stands_still(self.counter, clock() - moved)
        begin, joules, done, updates = moved, total.joules, 0, 0
        while True:
            done += work()
            if total.read():
                moved = clock()
                updates += 1
                if moved - begin >= length:
                    break
            elif clock() - moved > patience:
                raise _stands_still(self.counter, clock() - moved)
        counted = total.joules - joules
        if not counted > 0:
            raise _stands_still(self.counter, moved - begin)
        return Window(counted, moved - begin, done, updates)
