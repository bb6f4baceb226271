"""Small chains of convolutions and linear layers, as an ``nn.Module`` or as ONNX.

The grid sweep needs many small networks on the target. Exporting one through torch takes a
second; writing its ONNX graph directly takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from profilers.networks.quantisation import quantise

if TYPE_CHECKING:
    from profilers.targets import Target

__all__ = ["Layer", "artefact_of", "input_of"]

_OPSET, _IR = 18, 9


@dataclass(frozen=True)
class Layer:
    """A convolution, or a linear layer where ``side`` is empty.

    Attributes:
        inputs: Input channels.
        outputs: Output channels.
        side: Spatial input size, one entry per dimension, as are kernel, stride, padding and dilation.
    """

    inputs: int
    outputs: int
    side: tuple[int, ...] = ()
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1

    @property
    def out_side(self) -> tuple[int, ...]:
        """Spatial output size."""
        sizes = zip(self.side, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)

    @property
    def macs(self) -> int:
        """Multiply-accumulate operations of one run with batch size 1."""
        return int(np.prod(self.kernel + self.out_side)) * self.outputs * self.inputs // self.groups

    @property
    def weights(self) -> int:
        """Number of weights, without biases."""
        return int(np.prod(self.kernel)) * self.outputs * self.inputs // self.groups

    def widened(self, inputs: int | None = None, outputs: int | None = None) -> Layer:
        """Return the same layer at other widths; a depthwise layer stays depthwise."""
        inputs = self.inputs if inputs is None else inputs
        if self.groups == self.inputs > 1:
            return replace(self, inputs=inputs, outputs=inputs * (self.outputs // self.inputs), groups=inputs)
        return replace(self, inputs=inputs, outputs=self.outputs if outputs is None else outputs)


def input_of(chain: Sequence[Layer], batch: int = 1, precision: str = "fp32") -> torch.Tensor:
    """Return a random input of ``chain``."""
    shape = (batch, chain[0].inputs, *chain[0].side)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return value.half() if precision == "fp16" else value


def artefact_of(chain: Sequence[Layer], target: Target, batch: int = 1) -> Any:
    """Return ``chain``, with ReLUs, in the form that ``target`` loads."""
    if target.artefact != "onnx":
        return _module(chain, target.precision)
    model = _onnx(chain, target.precision, batch)
    if target.int8 is not None:
        # Layers of a network that stay in fp32 are not those of a chain: the grid is that of int8. Any ranges will do.
        names = ["x", *(f"{kind}{i}" for i in range(len(chain)) for kind in "cr")]
        ranges = {name: (0.0 if name[0] == "r" else -1.0, 1.0) for name in names}
        model = quantise(model, ranges, replace(target.int8, without=()))
    return bytes(model.SerializeToString())


def _module(chain: Sequence[Layer], precision: str) -> nn.Module:
    convolutions: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
    parts: list[nn.Module] = []
    for layer in chain:
        if not layer.side:
            parts += [nn.Linear(layer.inputs, layer.outputs), nn.ReLU()]
            continue
        convolution = convolutions[len(layer.side)](
            layer.inputs,
            layer.outputs,
            layer.kernel,
            stride=layer.stride,
            padding=layer.padding,
            dilation=layer.dilation,
            groups=layer.groups,
        )
        parts += [convolution, nn.ReLU()]
    network = nn.Sequential(*parts).eval()
    return network.half() if precision == "fp16" else network


def _onnx(chain: Sequence[Layer], precision: str, batch: int) -> Any:
    from onnx import TensorProto, helper, numpy_helper

    dtype, kind = (
        (np.dtype(np.float16), TensorProto.FLOAT16)
        if precision == "fp16"
        else (np.dtype(np.float32), TensorProto.FLOAT)
    )
    rng = np.random.default_rng(0)
    nodes, weights, current = [], [], "x"
    for i, layer in enumerate(chain):
        fan = layer.inputs // layer.groups
        weight = rng.normal(0, fan**-0.5, (layer.outputs, fan, *layer.kernel)).astype(dtype)
        bias = rng.normal(0, 0.1, layer.outputs).astype(dtype)
        weights += [numpy_helper.from_array(weight, f"w{i}"), numpy_helper.from_array(bias, f"b{i}")]
        if layer.side:
            nodes.append(
                helper.make_node(
                    "Conv",
                    [current, f"w{i}", f"b{i}"],
                    [f"c{i}"],
                    strides=layer.stride,
                    pads=layer.padding * 2,
                    dilations=layer.dilation,
                    group=layer.groups,
                )
            )
        else:
            nodes.append(helper.make_node("Gemm", [current, f"w{i}", f"b{i}"], [f"c{i}"], transB=1))
        nodes.append(helper.make_node("Relu", [f"c{i}"], [f"r{i}"]))
        current = f"r{i}"
    first, last = chain[0], chain[-1]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", kind, (batch, first.inputs, *first.side))],
        [helper.make_tensor_value_info(current, kind, (batch, last.outputs, *last.out_side))],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)
