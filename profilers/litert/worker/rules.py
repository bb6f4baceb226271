"""Rules for LiteRT operators: how each changes narrowed axes.

Images are NHWC.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from .masks import CannotNarrowError, KeepMask, NarrowedAxes, reshaped
from .walk import TfliteWalk

__all__ = ["visit"]

_Rule = Callable[[TfliteWalk, Any, str], None]
_RULES: dict[str, _Rule] = {}


def _rule(*kinds: str) -> Callable[[_Rule], _Rule]:
    def decorate(function: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(kinds, function))
        return function

    return decorate


def visit(walk: TfliteWalk, operator: Any, kind: str) -> None:
    """Apply the rule of ``kind``; where nothing is narrowed there is nothing to do."""
    narrowed = any(walk.of(i) for i in operator.inputs) or any(walk.cuts(i) for i in operator.inputs)
    if not narrowed and not (kind.startswith("PAD") and walk.pads):
        return
    if kind not in _RULES:
        raise CannotNarrowError(f"{kind} {walk.name(operator)}: this operator is not supported")
    _RULES[kind](walk, operator, kind)


def _same_mask(a: KeepMask | None, b: KeepMask | None) -> bool:
    return (a is None) == (b is None) and (a is None or b is None or np.array_equal(a, b))


def _weight(
    walk: TfliteWalk, operator: Any, kind: str, data: int, bias: int, made: int
) -> tuple[NarrowedAxes, NarrowedAxes]:
    """Narrow weight and bias; return the narrowed axes of data and weight. ``made`` is the axis of output channels."""
    cuts = walk.cuts(operator.inputs[1])
    masks = walk.of(operator.inputs[data])
    if cuts is None:
        raise CannotNarrowError(f"{kind} {walk.name(operator)}: its weight is not a parameter of the network")
    walk.cut(operator, 1, cuts)
    if made in cuts and len(operator.inputs) > bias and operator.inputs[bias] >= 0:
        walk.value(operator, bias, kind)
        walk.cut(operator, bias, {0: cuts[made]})
    return masks, cuts


def _differ(walk: TfliteWalk, operator: Any, kind: str) -> CannotNarrowError:
    return CannotNarrowError(f"{kind} {walk.name(operator)}: its inputs keep different channels")


@_rule("CONV_2D")
def _convolution(walk: TfliteWalk, operator: Any, kind: str) -> None:
    masks, cuts = _weight(walk, operator, kind, 0, 2, 0)
    grouped = walk.shape(operator.inputs[1])[3] != walk.shape(operator.inputs[0])[3]
    if set(masks) - {3} or (not grouped and not _same_mask(masks.get(3), cuts.get(3))):
        raise _differ(walk, operator, kind)
    walk.set(operator.outputs[0], {3: cuts[0]} if 0 in cuts else {})


@_rule("DEPTHWISE_CONV_2D")
def _depthwise(walk: TfliteWalk, operator: Any, kind: str) -> None:
    masks, cuts = _weight(walk, operator, kind, 0, 2, 3)
    each = walk.shape(operator.inputs[1])[3] // walk.shape(operator.inputs[0])[3]
    expected = np.repeat(masks[3], each) if 3 in masks else None
    if set(masks) - {3} or not _same_mask(expected, cuts.get(3)):
        raise _differ(walk, operator, kind)
    walk.set(operator.outputs[0], {3: cuts[3]} if 3 in cuts else {})


@_rule("FULLY_CONNECTED")
def _linear(walk: TfliteWalk, operator: Any, kind: str) -> None:
    masks, cuts = _weight(walk, operator, kind, 0, 2, 0)
    last, rank = len(walk.shape(operator.inputs[0])) - 1, len(walk.shape(operator.outputs[0]))
    if not _same_mask(masks.get(last), cuts.get(1)) or (len(masks) > 1 and rank != last + 1):
        raise _differ(walk, operator, kind)
    kept = {axis: mask for axis, mask in masks.items() if axis != last}
    walk.set(operator.outputs[0], kept | ({rank - 1: cuts[0]} if 0 in cuts else {}))


@_rule("TRANSPOSE_CONV")
def _transposed(walk: TfliteWalk, operator: Any, kind: str) -> None:
    masks, cuts = _weight(walk, operator, kind, 2, 3, 0)
    if set(masks) - {3} or not _same_mask(masks.get(3), cuts.get(3)):
        raise _differ(walk, operator, kind)
    walk.set(operator.outputs[0], {3: cuts[0]} if 0 in cuts else {})
    _write_shape(walk, operator, 0)


def _write_shape(walk: TfliteWalk, operator: Any, position: int) -> None:
    output = operator.outputs[0]
    walk.replace(operator, position, np.asarray([walk.count(output, i) for i in range(len(walk.shape(output)))]))


_SAME = """ABS AVERAGE_POOL_2D CAST CEIL COS DEQUANTIZE ELU EXP FLOOR GELU HARD_SWISH LEAKY_RELU LOG LOGISTIC
MAX_POOL_2D NEG QUANTIZE RELU RELU6 RELU_N1_TO_1 RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR ROUND RSQRT SIGN SIN SQRT
SQUARE TANH"""


@_rule(*_SAME.split())
def _same(walk: TfliteWalk, operator: Any, kind: str) -> None:
    walk.set(operator.outputs[0], walk.of(operator.inputs[0]))


@_rule("SOFTMAX", "LOG_SOFTMAX")
def _softmax(walk: TfliteWalk, operator: Any, kind: str) -> None:
    masks = walk.of(operator.inputs[0])
    if len(walk.shape(operator.inputs[0])) - 1 in masks:
        raise CannotNarrowError(f"{kind} {walk.name(operator)}: it mixes the channels that are removed")
    walk.set(operator.outputs[0], masks)


_PAIRED = """ADD SUB MUL DIV POW MAXIMUM MINIMUM SQUARED_DIFFERENCE FLOOR_DIV FLOOR_MOD PRELU GREATER GREATER_EQUAL LESS
LESS_EQUAL EQUAL NOT_EQUAL LOGICAL_AND LOGICAL_OR SELECT SELECT_V2"""


@_rule(*_PAIRED.split())
def _paired(walk: TfliteWalk, operator: Any, kind: str) -> None:
    """Narrow elementwise operators; a constant that is no parameter follows the other inputs."""
    rank = max(len(walk.shape(i)) for i in operator.inputs)
    masks: NarrowedAxes = {}
    for index in operator.inputs:
        for axis, mask in walk.of(index).items():
            place = axis + rank - len(walk.shape(index))
            if place in masks and not np.array_equal(masks[place], mask):
                raise _differ(walk, operator, kind)
            masks[place] = mask
    for position, index in enumerate(operator.inputs):
        shift, shape = rank - len(walk.shape(index)), walk.shape(index)
        own = {p - shift: mask for p, mask in masks.items() if p >= shift and shape[p - shift] == len(mask)}
        if walk.constant(index) is not None:
            walk.cut(operator, position, own)
        elif own.keys() - walk.of(index).keys():
            raise _differ(walk, operator, kind)
    walk.set(operator.outputs[0], masks)


@_rule("MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD")
def _reduce(walk: TfliteWalk, operator: Any, kind: str) -> None:
    rank = len(walk.shape(operator.inputs[0]))
    gone = {int(axis) % rank for axis in walk.value(operator, 1, kind).reshape(-1)}
    masks = walk.of(operator.inputs[0])
    if kind == "MEAN" and gone & masks.keys():
        raise CannotNarrowError(f"{kind} {walk.name(operator)}: it mixes the channels that are removed")
    masks = {axis: mask for axis, mask in masks.items() if axis not in gone}
    if len(walk.shape(operator.outputs[0])) != rank:
        left = [axis for axis in range(rank) if axis not in gone]
        masks = {left.index(axis): mask for axis, mask in masks.items()}
    walk.set(operator.outputs[0], masks)


@_rule("RESHAPE", "SQUEEZE", "EXPAND_DIMS")
def _reshape(walk: TfliteWalk, operator: Any, kind: str) -> None:
    source, output = operator.inputs[0], operator.outputs[0]
    masks = reshaped(walk.of(source), walk.shape(source), walk.shape(output))
    if masks is None:
        raise CannotNarrowError(f"{kind} {walk.name(operator)}: the kept channels do not fit the new shape")
    walk.set(output, masks)
    if kind == "RESHAPE":
        if len(operator.inputs) > 1:
            _write_shape(walk, operator, 1)
        if getattr(operator.builtinOptions, "newShape", None) is not None:
            operator.builtinOptions = copy.copy(operator.builtinOptions)
            operator.builtinOptions.newShape = [walk.count(output, i) for i in range(len(walk.shape(output)))]


@_rule("TRANSPOSE")
def _transpose(walk: TfliteWalk, operator: Any, kind: str) -> None:
    order = walk.value(operator, 1, kind).tolist()
    walk.set(operator.outputs[0], {order.index(axis): mask for axis, mask in walk.of(operator.inputs[0]).items()})


@_rule("BROADCAST_TO")
def _broadcast(walk: TfliteWalk, operator: Any, kind: str) -> None:
    shift = len(walk.shape(operator.outputs[0])) - len(walk.shape(operator.inputs[0]))
    walk.set(operator.outputs[0], {axis + shift: mask for axis, mask in walk.of(operator.inputs[0]).items()})
    _write_shape(walk, operator, 1)


@_rule("CONCATENATION")
def _concatenation(walk: TfliteWalk, operator: Any, kind: str) -> None:
    axis = operator.builtinOptions.axis % len(walk.shape(operator.inputs[0]))
    others = [{a: mask for a, mask in walk.of(i).items() if a != axis} for i in operator.inputs]
    if any(o.keys() != others[0].keys() or any(not np.array_equal(o[a], others[0][a]) for a in o) for o in others):
        raise _differ(walk, operator, kind)
    parts = [walk.of(i).get(axis, np.ones(walk.shape(i)[axis], bool)) for i in operator.inputs]
    walk.set(operator.outputs[0], {**others[0], axis: np.concatenate(parts)})


@_rule("SPLIT", "SPLIT_V")
def _split(walk: TfliteWalk, operator: Any, kind: str) -> None:
    source = operator.inputs[1 if kind == "SPLIT" else 0]
    axis = int(walk.value(operator, 0 if kind == "SPLIT" else 2, kind).reshape(-1)[0]) % len(walk.shape(source))
    masks = walk.of(source)
    start = 0
    for index in operator.outputs:
        length = walk.shape(index)[axis]
        part = {axis: masks[axis][start : start + length]} if axis in masks else {}
        walk.set(index, {**masks, **part})
        start += length
    sizes = [walk.count(index, axis) for index in operator.outputs]
    if kind == "SPLIT_V":
        walk.replace(operator, 1, np.asarray(sizes))
    elif len(set(sizes)) > 1:
        raise CannotNarrowError(f"{kind} {walk.name(operator)}: its parts keep different numbers of channels, {sizes}")


@_rule("SLICE", "STRIDED_SLICE")
def _slice(walk: TfliteWalk, operator: Any, kind: str) -> None:
    """Give narrowed axes new bounds, counted among the kept indices; other axes do not change."""
    source = operator.inputs[0]
    shape, masks = walk.shape(source), dict(walk.of(source))
    first, second = (walk.value(operator, i, kind).tolist() for i in (1, 2))
    steps = walk.value(operator, 3, kind).tolist() if kind == "STRIDED_SLICE" else [1] * len(shape)
    options = operator.builtinOptions
    if kind == "STRIDED_SLICE" and (options.ellipsisMask or options.newAxisMask or options.shrinkAxisMask):
        raise CannotNarrowError(f"{kind} {walk.name(operator)}: masks that change the rank are not supported")
    for axis, mask in list(masks.items()):
        if kind == "SLICE":
            end = shape[axis] if second[axis] < 0 else first[axis] + second[axis]
            chosen = np.arange(shape[axis])[first[axis] : end]
        else:
            begin = None if options.beginMask >> axis & 1 else first[axis]
            end = None if options.endMask >> axis & 1 else second[axis]
            chosen = np.arange(shape[axis])[begin : end : steps[axis]]
        ranks = (np.cumsum(mask) - 1)[chosen[mask[chosen]]]
        gaps = set(np.diff(ranks).tolist()) or {1}
        if not len(ranks) or len(gaps) > 1 or min(gaps) < 1 or (kind == "SLICE" and gaps != {1}):
            raise CannotNarrowError(f"{kind} {walk.name(operator)}: the kept channels are not evenly spaced")
        masks[axis] = mask[chosen]
        first[axis] = int(ranks[0])
        second[axis] = len(ranks) if kind == "SLICE" else int(ranks[-1]) + 1
        steps[axis] = gaps.pop()
    walk.set(operator.outputs[0], masks)
    walk.replace(operator, 1, np.asarray(first))
    walk.replace(operator, 2, np.asarray(second))
    if kind == "STRIDED_SLICE":
        walk.replace(operator, 3, np.asarray(steps))
        operator.builtinOptions = copy.copy(options)
        narrowed = sum(1 << axis for axis in walk.of(source))
        operator.builtinOptions.beginMask &= ~narrowed
        operator.builtinOptions.endMask &= ~narrowed


@_rule("GATHER")
def _gather(walk: TfliteWalk, operator: Any, kind: str) -> None:
    source = operator.inputs[0]
    axis, masks = operator.builtinOptions.axis % len(walk.shape(source)), walk.of(source)
    wanted = walk.value(operator, 1, kind)
    if wanted.ndim != 1 or operator.builtinOptions.batchDims:
        raise CannotNarrowError(f"{kind} {walk.name(operator)}: only a list of indices is supported")
    if axis in masks:
        keep = masks[axis][wanted]
        walk.replace(operator, 1, (np.cumsum(masks[axis]) - 1)[wanted[keep]])
        masks = {**masks, axis: keep}
    walk.set(operator.outputs[0], masks)


@_rule("BATCH_MATMUL")
def _matmul(walk: TfliteWalk, operator: Any, kind: str) -> None:
    options, masks = operator.builtinOptions, dict[int, KeepMask]()
    summed = []
    for index, turned, inner in zip(operator.inputs, (options.adjX, options.adjY), (-1, -2), strict=True):
        rank = len(walk.shape(index))
        axes = [*range(rank - 2), rank - 1, rank - 2] if turned else list(range(rank))
        own = {axes.index(axis): mask for axis, mask in walk.of(index).items()}
        summed.append(own.pop(rank + inner, None))
        masks |= own
    if not _same_mask(*summed):
        raise _differ(walk, operator, kind)
    walk.set(operator.outputs[0], masks)


@_rule("PAD", "PADV2", "MIRROR_PAD")
def _pad(walk: TfliteWalk, operator: Any, kind: str) -> None:
    """Take from ``walk.pads`` which padded channels are kept: that depends on what they are added to later."""
    source = operator.inputs[0]
    shape, masks, amounts = walk.shape(source), dict(walk.of(source)), walk.value(operator, 1, kind).copy()
    for axis in range(len(shape)):
        before, after = (int(n) for n in amounts[axis])
        if not before and not after:
            continue
        whole = masks.get(axis, np.ones(shape[axis], bool))
        last = axis == len(shape) - 1
        if last and walk.pads and (walk.pads[0][0], len(walk.pads[0][1]) - before) == (before, after):
            mask = walk.pads.pop(0)[1]
            masks[axis] = np.concatenate([mask[:before], whole, mask[before:]])
            amounts[axis] = int(mask[:before].sum()), int(mask[before:].sum())
        elif axis in masks:
            raise CannotNarrowError(f"{kind} {walk.name(operator)}: this padding is not in the channel groups")
    walk.set(operator.outputs[0], masks)
    if not np.array_equal(amounts, walk.value(operator, 1, kind)):
        walk.replace(operator, 1, amounts)
