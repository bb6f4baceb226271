"""Element-wise operations, and operations that pass channels on or create none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dsa_hw.channels.identities import Ids, compress, fixed, varying
from dsa_hw.channels.rules.movement import chunks
from dsa_hw.channels.trace import TracedOperation
from dsa_hw.channels.walk import Value, Walk, rule

__all__ = ["merge", "pointwise", "whole_lines"]


@rule("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "hardswish", "copy", "where")
def pointwise(walk: Walk, operation: TracedOperation) -> Ids:
    """Join the channels that meet in an element (element-wise operations with broadcasting)."""
    return merge(walk, [walk.value(node) for node in operation.node.all_input_nodes], walk.shape)


def merge(walk: Walk, values: Sequence[Value], shape: Sequence[int]) -> Ids:
    """Return the identities of an element-wise combination of ``values``, broadcast to ``shape``."""
    rank = len(shape)
    parts = [
        (v.ids.reshape((1,) * (rank - v.ids.ndim) + v.ids.shape), (1,) * (rank - len(v.shape)) + v.shape)
        for v in values
    ]
    axes = {axis for ids, _ in parts for axis in varying(ids)}
    widest = max((varying(ids) for ids, _ in parts), key=len)
    result = fixed(rank)
    other = next(ids for ids, _ in parts if varying(ids) == widest)
    for i in reversed(range(len(parts))):
        ids, extent = parts[i]
        if values[i].name and 0 < len(varying(ids)) < len(widest) and any(extent[a] == 1 for a in widest):
            # One parameter for all heads (the norm of queries and keys), or one for all tokens: known after the walk.
            walk.ledger.broadcast(ids, other, walk.reason)
            del parts[i]
    for ids, extent in parts:
        whole = not any(extent[axis] == 1 < shape[axis] for axis in axes)
        if not varying(ids) and not whole:
            # One value for many channels (a spatial attention map) is needed as long as any of them is kept.
            walk.ledger.freeze(ids, f"{walk.current} broadcasts it over other channels")
        elif (ids >= 0).any():
            if (result >= 0).any():
                walk.ledger.join(result, ids, walk.reason)
            result = np.where(*np.broadcast_arrays(result >= 0, result, ids))
    for ids, extent in parts:
        # A tensor without identities that has an axis at full length fixes the length of that axis.
        if (ids < 0).all() and (full := [axis for axis in axes if extent[axis] > 1]):
            whole_lines(walk, result, full)
    return compress(result)


def whole_lines(walk: Walk, ids: Ids, axes: Sequence[int]) -> None:
    """Keep the length of ``axes``: remove only whole lines along them (heads, where it is the width of a head)."""
    if set(varying(ids)) <= set(axes):
        walk.ledger.freeze(ids, walk.reason)
    walk.ledger.join_along(ids, axes, walk.reason)


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
    "full_like",
)
def same(walk: Walk, operation: TracedOperation) -> Any:
    """Pass on the channels of the first argument; ``zeros_like`` and the like follow its shape."""
    return walk.value(operation.node.all_input_nodes[0]).ids


@rule("_assert_tensor_metadata")
def nothing(walk: Walk, operation: TracedOperation) -> None:
    """Do nothing for a check that ``torch.export`` inserts; it has no output."""


@rule("prelu")
def prelu(walk: Walk, operation: TracedOperation) -> Ids:
    """Record one slope per channel (axis 1); a single slope for all channels is not affected."""
    value = walk.value(operation.arguments["self"])
    weight = operation.arguments["weight"]
    slopes = int(weight.meta["val"].numel())
    if slopes > 1:
        walk.per_channel(weight, walk.vector(value, 1))
    return value.ids


@rule("glu")
def glu(walk: Walk, operation: TracedOperation) -> Ids:
    """Join the two halves: the first is multiplied by the sigmoid of the second."""
    value = walk.value(operation.arguments["self"])
    axis = operation.arguments["dim"] % len(value.shape)
    a, b = chunks(walk, value, 2, axis)
    return merge(walk, [Value(a, walk.shape), Value(b, walk.shape)], walk.shape)


@rule("getitem")
def getitem(walk: Walk, operation: TracedOperation) -> Any:
    """Take one tensor of an operation with several outputs."""
    return walk.values[operation.arguments["input"].name][operation.arguments["index"]]


@rule("zeros", "ones", "full", "arange", "linspace", "meshgrid", "new_zeros", "new_ones", "new_full")
def constant(walk: Walk, operation: TracedOperation) -> Any:
    """Return fixed identities: a tensor that is created here has no removable channels."""
    meta = operation.node.meta.get("val")
    if isinstance(meta, (tuple, list)):
        return tuple(fixed(m.ndim) for m in meta)
    return fixed(meta.ndim if isinstance(meta, torch.Tensor) else 0)
