"""What each operation does to channel identities: one small function per kind of operation, registered by name.

A rule gets the walk (ledger and values) and the operation; it returns the identities of the output, and on the way
records which dimensions of which tensors the channels index, what must be removed together, and what is counted as
FLOPs. An operation without a rule freezes the channels that reach it and is reported; nothing is guessed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx
from torch._subclasses import FakeTensor
from torch.utils.flop_counter import FlopCounterMode

from dsa_hw.channels.identities import Ids, Ledger, compress, fixed, reshape, varying
from dsa_hw.channels.trace import Trace, TracedOperation

__all__ = ["LARGEST_FREE_TENSOR", "RULES", "Extent", "Flops", "Pad", "Value", "Walk", "rule", "run"]

_logger = logging.getLogger(__name__)
LARGEST_FREE_TENSOR = 1 << 22  # elements; a larger tensor used as it is would cost more than it is worth


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor on the walk: its identities and shape, and, for one of the model's own tensors, its name."""

    ids: Ids
    shape: tuple[int, ...]
    itemsize: int = 4
    name: str | None = None
    number: torch.Tensor | None = None
    """Its numbers, where they are known at trace time (buffers, constants)."""


@dataclass(frozen=True, eq=False)
class Flops:
    """``scale`` FLOPs for each combination of entries of ``factors``, identity arrays; what is made comes first."""

    operation: str
    scale: float
    factors: tuple[Ids, ...]


@dataclass(frozen=True, eq=False)
class Extent:
    """An axis of channels whose length the code of ``module`` may hold as a number (a view to heads, say)."""

    module: str
    axis: int
    ids: Ids


@dataclass(frozen=True, eq=False)
class Pad:
    """Channels of zeros put in by ``operation``: ``before`` of ``ids`` in front, the rest behind."""

    operation: TracedOperation
    position: int
    """Where the amount in front stands in the list of amounts; the amount behind follows."""
    before: int
    ids: Ids


@dataclass
class Walk:
    """The state of one walk over a trace."""

    trace: Trace
    ledger: Ledger = field(default_factory=Ledger)
    values: dict[str, Any] = field(default_factory=dict)
    flops: list[Flops] = field(default_factory=list)
    extents: list[Extent] = field(default_factory=list)
    pads: list[Pad] = field(default_factory=list)
    current: TracedOperation | None = None

    @cached_property
    def signatures(self) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.bool_]]:
        """For each component: signature, the use that first produces it (or -1), and whether anything sums over it.

        The signature is the multiset of its uses; equal ones get equal sums of random 64-bit numbers.
        """
        labels, count = self.ledger.components
        random = np.random.default_rng(0).integers(1, 2**63, size=len(self.ledger.uses), dtype=np.uint64)
        signature = np.zeros(count, np.uint64)
        producer = np.full(count, -1, np.int64)
        consumed = np.zeros(count, bool)
        for number, use in enumerate(self.ledger.uses):
            found = labels[use.ids[use.ids >= 0]]
            with np.errstate(over="ignore"):
                np.add.at(signature, found, random[number] * np.uint64(use.weight))
            if use.role == "out":
                producer[found[producer[found] < 0]] = number
            elif use.role in ("in", "norm"):
                consumed[found] = True
        return signature, producer, consumed

    def value(self, argument: Any) -> Value:
        """The value of an argument of the current operation; a number is a tensor of rank 0 without identities."""
        if not isinstance(argument, fx.Node):
            return Value(fixed(0), ())
        value = self.values[argument.name]
        assert isinstance(value, Value), f"{argument.name} is a tuple"
        if value.name is not None and not value.ids.size:
            ids = self.ledger.free(value.name, value.shape, self.name)
            return Value(ids, value.shape, value.itemsize, value.name, value.number)
        return value

    def tensor_name(self, argument: Any) -> str | None:
        """The state_dict name of an argument that is one of the model's own floating-point tensors."""
        if isinstance(argument, fx.Node) and isinstance(value := self.values[argument.name], Value):
            return value.name
        return None

    @property
    def name(self) -> str:
        """Name of the current operation."""
        return self.current.name if self.current else ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the current operation's (only) output."""
        assert self.current is not None
        return tuple(int(n) for n in self.current.node.meta["val"].shape)

    @property
    def reason(self) -> str:
        """Why channels that meet the current operation badly are frozen."""
        return f"{self.current} ties them to channels that cannot be removed"

    def vector(self, value: Value, axis: int) -> Ids:
        """Identities along one axis, (shape[axis],); what differs along the other axes is joined."""
        axis %= len(value.shape)
        others = [a for a in range(len(value.shape)) if a != axis]
        ids = self.ledger.join_along(value.ids, others, self.reason)
        return np.broadcast_to(ids.reshape(-1), (value.shape[axis],))

    def per_channel(self, argument: Any, ids: Ids, role: str = "per") -> None:
        """A vector tensor that holds one value per channel (a bias, a scale, a running mean), or None."""
        if not isinstance(argument, fx.Node):
            return
        if (name := self.tensor_name(argument)) is not None:
            self.ledger.slot(name, 0, ids, role, self.name)
        else:
            value = self.value(argument)
            self.ledger.join(self.vector(value, len(value.shape) - 1), ids, self.reason)


