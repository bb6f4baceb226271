"""A device that runs ONNX files in ONNX Runtime, and whose times are a formula of the graph."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from profilers.targets import Loaded, Target, resolve

FACTORS = {"fp32": 1.0, "u8": 0.5, "s8": 0.4}
"""Time of one weight, over that in fp32: signed activations are faster here."""


class Int8Formula(Target):
    """A convolution costs its weights; int8 ones cost less. The device is not called cpu: this host's waits are out."""

    runtime = "int8formula"
    artefact = "onnx"
    cache = 2**16  # few copies: loading is most of the work here
    schemes = ("u8", "s8")

    def __init__(self, precision: str = "fp32", noise: float = 0.002) -> None:
        super().__init__("device", precision=precision)
        self.rng, self.noise = np.random.default_rng(0), noise
        self.loaded: list[str] = []  # shared with the same target in other precisions

    def load(self, artefact: bytes, inputs: tuple[Any, ...]) -> Loaded:
        self.loaded.append(self.precision)
        real = functools.cache(lambda: resolve("onnxruntime/cpu").load(artefact, inputs))
        seconds = seconds_of(artefact)

        def clock(n: int) -> Any:
            return seconds * (1 + self.noise * self.rng.exponential(size=n))

        return Loaded(
            lambda: None,
            clock=clock,
            outputs=lambda: real().outputs(),
            run_on=lambda values: real().run_on(values),  # type: ignore[misc]
        )

    def describe(self) -> dict[str, str]:
        return {"formula": "1", **self.describe_int8()}


def seconds_of(artefact: bytes) -> float:
    """Return the time of a graph."""
    import onnx

    graph = onnx.load_from_string(artefact).graph
    stored = {t.name: t for t in graph.initializer}
    types = {stored[n.input[2]].data_type for n in graph.node if n.op_type == "QuantizeLinear"}
    kind = "fp32" if not types else "u8" if types == {onnx.TensorProto.UINT8} else "s8"
    work = sum(
        int(np.prod(t.dims)) * (1.0 if t.data_type == onnx.TensorProto.FLOAT else FACTORS[kind])
        for t in graph.initializer
        if len(t.dims) == 4
    )
    return 2e-4 + 3e-8 * work
