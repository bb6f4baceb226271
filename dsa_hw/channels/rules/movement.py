"""Operations that only move data: the same move on the identities."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx

from dsa_hw.channels.identities import Ids, compress, fixed, reshape, varying
from dsa_hw.channels.trace import TracedOperation
from dsa_hw.channels.walk import Extent, Pad, Value, Walk, mixed, rule, unknown

__all__ = ["chunks"]


@rule("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
def reshaped(walk: Walk, operation: TracedOperation) -> Ids:
    """Regroup axes without changing the order of the elements."""
    value = walk.value(operation.node.all_input_nodes[0])
    ids = reshape(value.ids, value.shape, walk.shape)
    if operation.kind not in ("flatten", "squeeze", "unsqueeze"):
        for axis in varying(ids):
            walk.extents.append(Extent(operation.module, axis, ids))
    return ids


@rule("permute", "transpose", "swapaxes", "t", "movedim")
def permuted(walk: Walk, operation: TracedOperation) -> Ids:
    """Permute the axes of the identities in the same way."""
    node = operation.node
    ids = walk.value(node.all_input_nodes[0]).ids
    return _as_numpy(node.target, torch.from_numpy(ids.copy()), node)


def _as_numpy(target: Any, tensor: torch.Tensor, node: fx.Node) -> Ids:
    source = node.all_input_nodes[0]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: tensor if n is source else None)
    return target(*args, **kwargs).numpy()


@rule("select")
def select(walk: Walk, operation: TracedOperation) -> Ids:
    """Take one position of an axis."""
    value = walk.value(operation.arguments["self"])
    axis = operation.arguments["dim"] % len(value.shape)
    index = operation.arguments["index"] % value.shape[axis]
    return np.asarray(value.ids.take(index if value.ids.shape[axis] > 1 else 0, axis))


@rule("slice", "narrow")
def sliced(walk: Walk, operation: TracedOperation) -> Ids:
    """Take part of an axis."""
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
    """Expand axes of length 1, which does not change the identities."""
    ids = walk.value(operation.node.all_input_nodes[0]).ids
    return ids.reshape((1,) * (len(walk.shape) - ids.ndim) + ids.shape)


@rule("cat", "concat", "concatenate")
def cat(walk: Walk, operation: TracedOperation) -> Ids:
    """Concatenate the identities of the tensors."""
    arguments = operation.arguments
    values = [v for v in map(walk.value, arguments["tensors"]) if v.shape != (0,)]
    axis = arguments["dim"] % len(walk.shape)
    widest = np.broadcast_shapes(*[(*v.ids.shape[:axis], 1, *v.ids.shape[axis + 1 :]) for v in values])
    parts = [np.broadcast_to(v.ids, (*widest[:axis], v.shape[axis], *widest[axis + 1 :])) for v in values]
    return compress(np.concatenate(parts, axis))


@rule("stack")
def stack(walk: Walk, operation: TracedOperation) -> Ids:
    """Stack the identities of the tensors along a new axis."""
    values = [walk.value(v) for v in operation.arguments["tensors"]]
    axis = operation.arguments["dim"] % len(walk.shape)
    return compress(np.stack(np.broadcast_arrays(*[v.ids for v in values]), axis))


def chunks(walk: Walk, value: Value, count: int, axis: int) -> list[Ids]:
    """Cut an axis into ``count`` equal parts; the i-th channels of all parts are removed together."""
    if value.ids.shape[axis] == 1:
        return [value.ids] * count
    if value.shape[axis] % count:
        walk.ledger.freeze(value.ids, f"{walk.current} splits them into unequal parts")
        bounds = np.cumsum([len(part) for part in np.array_split(np.arange(value.shape[axis]), count)])[:-1]
        return [compress(part) for part in np.split(value.ids, bounds, axis)]
    parts = np.split(value.ids, count, axis)
    walk.ledger.box(np.stack(parts), walk.reason)
    return [compress(part) for part in parts]


@rule("chunk", "split", "split_with_sizes")
def split(walk: Walk, operation: TracedOperation) -> tuple[Ids, ...]:
    """Split an axis; equal parts stay equal, and ``find_groups`` verifies unequal ones."""
    value = walk.value(operation.arguments["self"])
    axis = operation.arguments["dim"] % len(value.shape)
    sizes = [int(meta.shape[axis]) for meta in operation.node.meta["val"]]
    if value.ids.shape[axis] == 1:
        return (value.ids,) * len(sizes)
    if len(set(sizes)) == 1:
        parts = chunks(walk, value, len(sizes), axis)
    else:
        parts = [compress(part) for part in np.split(value.ids, np.cumsum(sizes)[:-1], axis)]
    if operation.kind != "chunk":
        walk.extents.extend(Extent(operation.module, axis, part) for part in parts if part.shape[axis] > 1)
    return tuple(parts)


@rule("unbind")
def unbind(walk: Walk, operation: TracedOperation) -> tuple[Ids, ...]:
    """Take every position of an axis."""
    value = walk.value(operation.arguments["self"])
    axis = operation.arguments["dim"] % len(value.shape)
    full = value.ids.shape[axis] > 1
    return tuple(np.asarray(value.ids.take(i if full else 0, axis)) for i in range(value.shape[axis]))


@rule("pad")
def pad(walk: Walk, operation: TracedOperation) -> Ids:
    """Create channels where an axis of channels is padded (option-A shortcuts); ignore other axes."""
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
    """Index the identities; where the indices are known only at run time, the axis keeps its length."""
    value = walk.value(operation.arguments["self"])
    if (value.ids < 0).all():
        return fixed(len(walk.shape))
    ids, numbers = value.ids, list[Any]()
    for axis, argument in enumerate(operation.arguments["indices"]):
        if argument is None:
            numbers.append(slice(None))
        elif (number := walk.values[argument.name].number) is not None:
            numbers.append(number.numpy())
        elif argument.meta["val"].dtype == torch.bool:
            return unknown(walk, operation)
        else:
            ids = mixed(walk, ids, [axis])
            numbers.append(np.zeros(walk.values[argument.name].shape, np.int64))
    return compress(np.broadcast_to(ids, value.shape)[tuple(numbers)])


@rule("index_select", "gather")
def picked(walk: Walk, operation: TracedOperation) -> Ids:
    """Take positions of an axis that are known at run time only; the axis keeps its length."""
    value = walk.value(operation.arguments["self"])
    return mixed(walk, value.ids, [operation.arguments["dim"] % len(value.shape)])


@rule("roll", "flip", "repeat", "pixel_unshuffle", "unfold", "channel_shuffle")
def moved(walk: Walk, operation: TracedOperation) -> Ids:
    """Apply the operation itself to the identities of every element."""
    node = operation.node
    if len(node.all_input_nodes) != 1:
        return unknown(walk, operation)
    value = walk.value(node.all_input_nodes[0])
    if not varying(value.ids):
        return np.full((1,) * len(walk.shape), value.ids.flat[0])
    if operation.kind == "channel_shuffle":
        chunks(walk, value, operation.arguments["groups"], 1)
    return compress(_as_numpy(node.target, torch.from_numpy(np.broadcast_to(value.ids, value.shape).copy()), node))


@rule("pixel_shuffle")
def pixel_shuffle(walk: Walk, operation: TracedOperation) -> Ids:
    """Join the r * r channels that become one larger channel."""
    value = walk.value(operation.arguments["self"])
    block = operation.arguments["upscale_factor"] ** 2
    ids = walk.vector(value, -3).reshape(-1, block)
    first = walk.ledger.join_along(ids, [1], walk.reason)
    return compress(first.reshape((1,) * (len(value.shape) - 3) + (-1, 1, 1)))