Rule = Callable[[Walk, TracedOperation], Any]
RULES: dict[str, Rule] = {}


def rule(*kinds: str) -> Callable[[Rule], Rule]:
    """Register a rule for these kinds of operation."""

    def register(function: Rule) -> Rule:
        for kind in kinds:
            RULES[kind] = function
        return function

    return register


def run(walk: Walk, operation: TracedOperation) -> None:
    """Apply the rule for ``operation`` and keep the identities of its output."""
    walk.current = operation
    node = operation.node
    target_tags = getattr(node.target, "tags", ())
    function = RULES.get(operation.kind)
    if function is None and torch.Tag.pointwise in target_tags:
        function = pointwise
    result = (function or unknown)(walk, operation)
    meta = node.meta.get("val")
    if isinstance(meta, torch.Tensor):
        walk.values[node.name] = _checked(walk, result, meta, _number(walk, node, meta))
    elif isinstance(meta, (tuple, list)):
        walk.values[node.name] = tuple(
            _checked(walk, ids, m) if isinstance(m, torch.Tensor) else None for ids, m in zip(result, meta, strict=True)
        )
    else:
        walk.values[node.name] = Value(fixed(0), ())


def _number(walk: Walk, node: fx.Node, meta: torch.Tensor) -> torch.Tensor | None:
    """The operation's result where all that it takes is known (arithmetic on index tables)."""
    found = {n: getattr(walk.values[n.name], "number", None) for n in node.all_input_nodes}
    known = {n: number for n, number in found.items() if isinstance(number, torch.Tensor)}
    if not known or len(known) < len(found) or meta.numel() > LARGEST_FREE_TENSOR:
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: known[n].clone())
    result = node.target(*args, **kwargs)  # type: ignore[operator]
    return result if isinstance(result, torch.Tensor) else None


def _checked(walk: Walk, result: Any, meta: torch.Tensor, number: torch.Tensor | None = None) -> Value:
    shape = tuple(int(n) for n in meta.shape)
    value = result if isinstance(result, Value) else Value(result, shape, meta.element_size())
    ids = value.ids
    assert ids.ndim == len(shape), f"{walk.current}: identities of rank {ids.ndim} for a tensor of rank {len(shape)}"
    assert all(n in (1, s) for n, s in zip(ids.shape, shape, strict=True)), f"{walk.current}: {ids.shape} for {shape}"
    if len(varying(ids)) > 1:
        walk.ledger.box(ids, walk.reason)
    return Value(ids, shape, meta.element_size(), number=number)


# --- what is not understood ------------------------------------------------------------------------------------------


def unknown(walk: Walk, operation: TracedOperation) -> Any:
    """Freeze all that reaches it."""
    for argument in operation.node.all_input_nodes:
        value = walk.values[argument.name]
        for part in value if isinstance(value, tuple) else (value,):
            if part is not None and not (part.name and not part.ids.size):
                walk.ledger.freeze(part.ids, f"operation not understood: {operation}")
    if work := _flops_inside(operation.node):
        walk.flops.append(Flops(walk.name, work, ()))
    meta = operation.node.meta.get("val")
    if isinstance(meta, (tuple, list)):
        return tuple(fixed(m.ndim) if isinstance(m, torch.Tensor) else None for m in meta)
    return fixed(meta.ndim if isinstance(meta, torch.Tensor) else 0)


