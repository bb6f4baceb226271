"""Which tensors an int8 runtime for microcontrollers keeps in its arena, and from when to when.

The converter folds batch norms into the convolution or linear layer before them and fuses clamping activations (ReLU,
ReLU6) into the operation before them; what is left are the operations that read and write buffers. Two planners differ
in the rest:

* ``"vela"`` (Arm Ethos-U): padding and every activation function of one tensor are part of the operation before or
  after; an element-wise operation writes over an input that nothing else reads; feature maps are stored in bricks of 16
  channels.
* ``"tflite-micro"``: a convolution or pooling whose padding is not TensorFlow's SAME has a padded copy of its input;
  other activation functions write a buffer of their own (SiLU two); nothing is overwritten; every buffer starts at a
  multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Literal

import numpy as np

from dsa_hw.channels.counts import Count, Term
from dsa_hw.channels.sizes import Sizes, parts
from dsa_hw.channels.trace import TracedOperation
from dsa_hw.channels.walk import Value

__all__ = ["PLANNERS", "Buffer", "Layer", "Planner", "int8_buffers", "int8_layers"]

Planner = Literal["vela", "tflite-micro"]
PLANNERS: Final[tuple[Planner, ...]] = ("vela", "tflite-micro")

_WEIGHTED = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear")
_CLAMPS = ("relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max")
_CURVES = ("silu", "hardswish", "hardsigmoid", "sigmoid", "tanh", "gelu", "elu", "leaky_relu", "mish", "softplus")
_PAIRED = ("add", "sub", "mul", "maximum", "minimum")
_SHARED = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "dropout",
           "feature_dropout", "alpha_dropout", "alias", "detach", "contiguous", "clone", "to", "getitem",
           "_assert_tensor_metadata")  # fmt: skip
_BRICK = 16  # channels of a brick of Ethos-U's format NHCWB16


@dataclass(frozen=True, eq=False)
class Buffer:
    """An int8 tensor in the arena.

    Attributes:
        channels: Its channels as a function of the keep ratios; bytes are the channels times ``positions``.
        positions: Elements of one channel, over the whole batch.
        brick: The channels are stored rounded up to a multiple of this.
        born: The step that writes it.
        last: The last step that reads it.
    """

    channels: Count
    positions: float
    brick: int
    born: int
    last: int


def int8_buffers(sizes: Sizes, planner: Planner = "vela") -> tuple[Buffer, ...]:
    """Return the buffers of one inference in int8, in the order in which they are written.

    Args:
        sizes: The network.
        planner: Who plans the arena; see the module.
    """
    arena = _Arena(sizes, planner)
    for node in sizes.walk.trace.inputs:
        arena.owner[node.name] = tuple(arena.add(v, bricks=False) for v in parts(sizes.walk.values[node.name]))
    for operation in sizes.walk.trace.operations:
        arena.visit(operation)
    end = arena.step
    for node in sizes.walk.trace.outputs:
        for index in arena.owner.get(node.name, ()):
            arena.last[index] = end
            arena.bricks[index] = 1  # what the application reads is not in bricks
    return tuple(
        Buffer(channels, positions, brick, born, last)
        for channels, positions, brick, born, last in zip(
            arena.channels, arena.positions, arena.bricks, arena.born, arena.last, strict=True
        )
        if positions > 0
    )


class _Arena:
    """The buffers so far, and who holds them."""

    def __init__(self, sizes: Sizes, planner: Planner) -> None:
        self.sizes, self.vela = sizes, planner == "vela"
        self.step = 0
        self.channels: list[Count] = []
        self.positions: list[float] = []
        self.bricks: list[int] = []
        self.born: list[int] = []
        self.last: list[int] = []
        self.owner: dict[str, tuple[int, ...]] = {}
        self.fused: dict[str, str] = {}  # operation -> kind of the operation that writes its buffer

    def add(self, value: Value, *, bricks: bool = True, grown: float = 1.0) -> int:
        """Add a buffer, written in this step; ``grown`` times as large as ``value``."""
        elements = self.sizes.elements(value)
        image = len(value.shape) == 4
        positions = float(prod(value.shape) / value.shape[1]) if image and value.shape[1] else 1.0
        self.channels.append(Count(elements.constant / positions, elements.coefficients / positions))
        self.positions.append(positions * grown)
        self.bricks.append(_BRICK if image and bricks and self.vela else 1)
        self.born.append(self.step)
        self.last.append(self.step)
        return len(self.channels) - 1

    def visit(self, operation: TracedOperation) -> None:
        """Let an operation read and write its buffers."""
        sources = [node for node in operation.node.all_input_nodes if node.name in self.owner]
        read = tuple(dict.fromkeys(i for node in sources for i in self.owner[node.name]))
        values = parts(self.sizes.walk.values[operation.name])
        if operation.kind in _SHARED or not values:
            self.owner[operation.name] = read
            self.fused[operation.name] = self.fused.get(sources[0].name, "") if len(sources) == 1 else ""
            return
        before = self.fused.get(sources[0].name, "") if len(sources) == 1 and len(sources[0].users) == 1 else ""
        if self._is_fused(operation.kind, before):
            self.owner[operation.name], self.fused[operation.name] = read, before
            return
        if not self.vela and (grown := _padded(operation, sources)) > 1:
            self._use(read)
            read = (self.add(self._value(sources[0].name), grown=grown),)
        if not self.vela and operation.kind == "silu":  # LOGISTIC, then MUL
            self._use(read)
            read = (*read, self.add(values[0]))
        self._use(read)
        taken = self._overwritten(operation, sources, values)
        self.owner[operation.name] = (taken,) if taken is not None else tuple(self.add(v) for v in values)
        self.fused[operation.name] = operation.kind

    def _use(self, read: Sequence[int]) -> None:
        """Begin the next step, which reads these buffers."""
        self.step += 1
        for index in read:
            self.last[index] = self.step

    def _value(self, name: str) -> Value:
        return parts(self.sizes.walk.values[name])[0]

    def _is_fused(self, kind: str, before: str) -> bool:
        if kind == "batch_norm":
            return before in _WEIGHTED
        if kind in _CLAMPS or (self.vela and kind in _CURVES):
            return before in (*_WEIGHTED, *_PAIRED)
        return False

    def _overwritten(self, operation: TracedOperation, sources: Sequence[Any], values: Sequence[Value]) -> int | None:
        """Return the buffer of an input that the output may take over."""
        if not self.vela or operation.kind not in (*_PAIRED, *_CLAMPS, *_CURVES, "batch_norm"):
            return None
        inputs = {node.name for node in self.sizes.walk.trace.inputs}
        for node in sources:
            same = self._value(node.name).shape == values[0].shape
            if same and len(node.users) == 1 and len(self.owner[node.name]) == 1 and node.name not in inputs:
                return self.owner[node.name][0]
        return None


def _padded(operation: TracedOperation, sources: Sequence[Any]) -> float:
    """Return how much larger the padded input is; 1 where there is no padding, or TensorFlow's SAME."""
    arguments, kind = operation.arguments, operation.kind
    if kind not in ("conv1d", "conv2d", "max_pool2d", "avg_pool2d") or not sources:
        return 1.0
    shape = [int(n) for n in sources[0].meta["val"].shape][2:]
    kernel = arguments.get("kernel_size") or [int(n) for n in arguments["weight"].meta["val"].shape][2:]
    padding = arguments["padding"]
    if isinstance(padding, str):
        return 1.0
    rank = len(shape)
    kernel, stride, padding, dilation = (
        _each(value, rank) for value in (kernel, arguments["stride"] or kernel, padding, arguments.get("dilation", 1))
    )
    same = True
    for n, k, s, p, d in zip(shape, kernel, stride, padding, dilation, strict=True):
        needed = max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0)
        same = same and needed == 2 * p
    if same or not any(padding):
        return 1.0
    return float(np.prod([(n + 2 * p) / n for n, p in zip(shape, padding, strict=True)]))


def _each(value: Any, rank: int) -> list[int]:
    """Return one whole number per axis."""
    numbers = [int(v) for v in value] if isinstance(value, (list, tuple)) else [int(value)]
    return numbers * rank if len(numbers) == 1 else numbers


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer with weights: their elements, and its output channels, as functions of the keep ratios."""

    weight: Term
    made: Count


def int8_layers(sizes: Sizes) -> tuple[Layer, ...]:
    """Return the convolutions and linear layers; a weight that several of them use is in the first."""
    found, seen = [], set[str]()
    for operation in sizes.walk.trace.operations:
        node = operation.arguments.get("weight")
        name = sizes.walk.trace.tensors.get(getattr(node, "name", ""))
        if operation.kind in _WEIGHTED and name is not None and name in sizes.shapes and name not in seen:
            seen.add(name)
            value = parts(sizes.walk.values[operation.name])[0]
            made = sizes.elements(value)
            axis = 1 if operation.kind != "linear" else len(value.shape) - 1
            positions = prod(value.shape) / value.shape[axis]
            found.append(Layer(sizes.tensor(name), Count(made.constant / positions, made.coefficients / positions)))
    return tuple(found)
