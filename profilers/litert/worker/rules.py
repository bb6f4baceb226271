"""What each LiteRT operator does to narrowed axes: one small registered function each. Images are NHWC."""

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
        raise CannotNarrowError(f"{kind} {walk.name(operator)}: this operator is not understood")
    _RULES[kind](walk, operator, kind)


def _same_line(a: KeepMask | None, b: KeepMask | None) -> bool:
    return (a is None) == (b is None) and (a is None or b is None or np.array_equal(a, b))


def _weight(
    walk: TfliteWalk, operator: Any, kind: str, data: int, bias: int, made: int
) -> tuple[NarrowedAxes, NarrowedAxes]:
    """Narrow weight (input 1) and bias; the lines of the data and of the weight. ``made``: axis of output channels."""
    cuts = walk.cuts(operator.inputs[1])
    lines = walk.of(operator.inputs[data])
    if cuts is None:
        raise CannotNarrowError(f"{kind} {walk.name(operator)}: its weight is not a parameter of the network")
    walk.cut(operator, 1, cuts)
    if made in cuts and len(operator.inputs) > bias and operator.inputs[bias] >= 0:
        walk.value(operator, bias, kind)
        walk.cut(operator, bias, {0: cuts[made]})
    return lines, cuts


def _differ(walk: TfliteWalk, operator: Any, kind: str) -> CannotNarrowError:
    return CannotNarrowError(f"{kind} {walk.name(operator)}: its inputs keep different channels")


@_rule("CONV_2D")
def _convolution(walk: TfliteWalk, operator: Any, kind: str) -> None:
    lines, cuts = _weight(walk, operator, kind, 0, 2, 0)
    grouped = walk.shape(operator.inputs[1])[3] != walk.shape(operator.inputs[0])[3]
    if set(lines) - {3} or (not grouped and not _same_line(lines.get(3), cuts.get(3))):
        raise _differ(walk, operator, kind)
    walk.set(operator.outputs[0], {3: cuts[0]} if 0 in cuts else {})


@_rule("DEPTHWISE_CONV_2D")
def _depthwise(walk: TfliteWalk, operator: Any, kind: str) -> None:
    lines, cuts = _weight(walk, operator, kind, 0, 2, 3)
    each = walk.shape(operator.inputs[1])[3] // walk.shape(operator.inputs[0])[3]
    expected = np.repeat(lines[3], each) if 3 in lines else None
    if set(lines) - {3} or not _same_line(expected, cuts.get(3)):
        raise _differ(walk, operator, kind)
    walk.set(operator.outputs[0], {3: cuts[3]} if 3 in cuts else {})


@_rule("FULLY_CONNECTED")
def _linear(walk: TfliteWalk, operator: Any, kind: str) -> None:
    lines, cuts = _weight(walk, operator, kind, 0, 2, 0)
    last, rank = len(walk.shape(operator.inputs[0])) - 1, len(walk.shape(operator.outputs[0]))
    if not _same_line(lines.get(last), cuts.get(1)) or (len(lines) > 1 and rank != last + 1):
        raise _differ(walk, operator, kind)
    kept = {axis: line for axis, line in lines.items() if axis != last}
    walk.set(operator.outputs[0], kept | ({rank - 1: cuts[0]} if 0 in cuts else {}))


@_rule("TRANSPOSE_CONV")
def _transposed(walk: TfliteWalk, operator: Any, kind: str) -> None:
    lines, cuts = _weight(walk, operator, kind, 2, 3, 0)
    if set(lines) - {3} or not _same_line(lines.get(3), cuts.get(3)):
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
    lines = walk.of(operator.inputs[0])
    if len(walk.shape(operator.inputs[0])) - 1 in lines:
        raise CannotNarrowError(f"{kind} {walk.name(operator)}: it mixes the channels that are removed")
    walk.set(operator.outputs[0], lines)


_PAIRED = """ADD SUB MUL DIV POW MAXIMUM MINIMUM SQUARED_DIFFERENCE FLOOR_DIV FLOOR_MOD PRELU GREATER GREATER_EQUAL LESS
LESS_EQUAL EQUAL NOT_EQUAL LOGICAL_AND LOGICAL_OR SELECT SELECT_V2"""


@_rule(*_PAIRED.split())
def _paired(walk: TfliteWalk, operator: Any, kind: str) -> None:
    """Element by element; a constant without a name in the network follows what it meets."""
    rank = max(len(walk.shape(i)) for i in operator.inputs)
    lines: NarrowedAxes = {}
    for index in operator.inputs:
        for axis, line in walk.of(index).items():
            place = axis + rank - len(walk.shape(index))
            if place in lines and not np.array_equal(lines[place], line):
                raise _differ(walk, operator, kind)
            lines[place] = line
    for position, index in enumerate(operator.inputs):
        shift, shape = rank - len(walk.shape(index)), walk.shape(index)
        own = {p - shift: line for p, line in lines.items() if p >= shift and shape[p - shift] == len(line)}
        if walk.constant(index) is not None:
            walk.cut(operator, position, own)
        elif own.keys() - walk.of(index).keys():
            raise _differ(walk, operator, kind)
    walk.set(operator.outputs[0], lines)