def _flops_inside(node: fx.Node) -> float:
    """What torch's counter sees inside an operation without a rule (a whole subgraph, say): never silently nothing."""

    def stand_in(source: fx.Node) -> Any:
        if source.op == "get_attr":
            return getattr(source.graph.owning_module, str(source.target))
        return source.meta.get("val")  # a fake tensor: right shape, type and device, and no data

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), stand_in)
    try:
        fake = next((v.fake_mode for v in map(stand_in, node.all_input_nodes) if isinstance(v, FakeTensor)), None)
        with fake or contextlib.nullcontext(), torch.no_grad(), FlopCounterMode(display=False) as counter:
            node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:  # an operation that has no shape function: say so, and go on
        _logger.warning("the FLOPs of %s are not counted: %s", node.name, error)
        return 0.0
    return float(counter.get_total_flops())


@rule("getitem")
def getitem(walk: Walk, operation: TracedOperation) -> Any:
    """One tensor of an operation with several outputs."""
    return walk.values[operation.arguments["input"].name][operation.arguments["index"]]


@rule("zeros", "ones", "full", "arange", "linspace", "meshgrid", "new_zeros", "new_ones")
def constant(walk: Walk, operation: TracedOperation) -> Any:
    """A tensor made from nothing has no channels."""
    meta = operation.node.meta.get("val")
    if isinstance(meta, (tuple, list)):
        return tuple(fixed(m.ndim) for m in meta)
    return fixed(meta.ndim if isinstance(meta, torch.Tensor) else 0)


# --- element by element ----------------------------------------------------------------------------------------------


@rule("dropout", "hardswish", "copy")
def pointwise(walk: Walk, operation: TracedOperation) -> Ids:
    """Element-wise with broadcasting: what meets in an element is removed together."""
    return merge(walk, [walk.value(node) for node in operation.node.all_input_nodes], walk.shape)


def merge(walk: Walk, values: Sequence[Value], shape: Sequence[int]) -> Ids:
    """Identities of an element-wise combination of ``values`` broadcast to ``shape``."""
    rank = len(shape)
    parts = [
        (v.ids.reshape((1,) * (rank - v.ids.ndim) + v.ids.shape), (1,) * (rank - len(v.shape)) + v.shape)
        for v in values
    ]
    axes = {axis for ids, _ in parts for axis in varying(ids)}
    result = fixed(rank)
    for ids, extent in parts:
        whole = not any(extent[axis] == 1 < shape[axis] for axis in axes)
        if not varying(ids) and not whole:
            # One value spread over many channels (a spatial attention map): it stays whatever they do.
            walk.ledger.freeze(ids, f"{walk.current} spreads it over other channels")
        elif (ids >= 0).any():
            if (result >= 0).any():
                walk.ledger.join(result, ids, walk.reason)
            result = np.where(*np.broadcast_arrays(result >= 0, result, ids))
    for ids, extent in parts:
        # A tensor without identities along an axis that it has in full holds that axis fixed.
        if (ids < 0).all() and any(extent[axis] > 1 for axis in axes):
            walk.ledger.freeze(result, walk.reason)
    return compress(result)


@rule(
    "clone",
    "contiguous",
    "alias",
    "detach",
    "lift_fresh_copy",
    "to",
    "type_as",
    "fill",
    "zero",
    "zeros_like",
    "ones_like",
)
def same(walk: Walk, operation: TracedOperation) -> Any:
    """The first argument's channels, untouched; a tensor made in its likeness follows it."""
    return walk.value(operation.node.all_input_nodes[0]).ids


@rule("_assert_tensor_metadata")
def nothing(walk: Walk, operation: TracedOperation) -> None:
    """A check that ``torch.export`` puts in; it has no output."""


@rule("prelu")
def prelu(walk: Walk, operation: TracedOperation) -> Ids:
    """One slope per channel (axis 1), or one for all."""
    value = walk.value(operation.arguments["self"])
    weight = operation.arguments["weight"]
    slopes = int(weight.meta["val"].numel())
    if slopes > 1:
        walk.per_channel(weight, walk.vector(value, 1))
    return value.ids


@rule("glu")
def glu(walk: Walk, operation: TracedOperation) -> Ids:
    """First half times the sigmoid of the second half."""
    value = walk.value(operation.arguments["self"])
    axis = operation.arguments["dim"] % len(value.shape)
    a, b = _chunks(walk, value, 2, axis)
    return merge(walk, [Value(a, walk.shape), Value(b, walk.shape)], walk.shape)


