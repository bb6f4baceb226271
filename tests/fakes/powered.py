"""A simulated device with a clock and an energy counter whose physics is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from profilers.measuring.counters import Counter
from profilers.networks.loaded import Loadable
from profilers.targets import Loaded, Target

IDLE = 8.0  # watts


class Device:
    """A device whose power depends on the load, with a counter that wraps around and has noise.

    The counter moves every ``tick`` seconds. ``others(t)`` are the watts of other processes at time t. ``noise`` is the
    deviation of each tick's energy. After a change of load the power follows with a time constant of 50 ms.
    """

    def __init__(
        self,
        tick: float = 0.1,
        wraps_at: float | None = 300.0,
        noise: float = 0.01,
        others: Callable[[float], float] = lambda t: 0.0,
        seed: int = 0,
    ) -> None:
        self.now, self.tick, self.wraps_at, self.others = 0.0, tick, wraps_at, others
        self.counted = 0.0
        self.true = 0.0
        self.wraps = 0
        self._watts = IDLE
        self._pending, self._next, self._noise = 0.0, tick, noise
        self._rng = np.random.default_rng(seed)
        self.reads = 0

    def spend(self, seconds: float, watts: float) -> None:
        """Let time pass under a load."""
        end = self.now + seconds
        while self.now < end - 1e-12:
            step = min(end, self._next) - self.now
            decay = np.exp(-step / 0.05)
            mean = watts + (self._watts - watts) * (0.05 / step) * (1 - decay) if step > 0 else watts
            energy = step * (mean + self.others(self.now))
            self._watts = watts + (self._watts - watts) * decay
            self.now += step
            self.true += energy
            self._pending += energy
            if self.now >= self._next - 1e-12:
                self.counted += self._pending * max(1 + self._noise * self._rng.normal(), 0.0)
                self._pending, self._next = 0.0, self._next + self.tick

    def read(self) -> float:
        """What the counter shows; reading takes 20 microseconds."""
        self.spend(2e-5, IDLE + 2)
        self.reads += 1
        if self.wraps_at is None:
            return self.counted
        self.wraps = int(self.counted // self.wraps_at)
        return self.counted % self.wraps_at

    def counter(self) -> Counter:
        """The counter, with the simulated time."""
        return Counter("simulated", self.read, self.wraps_at, self.state, self.clock, lambda s: self.spend(s, IDLE))

    def state(self) -> Mapping[str, float]:
        return {"temperature": 41.0, "power_cap": 60.0}

    def clock(self) -> float:
        return self.now

    def network(self, seconds: float, watts: float) -> Loadable:
        """A network that takes ``seconds`` at ``watts``: ``seconds * watts`` joules gross."""

        def clock(n: int) -> np.ndarray[Any, np.dtype[np.float64]]:
            self.spend(n * seconds, watts)
            return np.full(n, seconds)

        return Loadable(lambda: Loaded(lambda: None, clock=clock))


def physics(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """Seconds and watts of a network on the simulated chip, from its multiply-adds and its outputs' sizes."""
    macs, moved = 0.0, 0.0

    def hook(layer: nn.Module, _: Any, output: torch.Tensor) -> None:
        nonlocal macs, moved
        moved += output.numel()
        macs += output.numel() * layer.weight[0].numel()  # type: ignore[index]

    layers = [m for m in module.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    handles = [layer.register_forward_hook(hook) for layer in layers]
    with torch.no_grad():
        module(*inputs)
    for handle in handles:
        handle.remove()
    seconds = 2e-4 + macs / 1e9 + moved / 1e8
    dynamic = 1e-3 + 8e-9 * macs + 1e-8 * moved  # joules beyond idling
    return seconds, IDLE + dynamic / seconds


class Chip(Target):
    """The simulated device as a target."""

    runtime = "chip"
    cache = 0  # one copy of each network is enough

    def __init__(self, device: Device) -> None:
        super().__init__("cpu")
        self.chip = device

    def load(self, artefact: nn.Module, inputs: tuple[Any, ...]) -> Loaded:
        return self.chip.network(*physics(artefact, inputs)).load()

    def known_grid(self) -> int:
        return 2


def real_time() -> float:
    """Return the joules of 20 W of constant power."""
    return 20 * time.monotonic()


def standing() -> float:
    """Return the same joules always, as a broken meter does."""
    return 12.5
