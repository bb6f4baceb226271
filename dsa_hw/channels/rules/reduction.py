"""Pooling and resizing within channels, reductions and softmax over an axis."""

from __future__ import annotations

from typing import Any

import torch

from dsa_hw.channels.identities import fixed, varying
from dsa_hw.channels.rules import elementwise
from dsa_hw.channels.trace import TracedOperation
from dsa_hw.channels.walk import Mean, Walk, mixed, rule


@rule(*[f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)])
@rule("max_pool2d_with_indices", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_bicubic2d")
@rule("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_trilinear3d")
def spatial(walk: Walk, operation: TracedOperation) -> Any:
    """Pass on the channels: pooling and resizing work within each of them."""
    value = walk.value(operation.node.all_input_nodes[0])
    last = next(n for n in (1, 2, 3) if f"{n}d" in operation.kind)
    axes = range(len(value.shape) - last, len(value.shape))
    ids = walk.ledger.join_along(value.ids, list(axes), walk.reason)
    meta = operation.node.meta["val"]
    return ids if isinstance(meta, torch.Tensor) else (ids,) * len(meta)


@rule("mean", "sum", "amax", "amin", "max", "min", "var", "std", "linalg_vector_norm")
def reduction(walk: Walk, operation: TracedOperation) -> Any:
    """Join the channels along the reduced axes; a mean over all channels is one over the kept ones."""
    if "other" in operation.arguments:  # the smaller or larger of two tensors
        return elementwise.pointwise(walk, operation)
    value = walk.value(operation.node.all_input_nodes[0])
    rank = len(value.shape)
    dims = operation.arguments.get("dim")
    if dims is None or dims == []:
        dims = list(range(rank))
    axes = sorted({d % rank for d in ([dims] if isinstance(dims, int) else dims)})
    if operation.kind == "mean" and varying(value.ids) == tuple(axes):
        walk.means.append(Mean(operation, axes[0], value.ids.ravel()))
        ids = fixed(rank)
    else:
        ids = mixed(walk, value.ids, axes)
    if not operation.arguments.get("keepdim", False):
        ids = ids.reshape([n for axis, n in enumerate(ids.shape) if axis not in axes])
    meta = operation.node.meta["val"]
    return ids if isinstance(meta, torch.Tensor) else (ids,) * len(meta)


@rule("softmax", "log_softmax")
def along(walk: Walk, operation: TracedOperation) -> Any:
    """Join the channels along one axis, which keeps its length."""
    value = walk.value(operation.node.all_input_nodes[0])
    mixed(walk, value.ids, [operation.arguments["dim"] % len(value.shape)])
    return value.ids