@_rule("MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD")
def _reduce(walk: TfliteWalk, operator: Any, kind: str) -> None:
    rank = len(walk.shape(operator.inputs[0]))
    gone = {int(axis) % rank for axis in walk.value(operator, 1, kind).reshape(-1)}
    lines = walk.of(operator.inputs[0])
    if kind == "MEAN" and gone & lines.keys():
        raise CannotNarrowError(f"{kind} {walk.name(operator)}: it mixes the channels that are removed")
    lines = {axis: line for axis, line in lines.items() if axis not in gone}
    if len(walk.shape(operator.outputs[0])) != rank:
        left = [axis for axis in range(rank) if axis not in gone]
        lines = {left.index(axis): line for axis, line in lines.items()}
    walk.set(operator.outputs[0], lines)


@_rule("RESHAPE", "SQUEEZE", "EXPAND_DIMS")
def _reshape(walk: TfliteWalk, operator: Any, kind: str) -> None:
    source, output = operator.inputs[0], operator.outputs[0]
    lines = reshaped(walk.of(source), walk.shape(source), walk.shape(output))
    if lines is None:
        raise CannotNarrowError(f"{kind} {walk.name(operator)}: what is kept does not fit the new shape")
    walk.set(output, lines)
    if kind == "RESHAPE":
        if len(operator.inputs) > 1:
            _write_shape(walk, operator, 1)
        if getattr(operator.builtinOptions, "newShape", None) is not None:
            operator.builtinOptions = copy.copy(operator.builtinOptions)
            operator.builtinOptions.newShape = [walk.count(output, i) for i in range(len(walk.shape(output)))]


@_rule("TRANSPOSE")
def _transpose(walk: TfliteWalk, operator: Any, kind: str) -> None:
    order = walk.value(operator, 1, kind).tolist()
    walk.set(operator.outputs[0], {order.index(axis): line for axis, line in walk.of(operator.inputs[0]).items()})


@_rule("BROADCAST_TO")
def _broadcast(walk: TfliteWalk, operator: Any, kind: str) -> None:
    shift = len(walk.shape(operator.outputs[0])) - len(walk.shape(operator.inputs[0]))
    walk.set(operator.outputs[0], {axis + shift: line for axis, line in walk.of(operator.inputs[0]).items()})
    _write_shape(walk, operator, 1)


@_rule("CONCATENATION")
def _concatenation(walk: TfliteWalk, operator: Any, kind: str) -> None:
    axis = operator.builtinOptions.axis % len(walk.shape(operator.inputs[0]))
    others = [{a: line for a, line in walk.of(i).items() if a != axis} for i in operator.inputs]
    if any(o.keys() != others[0].keys() or any(not np.array_equal(o[a], others[0][a]) for a in o) for o in others):
        raise _differ(walk, operator, kind)
    parts = [walk.of(i).get(axis, np.ones(walk.shape(i)[axis], bool)) for i in operator.inputs]
    walk.set(operator.outputs[0], {**others[0], axis: np.concatenate(parts)})


@_rule("SPLIT", "SPLIT_V")
def _split(walk: TfliteWalk, operator: Any, kind: str) -> None:
    source = operator.inputs[1 if kind == "SPLIT" else 0]
    axis = int(walk.value(operator, 0 if kind == "SPLIT" else 2, kind).reshape(-1)[0]) % len(walk.shape(source))
    lines = walk.of(source)
    start = 0
    for index in operator.outputs:
        length = walk.shape(index)[axis]
        part = {axis: lines[axis][start : start + length]} if axis in lines else {}
        walk.set(index, {**lines, **part})
        start += length
    sizes = [walk.count(index, axis) for index in operator.outputs]
    if kind == "SPLIT_V":
        walk.replace(operator, 1, np.asarray(sizes))
    elif len(set(sizes)) > 1:
        raise CannotNarrowError(f"{kind} {walk.name(operator)}: its parts keep different numbers of channels, {sizes}")