# --- moving data -----------------------------------------------------------------------------------------------------


@rule("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
def reshaped(walk: Walk, operation: TracedOperation) -> Ids:
    """Any regrouping of axes that keeps the order of the elements."""
    value = walk.value(operation.node.all_input_nodes[0])
    ids = reshape(value.ids, value.shape, walk.shape)
    if operation.kind not in ("flatten", "squeeze", "unsqueeze"):
        for axis in varying(ids):
            walk.extents.append(Extent(operation.module, axis, ids))
    return ids


@rule("permute", "transpose", "swapaxes", "t", "movedim")
def permuted(walk: Walk, operation: TracedOperation) -> Ids:
    """Another order of the axes: the same operation on the identities."""
    node = operation.node
    ids = walk.value(node.all_input_nodes[0]).ids
    return _as_numpy(node.target, torch.from_numpy(ids.copy()), node)


def _as_numpy(target: Any, tensor: torch.Tensor, node: fx.Node) -> Ids:
    source = node.all_input_nodes[0]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: tensor if n is source else None)
    return target(*args, **kwargs).numpy()


@rule("select")
def select(walk: Walk, operation: TracedOperation) -> Ids:
    """One position of an axis."""
    value = walk.value(operation.arguments["self"])
    axis = operation.arguments["dim"] % len(value.shape)
    index = operation.arguments["index"] % value.shape[axis]
    return np.asarray(value.ids.take(index if value.ids.shape[axis] > 1 else 0, axis))


@rule("slice", "narrow")
def sliced(walk: Walk, operation: TracedOperation) -> Ids:
    """Part of an axis."""
    value = walk.value(operation.arguments.get("self"))
    arguments = operation.arguments
    axis = arguments["dim"] % len(value.shape)
    if value.ids.shape[axis] == 1:
        return value.ids
    if operation.kind == "narrow":
        cut = slice(arguments["start"], arguments["start"] + arguments["length"])
    else:
        cut = slice(arguments["start"], arguments["end"], arguments["step"])
    return compress(value.ids[(slice(None),) * axis + (cut,)])


@rule("expand", "expand_as")
def expand(walk: Walk, operation: TracedOperation) -> Ids:
    """Axes of length 1 repeated."""
    ids = walk.value(operation.node.all_input_nodes[0]).ids
    return ids.reshape((1,) * (len(walk.shape) - ids.ndim) + ids.shape)


@rule("cat")
def cat(walk: Walk, operation: TracedOperation) -> Ids:
    """Tensors one after the other: each keeps its own identities."""
    arguments = operation.arguments
    values = [v for v in map(walk.value, arguments["tensors"]) if v.shape != (0,)]
    axis = arguments["dim"] % len(walk.shape)
    widest = np.broadcast_shapes(*[(*v.ids.shape[:axis], 1, *v.ids.shape[axis + 1 :]) for v in values])
    parts = [np.broadcast_to(v.ids, (*widest[:axis], v.shape[axis], *widest[axis + 1 :])) for v in values]
    return compress(np.concatenate(parts, axis))


@rule("stack")
def stack(walk: Walk, operation: TracedOperation) -> Ids:
    """Tensors along a new axis."""
    values = [walk.value(v) for v in operation.arguments["tensors"]]
    axis = operation.arguments["dim"] % len(walk.shape)
    return compress(np.stack(np.broadcast_arrays(*[v.ids for v in values]), axis))


def _chunks(walk: Walk, value: Value, count: int, axis: int) -> list[Ids]:
    """``count`` equal parts; they must stay equal, so the i-th channels of all parts are removed together."""
    if value.ids.shape[axis] == 1:
        return [value.ids] * count
    if value.shape[axis] % count:
        walk.ledger.freeze(value.ids, f"{walk.current} cuts them into unequal parts")
        bounds = np.cumsum([len(part) for part in np.array_split(np.arange(value.shape[axis]), count)])[:-1]
        return [compress(part) for part in np.split(value.ids, bounds, axis)]
    parts = np.split(value.ids, count, axis)
    walk.ledger.box(
        np.stack([walk.ledger.join_along(p, [a for a in varying(p) if a != axis], walk.reason).ravel() for p in parts]),
        walk.reason,
    )
    return [compress(part) for part in parts]


