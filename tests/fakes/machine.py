"""A simulated machine whose true times are known, and a small network."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from profilers.measuring import bench as bench_module
from profilers.measuring.bench import Bench
from profilers.networks.loaded import Loadable
from profilers.targets import Loaded, Target


class Tiny(nn.Module):
    """A residual block and a classifier, small enough to export in a second."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.inner = nn.Conv2d(16, 24, 3, padding=1)
        self.back = nn.Conv2d(24, 16, 3, padding=1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) -> (N, 5)."""
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.back(torch.relu(self.inner(x))))
        return self.head(x.mean(dim=(2, 3)))


def bursts(period: float, duty: float = 0.5, factor: float = 1.5) -> Callable[[float], float]:
    """Return a slowdown by ``factor`` in the first ``duty`` of every ``period`` seconds."""
    return lambda t: factor if t % period < duty * period else 1.0


def sittings_an_hour_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every record of a sitting be made an hour after the one before."""
    hours = itertools.count(0.0, 3600.0)
    monkeypatch.setattr(bench_module, "time", SimpleNamespace(time=lambda: next(hours), monotonic=time.monotonic))


class Run(NamedTuple):
    """A run of a copy of a network: copies are numbered in the order in which they are loaded."""

    name: str
    copy: int
    size: int


class Machine:
    """A simulated machine with its own clock.

    Args:
        slowdown: Returns the factor by which work takes longer at a time; None for a machine without interference.
        jitter: Mean of the relative variation of a run.
        load_effect: Standard deviation of the logarithm of a factor that each loaded copy has, as of its memory.
        tilt: By how much this sitting changes ratios: r becomes r to the power of 1 + ``tilt``.
        loading: Seconds that loading takes.
        seed: Seed of the variation.

    Attributes:
        now: The simulated seconds.
        runs: Every run, in order.
        loads: How often a network was loaded.
    """

    def __init__(
        self,
        slowdown: Callable[[float], float] | None = None,
        jitter: float = 0.003,
        load_effect: float = 0.0,
        tilt: float = 0.0,
        loading: float = 1e-3,
        seed: int = 0,
    ) -> None:
        self.now = 0.0
        self.runs: list[Run] = []
        self.loads = 0
        self.slowdown = slowdown
        self._jitter, self._load_effect, self._tilt, self._loading = jitter, load_effect, tilt, loading
        self._rng = np.random.default_rng(seed)

    def clock(self) -> float:
        """Return the simulated seconds; reading the clock takes a microsecond."""
        self.now += 1e-6
        return self.now

    def work(self, seconds: float) -> float:
        """Do ``seconds`` of undisturbed work in steps and return the time that it took."""
        begin, left = self.now, seconds * (1 + self._jitter * self._rng.exponential())
        if self.slowdown is None:
            self.now += left
            return left
        step = min(seconds / 20, 2.5e-4)
        while left > 0:
            done = min(step, left)
            self.now += done * self.slowdown(self.now)
            left -= done
        return self.now - begin

    def network(self, seconds: float, size: int = 2**20, name: str = "") -> Loadable:
        """Return a network of ``size`` bytes that takes ``seconds`` undisturbed."""

        def load() -> Loaded:
            copy, self.loads = self.loads, self.loads + 1
            self.now += self._loading
            each = seconds * seconds**self._tilt * float(np.exp(self._load_effect * self._rng.normal()))

            def clock(n: int) -> np.ndarray[Any, np.dtype[np.float64]]:
                self.runs += [Run(name, copy, size)] * n
                return np.asarray([self.work(each) for _ in range(n)])

            return Loaded(lambda: None, clock=clock)

        return Loadable(load, size)


class Simulated(Target):
    """The target of a simulated machine, with small caches: a few copies of a network are enough."""

    runtime = "simulated"
    cache = 2**21

    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        """Never called: networks come from the machine."""
        raise NotImplementedError


class SimulatedDevice(Target):
    """A simulated machine that loads networks; their time depends on the weights of convolutions."""

    runtime = "simulated"
    cache = 2**14

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        """Load a network with its true time."""
        return self.machine.network(self.truth(artefact)).load()

    @staticmethod
    def truth(module: nn.Module) -> float:
        """Return the undisturbed seconds of a network."""
        return 1e-3 + 4e-7 * sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Conv2d))


class SimulatedBench(Bench):
    """A bench with the clock of a `SimulatedDevice`."""

    def __init__(self, target: SimulatedDevice, **options: Any) -> None:
        super().__init__(target, clock=target.machine.clock, **options)


SimulatedDevice.bench_class = SimulatedBench
