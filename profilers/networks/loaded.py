"""A network that is ready to run on a target."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa_hw.errors import MeasurementError
from dsa_hw.utils.arrays import Floats

__all__ = ["Loadable", "Loaded"]


@dataclass(frozen=True, eq=False)
class Loaded:
    """A network that is ready to run.

    Attributes:
        once: Does one complete run: the outputs are computed when it returns.
        clock: Replaces the host's clock where the device has a better one (CUDA events): takes n and returns n times
            in seconds.
        outputs: Returns the outputs as arrays, for checks.
        run_on: Returns the outputs on other inputs of the same shapes, in the order of the graph.
    """

    once: Callable[[], object]
    clock: Callable[[int], Floats] | None = None
    outputs: Callable[[], list[NDArray[Any]]] | None = None
    run_on: Callable[[Sequence[NDArray[Any]]], list[NDArray[Any]]] | None = None

    @classmethod
    def exact(cls, seconds: float, outputs: Callable[[], list[NDArray[Any]]] | None = None) -> Loaded:
        """Return a network whose time was computed: every run takes ``seconds``."""
        return cls(once=lambda: None, clock=lambda n: np.full(n, float(seconds)), outputs=outputs)

    def run(self, n: int) -> Floats:
        """Run ``n`` times back to back and return the seconds of each run, shape (n,)."""
        enabled = gc.isenabled()
        gc.disable()  # a garbage collection during a run would disturb the measurement
        try:
            seconds = self._host_clock(n) if self.clock is None else np.asarray(self.clock(n), np.float64)
        finally:
            if enabled:
                gc.enable()
        if seconds.shape != (n,) or not np.all(np.isfinite(seconds)) or np.any(seconds <= 0):
            raise MeasurementError(
                f"The clock of the target must return {n} positive times; it returned {seconds!r:.120}."
            )
        return seconds

    def _host_clock(self, n: int) -> Floats:
        once, clock = self.once, time.perf_counter
        stamps = [clock()]
        for _ in range(n):
            once()
            stamps.append(clock())
        return np.diff(np.asarray(stamps))


@dataclass(frozen=True, eq=False)
class Loadable:
    """A network that can be loaded any number of times.

    Attributes:
        load: Makes a copy that is ready to run.
        size: Bytes of its weights, as far as they are known.
    """

    load: Callable[[], Loaded]
    size: int = 0
