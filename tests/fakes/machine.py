"""A simulated machine whose true times are known, and a small network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from profilers.measuring.bench import Bench
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


class Machine:
    """A simulated machine with its own clock.

    Args:
        slowdown: Returns the factor by which work takes longer at a time.
        steals: Returns whether another process has the processor at a time; that time counts in `waited`.
        jitter: Mean of the relative variation of a run.
        seed: Seed of the variation.
    """

    def __init__(
        self,
        slowdown: Callable[[float], float] = lambda t: 1.0,
        steals: Callable[[float], bool] = lambda t: False,
        jitter: float = 0.003,
        seed: int = 0,
    ) -> None:
        self.now = 0.0
        self.wait = 0.0
        self.slowdown, self._steals, self._jitter = slowdown, steals, jitter
        self._rng = np.random.default_rng(seed)

    def clock(self) -> float:
        """Return the simulated seconds; reading the clock takes a microsecond."""
        self.now += 1e-6
        return self.now

    def waited(self) -> float:
        """Return the simulated seconds without a processor."""
        return self.wait

    def work(self, seconds: float) -> float:
        """Do ``seconds`` of undisturbed work in steps and return the time that it took."""
        begin, left = self.now, seconds * (1 + self._jitter * self._rng.exponential())
        step = min(seconds / 20, 2.5e-4)
        while left > 0:
            if self._steals(self.now):
                self.now += step
                self.wait += step
                continue
            done = min(step, left)
            self.now += done * self.slowdown(self.now)
            left -= done
        return self.now - begin

    def network(self, seconds: float) -> Loaded:
        """Return a network that takes ``seconds`` undisturbed."""
        return Loaded(lambda: None, clock=lambda n: np.asarray([self.work(seconds) for _ in range(n)]))


class Simulated(Target):
    """The target of a simulated machine."""

    runtime = "simulated"

    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        """Never called: networks come from the machine."""
        raise NotImplementedError


class SimulatedDevice(Target):
    """A simulated machine that loads networks; their time depends on the weights of convolutions."""

    runtime = "simulated"

    def __init__(self, machine: Machine, control: float = 5e-4) -> None:
        super().__init__("device")
        self.machine, self.control = machine, control

    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        """Load a network with its true time."""
        return self.machine.network(self.truth(artefact))

    @staticmethod
    def truth(module: nn.Module) -> float:
        """Return the undisturbed seconds of a network."""
        return 1e-3 + 4e-7 * sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Conv2d))


class SimulatedBench(Bench):
    """A bench with the clock of a `SimulatedDevice`."""

    def __init__(self, target: SimulatedDevice, **options: Any) -> None:
        machine = target.machine
        super().__init__(
            target, control=machine.network(target.control), clock=machine.clock, waited=machine.waited, **options
        )


SimulatedDevice.bench_class = SimulatedBench