@rule("chunk", "split", "split_with_sizes")
def split(walk: Walk, operation: TracedOperation) -> tuple[Ids, ...]:
    """Equal parts stay equal; unequal ones are cut where they are cut (and checked when the network is shrunk)."""
    value = walk.value(operation.arguments["self"])
    axis = operation.arguments["dim"] % len(value.shape)
    sizes = [int(meta.shape[axis]) for meta in operation.node.meta["val"]]
    if len(set(sizes)) == 1:
        return tuple(_chunks(walk, value, len(sizes), axis))
    if value.ids.shape[axis] == 1:
        return (value.ids,) * len(sizes)
    return tuple(compress(part) for part in np.split(value.ids, np.cumsum(sizes)[:-1], axis))


@rule("unbind")
def unbind(walk: Walk, operation: TracedOperation) -> tuple[Ids, ...]:
    """Every position of an axis."""
    value = walk.value(operation.arguments["self"])
    axis = operation.arguments["dim"] % len(value.shape)
    full = value.ids.shape[axis] > 1
    return tuple(np.asarray(value.ids.take(i if full else 0, axis)) for i in range(value.shape[axis]))


@rule("pad")
def pad(walk: Walk, operation: TracedOperation) -> Ids:
    """Padding an axis of channels makes channels of its own (option-A shortcuts); other axes do not matter."""
    value = walk.value(operation.arguments["self"])
    amounts = list(operation.arguments["pad"])
    ids = value.ids
    for i in range(len(amounts) // 2):
        axis = len(value.shape) - 1 - i
        before, after = amounts[2 * i], amounts[2 * i + 1]
        if ids.shape[axis] == 1 or (before, after) == (0, 0):
            continue
        if before < 0 or after < 0 or operation.arguments["mode"] != "constant" or len(varying(ids)) > 1:
            return unknown(walk, operation)
        new = walk.ledger.fresh(before + after)
        shape = (1,) * axis + (-1,) + (1,) * i
        ids = np.concatenate([new[:before].reshape(shape), ids, new[before:].reshape(shape)], axis)
        walk.ledger.slot(walk.name, axis, new, "pad", walk.name)
        walk.pads.append(Pad(operation, 2 * i, before, new))
    return ids


@rule("index")
def index(walk: Walk, operation: TracedOperation) -> Ids:
    """Look-up with index tensors whose numbers are known: the same look-up on the identities."""
    value = walk.value(operation.arguments["self"])
    if (value.ids < 0).all():
        return fixed(len(walk.shape))
    numbers: list[Any] = []
    for argument in operation.arguments["indices"]:
        if argument is None:
            numbers.append(slice(None))
        elif (number := walk.values[argument.name].number) is not None:
            numbers.append(number.numpy())
        else:
            return unknown(walk, operation)
    return compress(np.broadcast_to(value.ids, value.shape)[tuple(numbers)])


@rule("roll", "flip", "repeat", "pixel_unshuffle", "unfold", "channel_shuffle")
def moved(walk: Walk, operation: TracedOperation) -> Ids:
    """Any other pure move of data: the same operation on the identities in full."""
    node = operation.node
    if len(node.all_input_nodes) != 1:
        return unknown(walk, operation)
    value = walk.value(node.all_input_nodes[0])
    if not varying(value.ids):
        return np.full((1,) * len(walk.shape), value.ids.flat[0])
    if operation.kind == "channel_shuffle":
        _chunks(walk, value, operation.arguments["groups"], 1)
    return compress(_as_numpy(node.target, torch.from_numpy(np.broadcast_to(value.ids, value.shape).copy()), node))


@rule("pixel_shuffle")
def pixel_shuffle(walk: Walk, operation: TracedOperation) -> Ids:
    """The r*r channels that become one larger channel are removed together."""
    value = walk.value(operation.arguments["self"])
    block = operation.arguments["upscale_factor"] ** 2
    ids = walk.vector(value, -3).reshape(-1, block)
    first = walk.ledger.join_along(ids, [1], walk.reason)
    return compress(first.reshape((1,) * (len(value.shape) - 3) + (-1, 1, 1)))


# --- over space, over channels ---------------------------------------------------------------------------------------


@rule(*[f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)])
@rule("max_pool2d_with_indices", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d")
def spatial(walk: Walk, operation: TracedOperation) -> Any:
    """Pooling and resizing work inside each channel."""
    value = walk.value(operation.node.all_input_nodes[0])
    last = next(n for n in (1, 2, 3) if f"{n}d" in operation.kind)
    axes = range(len(value.shape) - last, len(value.shape))
    ids = walk.ledger.join_along(value.ids, list(axes), walk.reason)
    meta = operation.node.meta["val"]
    return ids if isinstance(meta, torch.Tensor) else (ids,) * len(meta)


@rule("mean", "sum", "amax", "amin", "max", "min", "var", "std", "linalg_vector_norm")
def reduction(walk: Walk, operation: TracedOperation) -> Any:
    """Reducing an axis mixes what lies along it: it can only be removed together."""
    value = walk.value(operation.node.all_input_nodes[0])
    rank = len(value.shape)
    dims = operation.arguments.get("dim")
    if dims is None or dims == []:
        dims = list(range(rank))
    axes = sorted({d % rank for d in ([dims] if isinstance(dims, int) else dims)})
    ids = _mixed(walk, value.ids, axes)
    if not operation.arguments.get("keepdim", False):
        ids = ids.reshape([n for axis, n in enumerate(ids.shape) if axis not in axes])
    meta = operation.node.meta["val"]
    return ids if isinstance(meta, torch.Tensor) else (ids,) * len(meta)


def _mixed(walk: Walk, ids: Ids, axes: Sequence[int]) -> Ids:
    """Join along ``axes``; if no other axis varies then all of it is one piece, and that is worth a reason."""
    if varying(ids) and set(varying(ids)) <= set(axes):
        walk.ledger.freeze(ids, f"{walk.current} mixes all of them")
    return walk.ledger.join_along(ids, axes, f"{walk.current} mixes them with channels that cannot be removed")


@rule("softmax", "log_softmax")
def along(walk: Walk, operation: TracedOperation) -> Any:
    """Mixes along one axis and keeps it."""
    value = walk.value(operation.node.all_input_nodes[0])
    _mixed(walk, value.ids, [operation.arguments["dim"] % len(value.shape)])
    return value.ids


# --- normalisation ---------------------------------------------------------------------------------------------------


@rule("batch_norm", "instance_norm")
def batch_norm(walk: Walk, operation: TracedOperation) -> Ids:
    """Statistics per channel."""
    value = walk.value(operation.arguments["input"])
    channels = walk.vector(value, 1)
    for name in ("weight", "bias", "running_mean", "running_var"):
        walk.per_channel(operation.arguments[name], channels)
    return value.ids


@rule("layer_norm", "rms_norm")
def layer_norm(walk: Walk, operation: TracedOperation) -> Ids:
    """Statistics over the channels that are there: pruning through it needs the statistics of the kept ones."""
    value = walk.value(operation.arguments["input"])
    count = len(operation.arguments["normalized_shape"])
    axes = range(len(value.shape) - count, len(value.shape))
    inside = [a for a in varying(value.ids) if a in axes]
    weight = operation.arguments["weight"]
    if not inside:
        # The channels lie on an outer axis: each keeps its own statistics, and the scale does not index them.
        return value.ids
    if count > 1 or walk.tensor_name(weight) is None:
        walk.ledger.freeze(value.ids, f"{operation} has no scale per channel")
        return value.ids
    channels = walk.vector(value, -1)
    walk.per_channel(weight, channels, "norm")
    walk.per_channel(operation.arguments.get("bias"), channels)
    return value.ids


@rule("group_norm")
def group_norm(walk: Walk, operation: TracedOperation) -> Ids:
    """As layer norm inside each of its groups, which must stay equal."""
    value = walk.value(operation.arguments["input"])
    if not varying(value.ids):
        return value.ids
    if walk.tensor_name(operation.arguments["weight"]) is None:
        walk.ledger.freeze(value.ids, f"{operation} has no scale per channel")
        return value.ids
    channels = walk.vector(value, 1)
    walk.ledger.join_along(channels.reshape(operation.arguments["num_groups"], -1), [0], walk.reason)
    walk.per_channel(operation.arguments["weight"], channels, "norm")
    walk.per_channel(operation.arguments["bias"], channels)
    return value.ids


# --- producers: convolution, linear, embedding -----------------------------------------------------------------------


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(walk: Walk, operation: TracedOperation) -> Ids:
    """Normal, grouped, depthwise, and each of them transposed.

    Weights are (C_out, C_in / groups, ...), transposed ones (C_in, C_out / groups, ...). A grouped convolution keeps
    its number of groups and loses the i-th channel of each; a depthwise one (a single input channel per group) loses
    whole groups.
    """
    arguments = operation.arguments
    value = walk.value(arguments["input"])
    weight = arguments["weight"]
    kernel = [int(n) for n in weight.meta["val"].shape]
    transposed = "transpose" in operation.kind
    rank = len(kernel) - 2
    axis = len(value.shape) - rank - 1  # 1, or 0 without a batch
    groups = int(arguments["groups"])
    incoming = walk.vector(value, axis)
    outgoing_count = walk.shape[axis]
    name = walk.tensor_name(weight)
    spatial_size = prod((value.shape if transposed else walk.shape)[axis + 1 :])
    scale = 2.0 * prod(walk.shape[:axis]) * spatial_size * prod(kernel[2:])
    if name is None:
        walk.ledger.freeze(incoming, f"the weight of {operation} is computed")
        walk.flops.append(Flops(walk.name, scale * kernel[0] * kernel[1], ()))
        return fixed(len(walk.shape))
    ledger = walk.ledger
    factors: tuple[Ids, ...]
    dim_in, dim_out = (0, 1) if transposed else (1, 0)
    if groups == 1:
        ledger.slot(name, dim_in, incoming, "in", walk.name)
        outgoing = ledger.made(name, dim_out, outgoing_count, "out", walk.name)
        factors = (outgoing, incoming)
    elif len(incoming) == groups:
        per_group = outgoing_count // groups
        if transposed:
            outgoing = np.repeat(incoming, per_group)
            ledger.slot(name, 0, incoming, "per", walk.name)
        else:
            outgoing = ledger.made(name, 0, outgoing_count, "out", walk.name)
            ledger.join(np.repeat(incoming, per_group), outgoing, walk.reason)
        factors = (outgoing,)
    else:
        first_in = ledger.join_along(incoming.reshape(groups, -1), [0], walk.reason)[0]
        if transposed:
            ledger.slot(name, 0, incoming, "in", walk.name)
            first_out = ledger.made(name, 1, outgoing_count // groups, "out", walk.name)
            outgoing = np.tile(first_out, groups)
            factors = (first_out, incoming)
        else:
            ledger.slot(name, 1, first_in, "in", walk.name)
            outgoing = ledger.made(name, 0, outgoing_count, "out", walk.name)
            ledger.join_along(outgoing.reshape(groups, -1), [0], walk.reason)
            factors = (outgoing, first_in)
    walk.flops.append(Flops(walk.name, scale, factors))
    walk.per_channel(arguments["bias"], outgoing)
    return outgoing.reshape((1,) * axis + (-1,) + (1,) * rank)


@rule("linear")
def linear(walk: Walk, operation: TracedOperation) -> Ids:
    """Sums over the last axis; weights are (out, in)."""
    arguments = operation.arguments
    return _linear(walk, operation, arguments["input"], arguments["weight"], arguments["bias"], dim_in=1)


def _linear(walk: Walk, operation: TracedOperation, source: Any, weight: Any, bias: Any, dim_in: int) -> Ids:
    value = walk.value(source)
    incoming = walk.vector(value, -1)
    rank = len(walk.shape)
    name = walk.tensor_name(weight)
    if name is None:
        walk.ledger.freeze(incoming, f"the weight of {operation} is computed")
        walk.flops.append(Flops(walk.name, 2.0 * prod(value.shape) * walk.shape[-1], ()))
        return fixed(rank)
    walk.ledger.slot(name, dim_in, incoming, "in", walk.name)
    outgoing = walk.ledger.made(name, 1 - dim_in, walk.shape[-1], "out", walk.name)
    walk.flops.append(Flops(walk.name, 2.0 * prod(value.shape[:-1]), (outgoing, incoming)))
    walk.per_channel(bias, outgoing)
    return outgoing.reshape((1,) * (rank - 1) + (-1,))


@rule("embedding")
def embedding(walk: Walk, operation: TracedOperation) -> Ids:
    """Columns of the table are channels; rows are words, and stay."""
    name = walk.tensor_name(operation.arguments["weight"])
    if name is None:
        return unknown(walk, operation)
    ids = walk.ledger.made(name, 1, walk.shape[-1], "out", walk.name)
    return ids.reshape((1,) * (len(walk.shape) - 1) + (-1,))


# --- products of activations -----------------------------------------------------------------------------------------


@rule("matmul", "mm", "bmm", "addmm")
def matmul(walk: Walk, operation: TracedOperation) -> Ids:
    """With one of the model's matrices it is a linear layer; otherwise a contraction of two activations."""
    arguments = operation.arguments
    bias = arguments["self"] if operation.kind == "addmm" else None
    first, second = [a for a in arguments.values() if isinstance(a, fx.Node) and a is not bias]
    right = walk.values[second.name]
    if walk.tensor_name(second) is not None and len(right.shape) == 2 and walk.tensor_name(first) is None:
        return _linear(walk, operation, first, second, bias, dim_in=0)
    if bias is not None:
        return unknown(walk, operation)
    a, b = walk.value(first), walk.value(second)
    if len(a.shape) < 2 or len(b.shape) < 2:
        return unknown(walk, operation)
    rank = len(walk.shape)
    letters = "abcdefgh"[: rank - 2]
    left = letters[rank - len(a.shape) :] + "xy"
    other = letters[rank - len(b.shape) :] + "yz"
    return _contract(walk, [(left, a), (other, b)], letters + "xz")


@rule("einsum")
def einsum(walk: Walk, operation: TracedOperation) -> Ids:
    """Contraction by letters."""
    values = [walk.value(v) for v in operation.arguments["tensors"]]
    equation = str(operation.arguments["equation"]).replace(" ", "")
    if "->" not in equation or "." in equation:
        return unknown(walk, operation)
    left, out = equation.split("->")
    subscripts = left.split(",")
    if any(len(set(s)) < len(s) for s in [*subscripts, out]) or len(values) != 2:
        return unknown(walk, operation)
    return _contract(walk, list(zip(subscripts, values, strict=True)), out)


def _contract(walk: Walk, operands: Sequence[tuple[str, Value]], out: str) -> Ids:
    """Sum over the letters that are not in ``out``: what is summed can only be removed together."""
    size = {letter: n for letters, v in operands for letter, n in zip(letters, v.shape, strict=True) if n > 1}
    aligned = []
    for letters, value in operands:
        ids = _mixed(walk, value.ids, [i for i, letter in enumerate(letters) if letter not in out])
        order = [letter for letter in out if letter in letters]
        kept = ids.transpose([letters.index(x) for x in order] + [i for i, x in enumerate(letters) if x not in out])
        kept = kept.reshape(kept.shape[: len(order)])
        shape = tuple(value.shape[letters.index(x)] if x in letters else 1 for x in out)
        full = kept.reshape(tuple(kept.shape[order.index(x)] if x in letters else 1 for x in out))
        aligned.append(Value(full, shape))
    result = merge(walk, aligned, [size.get(x, 1) for x in out])
    summed = prod(size.get(x, 1) for x in {x for letters, _ in operands for x in letters} - set(out))
    walk.flops.append(_activation_flops(walk, 2.0 * summed, result, walk.shape))
    return result


def _activation_flops(walk: Walk, per_element: float, ids: Ids, shape: Sequence[int]) -> Flops:
    return Flops(walk.name, per_element * prod(shape) / ids.size, (ids,))


@rule("scaled_dot_product_attention")
def attention(walk: Walk, operation: TracedOperation) -> Ids:
    """Whole heads can go; the channels inside a head share one softmax, so they go together.

    FLOPs are those of its two matrix products, q k' and (softmax) v.
    """
    arguments = operation.arguments
    q, k, v = (walk.value(arguments[n]) for n in ("query", "key", "value"))
    heads = [_mixed(walk, x.ids, [len(x.shape) - 2, len(x.shape) - 1]) for x in (q, k, v)]
    if any(h.shape != heads[0].shape for h in heads):
        for x in (q, k, v):
            walk.ledger.freeze(x.ids, f"{operation} gives several heads of queries to one of keys")
        heads = [fixed(len(q.shape))]
    for other in heads[1:]:
        walk.ledger.join(heads[0], other, walk.reason)
    if isinstance(mask := arguments.get("attn_mask"), fx.Node):
        merge(walk, [Value(heads[0], (*q.shape[:-1], k.shape[-2])), walk.value(mask)], (*q.shape[:-1], k.shape[-2]))
    for width in (q.shape[-1], v.shape[-1]):
        walk.flops.append(_activation_flops(walk, 2.0 * width, heads[0], (*q.shape[:-1], k.shape[-2])))
    return walk.ledger.join_along(v.ids, [len(v.shape) - 2], walk.reason)
