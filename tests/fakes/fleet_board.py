"""Boards for the tests of fleets: loaded by every worker (``--preload``) and by the tests themselves.

A board's time is a formula of the weights of the ONNX file; nothing is run. Environment variables configure a worker:
FLEET_FACTOR (its slowdown), FLEET_DIES_AT (the batch in which it ends itself), FLEET_NAP (seconds per network).
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from profilers import machine
from profilers.fleet import on_worker
from profilers.targets import Loaded, Target, register


class Formula(Target):
    """``base`` seconds and ``per`` for every weight, output channels rounded up to a ``multiple``."""

    artefact = "onnx"
    base, per, multiple = 1e-3, 1e-7, 1

    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        import onnx

        if isinstance(artefact, bytes):
            weights = [t.dims for t in onnx.load_from_string(artefact).graph.initializer if len(t.dims) > 1]
        else:
            weights = [p.shape for p in artefact.parameters() if p.ndim > 1]
        rounded = [-(-dims[0] // self.multiple) * self.multiple * int(np.prod(dims[1:])) for dims in weights]
        seconds = (self.base + self.per * sum(rounded)) * float(os.environ.get("FLEET_FACTOR", "1"))
        rng = np.random.default_rng(0)
        nap = float(os.environ.get("FLEET_NAP", "0"))

        def clock(n: int) -> Any:
            time.sleep(nap)
            return seconds * (1 + 0.001 * rng.exponential(size=n))

        return Loaded(lambda: None, clock=clock)

    def describe(self) -> dict[str, str]:
        return {"formula": f"{self.per} {self.multiple}"}


@register("boardformula")
class Even(Formula):
    pass


@register("stepped")
class Stepped(Formula):
    per = 3e-7
    multiple = 8


def dask_setup(worker: Any) -> None:
    """Called by Dask in every worker; one with FLEET_DIES_AT ends without cleaning up."""
    machine.waited = lambda all_threads=False: None  # waits of this machine do not affect a formula
    if not (dies := int(os.environ.get("FLEET_DIES_AT", "0"))):
        return
    real, count = on_worker.Bench.measure_once, 0

    def mortal(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count >= dies:
            os._exit(9)
        return real(*args, **options)

    on_worker.Bench.measure_once = mortal  # type: ignore[method-assign]
