"""Boards for the tests of fleets: loaded by every worker (``--preload``) and by the tests themselves.

A board's time is a formula of the weights of the ONNX file; nothing is run. Environment variables configure a worker:
FLEET_FACTOR (its slowdown) and FLEET_NAP (seconds per network).
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from profilers.targets import Loaded, Target, register


class Formula(Target):
    """``base`` seconds and ``per`` for every weight, output channels rounded up to a ``multiple``."""

    artefact = "onnx"
    cache = 0  # one copy of each network is enough
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
