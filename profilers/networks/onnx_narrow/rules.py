"""Rules for ONNX operations: how each changes narrowed axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dsa_hw.errors import ProfileError
from profilers.litert.worker.masks import KeepMask, NarrowedAxes, reshaped
from profilers.networks.onnx_narrow.walk import OnnxWalk

__all__ = ["visit"]

_Rule = Callable[[OnnxWalk, Any], None]
_RULES: dict[str, _Rule] = {}


def _rule(operations: str) -> Callable[[_Rule], _Rule]:
    """Register a rule for operations whose names are separated by spaces."""

    def decorate(function: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(operations.split(), function))
        return function

    return decorate


def visit(walk: OnnxWalk, node: Any) -> None:
    """Apply the rule of a node; without narrowed inputs there is nothing to do.

    Raises:
        ProfileError: No rule exists for the operation, or its rule cannot be applied.
    """
    if not any(walk.of(name) for name in node.input) and not (node.op_type == "Pad" and walk.pads):
        return
    if node.op_type not in _RULES:
        raise _cannot(node, "the operation is not supported by profilers.networks.onnx_narrow.rules")
    _RULES[node.op_type](walk, node)


def _cannot(node: Any, reason: str) -> ProfileError:
    return ProfileError(f"Cannot narrow the exported network at {node.op_type} {node.output[0]!r}: {reason}.")


def _attribute(node: Any, name: str, default: Any = None) -> Any:
    from onnx import helper

    for attribute in node.attribute:
        if attribute.name == name:
            return helper.get_attribute_value(attribute)
    return default


def _set_attribute(node: Any, name: str, value: Any) -> None:
    from onnx import helper

    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    if value is not None:
        node.attribute.append(helper.make_attribute(name, value))


def _bias(walk: OnnxWalk, node: Any, index: int, mask: KeepMask | None) -> None:
    """Narrow a bias like the outputs of its operation: with batch norm folded in, it is not a parameter."""
    if mask is not None and len(node.input) > index and node.input[index] and not walk.of(node.input[index]):
        shape = walk.shape(node.input[index])
        if shape and shape[-1] == len(mask):
            walk.set(node.input[index], {len(shape) - 1: mask})


_SAME = """Relu LeakyRelu Elu Selu Celu ThresholdedRelu Sigmoid HardSigmoid HardSwish Mish Softplus Softsign Tanh Erf
Gelu Exp Log Sqrt Reciprocal Abs Neg Floor Ceil Round Sign Sin Cos Clip Cast Identity Dropout Not IsNaN IsInf MaxPool
AveragePool LpPool GlobalAveragePool GlobalMaxPool BatchNormalization InstanceNormalization LayerNormalization
RMSNormalization Softmax LogSoftmax QuantizeLinear DequantizeLinear"""


@_rule(_SAME)
def _same(walk: OnnxWalk, node: Any) -> None:
    axes = walk.of(node.input[0])
    walk.set(node.output[0], axes)
    if node.op_type in ("BatchNormalization", "InstanceNormalization") and 1 in axes:
        for index in range(1, len(node.input)):
            _bias(walk, node, index, axes[1])


@_rule("Conv")
def _conv(walk: OnnxWalk, node: Any) -> None:
    data, weight = node.input[0], node.input[1]
    group = _attribute(node, "group", 1)
    if group > 1:
        channels, each = walk.count(data, 1), walk.count(weight, 1)
        if channels % each:
            raise _cannot(node, f"{channels} channels cannot be divided into groups of {each}")
        _set_attribute(node, "group", channels // each)
    mask = walk.of(weight).get(0)
    _bias(walk, node, 2, mask)
    walk.set(node.output[0], {} if mask is None else {1: mask})


@_rule("ConvTranspose")
def _conv_transpose(walk: OnnxWalk, node: Any) -> None:
    data, weight = node.input[0], node.input[1]
    group = _attribute(node, "group", 1)
    mask = walk.of(weight).get(1)
    if group > 1:
        made = np.ones(walk.shape(weight)[1], bool) if mask is None else mask
        if walk.shape(weight)[0] == group:  # depthwise: whole groups are removed
            whole = walk.of(weight).get(0, np.ones(group, bool))
            _set_attribute(node, "group", walk.count(data, 1))
            mask = np.repeat(whole, len(made)) & np.tile(made, group)
        else:
            mask = np.tile(made, group)
    _bias(walk, node, 2, mask)
    walk.set(node.output[0], {} if mask is None else {1: mask})


@_rule("Gemm")
def _gemm(walk: OnnxWalk, node: Any) -> None:
    rows = walk.of(node.input[0]).get(1 if _attribute(node, "transA", 0) else 0)
    mask = walk.of(node.input[1]).get(0 if _attribute(node, "transB", 0) else 1)
    _bias(walk, node, 2, mask)
    walk.set(node.output[0], {i: a for i, a in ((0, rows), (1, mask)) if a is not None})


@_rule("MatMul")
def _matmul(walk: OnnxWalk, node: Any) -> None:
    left, right = node.input
    rank = max(len(walk.shape(left)), len(walk.shape(right)))
    axes: NarrowedAxes = {}
    for name, inner in ((left, -1), (right, -2)):
        shape = walk.shape(name)
        for axis, mask in walk.of(name).items():
            if (len(shape) > 1 and axis == len(shape) + inner) or len(shape) == 1:
                continue  # summed over
            axes[axis + rank - len(shape)] = mask
    walk.set(node.output[0], axes)


_ELEMENTWISE = (
    """Add Sub Mul Div Pow Max Min Sum Mean Mod And Or Xor Equal Greater Less GreaterOrEqual LessOrEqual Where PRelu"""
)


@_rule(_ELEMENTWISE)
def _elementwise(walk: OnnxWalk, node: Any) -> None:
    shapes = [walk.shape(name) for name in node.input]
    rank = max(map(len, shapes))
    axes: NarrowedAxes = {}
    for name, shape in zip(node.input, shapes, strict=True):
        for axis, mask in walk.of(name).items():
            place = axis + rank - len(shape)
            if place in axes and not np.array_equal(axes[place], mask):
                raise _cannot(node, "its inputs keep different channels")
            axes[place] = mask
    for name, shape in zip(node.input, shapes, strict=True):
        if walk.is_constant(name):  # no parameter of the network: it follows the other inputs
            own = {i: axes[i + rank - len(shape)] for i in range(len(shape)) if i + rank - len(shape) in axes}
            walk.set(name, {i: mask for i, mask in own.items() if shape[i] == len(mask)})
    walk.set(node.output[0], axes)


@_rule("Concat")
def _concat(walk: OnnxWalk, node: Any) -> None:
    rank = len(walk.shape(node.input[0]))
    axis = _attribute(node, "axis") % rank
    axes: NarrowedAxes = {}
    for name in node.input:
        axes |= {i: mask for i, mask in walk.of(name).items() if i != axis}
    axes[axis] = np.concatenate([walk.of(n).get(axis, np.ones(walk.shape(n)[axis], bool)) for n in node.input])
    walk.set(node.output[0], axes)


@_rule("Split")
def _split(walk: OnnxWalk, node: Any) -> None:
    axes = walk.of(node.input[0])
    axis = _attribute(node, "axis", 0) % len(walk.shape(node.input[0]))
    if axis not in axes:
        for name in node.output:
            walk.set(name, axes)
        return
    sizes = [walk.shape(name)[axis] for name in node.output]
    masks = np.split(axes[axis], np.cumsum(sizes)[:-1])
    for name, mask in zip(node.output, masks, strict=True):
        walk.set(name, {**axes, axis: mask})
    _set_attribute(node, "num_outputs", None)
    walk.replace(node, 1, [int(mask.sum()) for mask in masks])


@_rule("Slice")
def _slice(walk: OnnxWalk, node: Any) -> None:
    data = node.input[0]
    shape, old = walk.shape(data), walk.of(data)
    starts, ends = walk.value(node, 1).tolist(), walk.value(node, 2).tolist()
    places = walk.value(node, 3).tolist() if len(node.input) > 3 and node.input[3] else list(range(len(starts)))
    steps = walk.value(node, 4).tolist() if len(node.input) > 4 and node.input[4] else [1] * len(starts)
    axes, changed = dict(old), False
    for i, place in enumerate(places):
        axis = place % len(shape)
        if axis not in old:
            continue
        chosen = np.arange(shape[axis])[starts[i] : ends[i] : steps[i]]
        mask = old[axis]
        axes[axis] = mask[chosen]
        ranks = (np.cumsum(mask) - 1)[chosen[mask[chosen]]]
        gaps = set(np.diff(ranks).tolist())
        if len(gaps) > 1 or steps[i] < 0:
            raise _cannot(node, "the kept channels are not evenly spaced")
        first = int(ranks[0]) if len(ranks) else 0
        starts[i], ends[i] = first, int(ranks[-1]) + 1 if len(ranks) else first
        steps[i] = gaps.pop() if gaps else 1
        changed = True
    if changed:
        for index, values in ((1, starts), (2, ends), (3, places), (4, steps)):
            walk.replace(node, index, values)
    walk.set(node.output[0], axes)


@_rule("Gather")
def _gather(walk: OnnxWalk, node: Any) -> None:
    data, indices = node.input
    axis = _attribute(node, "axis", 0) % len(walk.shape(data))
    chosen = walk.shape(indices)
    old = walk.of(data)
    axes = {i if i < axis else i + len(chosen) - 1: mask for i, mask in old.items() if i != axis}
    if axis in old:
        mask, wanted = old[axis], walk.value(node, 1) % walk.shape(data)[axis]
        ranks = np.cumsum(mask) - 1
        if wanted.ndim > 1 or (wanted.ndim == 0 and not mask[wanted]):
            raise _cannot(node, "it selects a channel that is removed")
        keep = mask[wanted]
        name = f"{node.output[0]}::1"
        walk.constants[name] = np.asarray(ranks[wanted if wanted.ndim == 0 else wanted[keep]], np.int64)
        node.input[1] = name
        if wanted.ndim:
            axes[axis] = keep
    walk.set(node.output[0], axes)


@_rule("Transpose")
def _transpose(walk: OnnxWalk, node: Any) -> None:
    rank = len(walk.shape(node.input[0]))
    order = list(_attribute(node, "perm", range(rank - 1, -1, -1)))
    walk.set(node.output[0], {order.index(axis): mask for axis, mask in walk.of(node.input[0]).items()})


@_rule("Reshape Flatten Squeeze Unsqueeze")
def _reshape(walk: OnnxWalk, node: Any) -> None:
    new = walk.shape(node.output[0])
    axes = reshaped(walk.of(node.input[0]), walk.shape(node.input[0]), new)
    if axes is None:
        raise _cannot(node, "the kept channels do not fit the new shape")
    walk.set(node.output[0], axes)
    if node.op_type == "Reshape":
        walk.replace(node, 1, [walk.count(node.output[0], i) for i in range(len(new))])


@_rule("Expand")
def _expand(walk: OnnxWalk, node: Any) -> None:
    rank = len(walk.shape(node.output[0]))
    shift = rank - len(walk.shape(node.input[0]))
    walk.set(node.output[0], {axis + shift: mask for axis, mask in walk.of(node.input[0]).items()})
    walk.replace(node, 1, [walk.count(node.output[0], i) for i in range(rank)])


_REDUCTIONS = (
    """ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSumExp"""
)


@_rule(_REDUCTIONS)
def _reduce(walk: OnnxWalk, node: Any) -> None:
    rank = len(walk.shape(node.input[0]))
    given = _attribute(node, "axes")
    if given is None:
        given = walk.value(node, 1).tolist() if len(node.input) > 1 and node.input[1] else range(rank)
    gone = {axis % rank for axis in given}
    axes = {axis: mask for axis, mask in walk.of(node.input[0]).items() if axis not in gone}
    if not _attribute(node, "keepdims", 1):
        left = [axis for axis in range(rank) if axis not in gone]
        axes = {left.index(axis): mask for axis, mask in axes.items()}
    walk.set(node.output[0], axes)


@_rule("Resize")
def _resize(walk: OnnxWalk, node: Any) -> None:
    walk.set(node.output[0], walk.of(node.input[0]))
    if len(node.input) > 3 and node.input[3]:
        walk.replace(node, 3, [walk.count(node.output[0], i) for i in range(len(walk.shape(node.output[0])))])


@_rule("Pad")
def _pad(walk: OnnxWalk, node: Any) -> None:
    """Take from ``groups.pads`` which padded channels are kept: that depends on what they are added to later."""
    old, shape = walk.of(node.input[0]), walk.shape(node.input[0])
    pads = walk.value(node, 1).tolist()
    places = walk.value(node, 3).tolist() if len(node.input) > 3 and node.input[3] else list(range(len(shape)))
    axes, half = dict(old), len(places)
    for i, place in enumerate(places):
        axis, amounts = place % len(shape), (pads[i], pads[i + half])
        if not any(amounts):
            continue
        known = walk.pads and (walk.pads[0][0], walk.pads[0][1], len(walk.pads[0][2]) - walk.pads[0][1])
        if known == (len(shape) - 1 - axis, *amounts):
            _, before, mask = walk.pads.pop(0)
            whole = old.get(axis, np.ones(shape[axis], bool))
            axes[axis] = np.concatenate([mask[:before], whole, mask[before:]])
            pads[i], pads[i + half] = int(mask[:before].sum()), int(mask[before:].sum())
        elif axis in old:
            raise _cannot(node, "this padding is not in the channel groups")
    walk.set(node.output[0], axes)
    if pads != walk.value(node, 1).tolist():
        walk.replace(node, 1, pads)