@_rule("SLICE", "STRIDED_SLICE")
def _slice(walk: TfliteWalk, operator: Any, kind: str) -> None:
    """Axes that are narrowed get new bounds, in ranks among the kept; all others stay."""
    source = operator.inputs[0]
    shape, lines = walk.shape(source), dict(walk.of(source))
    first, second = (walk.value(operator, i, kind).tolist() for i in (1, 2))
    steps = walk.value(operator, 3, kind).tolist() if kind == "STRIDED_SLICE" else [1] * len(shape)
    masks = operator.builtinOptions
    if kind == "STRIDED_SLICE" and (masks.ellipsisMask or masks.newAxisMask or masks.shrinkAxisMask):
        raise CannotNarrowError(f"{kind} {walk.name(operator)}: masks that change the rank are not understood")
    for axis, line in list(lines.items()):
        if kind == "SLICE":
            end = shape[axis] if second[axis] < 0 else first[axis] + second[axis]
            chosen = np.arange(shape[axis])[first[axis] : end]
        else:
            begin = None if masks.beginMask >> axis & 1 else first[axis]
            end = None if masks.endMask >> axis & 1 else second[axis]
            chosen = np.arange(shape[axis])[begin : end : steps[axis]]
        ranks = (np.cumsum(line) - 1)[chosen[line[chosen]]]
        gaps = set(np.diff(ranks).tolist()) or {1}
        if not len(ranks) or len(gaps) > 1 or min(gaps) < 1 or (kind == "SLICE" and gaps != {1}):
            raise CannotNarrowError(f"{kind} {walk.name(operator)}: what is kept of it is not a slice any more")
        lines[axis] = line[chosen]
        first[axis] = int(ranks[0])
        second[axis] = len(ranks) if kind == "SLICE" else int(ranks[-1]) + 1
        steps[axis] = gaps.pop()
    walk.set(operator.outputs[0], lines)
    walk.replace(operator, 1, np.asarray(first))
    walk.replace(operator, 2, np.asarray(second))
    if kind == "STRIDED_SLICE":
        walk.replace(operator, 3, np.asarray(steps))
        operator.builtinOptions = copy.copy(masks)
        narrowed = sum(1 << axis for axis in walk.of(source))
        operator.builtinOptions.beginMask &= ~narrowed
        operator.builtinOptions.endMask &= ~narrowed


@_rule("GATHER")
def _gather(walk: TfliteWalk, operator: Any, kind: str) -> None:
    source = operator.inputs[0]
    axis, lines = operator.builtinOptions.axis % len(walk.shape(source)), walk.of(source)
    wanted = walk.value(operator, 1, kind)
    if wanted.ndim != 1 or operator.builtinOptions.batchDims:
        raise CannotNarrowError(f"{kind} {walk.name(operator)}: only a list of indices is understood")
    if axis in lines:
        keep = lines[axis][wanted]
        walk.replace(operator, 1, (np.cumsum(lines[axis]) - 1)[wanted[keep]])
        lines = {**lines, axis: keep}
    walk.set(operator.outputs[0], lines)


@_rule("BATCH_MATMUL")
def _matmul(walk: TfliteWalk, operator: Any, kind: str) -> None:
    options, lines = operator.builtinOptions, dict[int, KeepMask]()
    summed = []
    for index, turned, inner in zip(operator.inputs, (options.adjX, options.adjY), (-1, -2), strict=True):
        rank = len(walk.shape(index))
        axes = [*range(rank - 2), rank - 1, rank - 2] if turned else list(range(rank))
        own = {axes.index(axis): line for axis, line in walk.of(index).items()}
        summed.append(own.pop(rank + inner, None))
        lines |= own
    if not _same_line(*summed):
        raise _differ(walk, operator, kind)
    walk.set(operator.outputs[0], lines)


@_rule("PAD", "PADV2", "MIRROR_PAD")
def _pad(walk: TfliteWalk, operator: Any, kind: str) -> None:
    """Padding adds channels that no operation made; which of them stay was decided by what they are added to."""
    source = operator.inputs[0]
    shape, lines, amounts = walk.shape(source), dict(walk.of(source)), walk.value(operator, 1, kind).copy()
    for axis in range(len(shape)):
        before, after = (int(n) for n in amounts[axis])
        if not before and not after:
            continue
        whole = lines.get(axis, np.ones(shape[axis], bool))
        last = axis == len(shape) - 1
        if last and walk.pads and (walk.pads[0][0], len(walk.pads[0][1]) - before) == (before, after):
            line = walk.pads.pop(0)[1]
            lines[axis] = np.concatenate([line[:before], whole, line[before:]])
            amounts[axis] = int(line[:before].sum()), int(line[before:].sum())
        elif axis in lines:
            raise CannotNarrowError(f"{kind} {walk.name(operator)}: the channel groups do not know this padding")
    walk.set(operator.outputs[0], lines)
    if not np.array_equal(amounts, walk.value(operator, 1, kind)):
        walk.replace(operator, 1, amounts)
