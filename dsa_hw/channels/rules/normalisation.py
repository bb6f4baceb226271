"""Normalisation layers."""

from __future__ import annotations

from dsa_hw.channels.identities import Ids, varying
from dsa_hw.channels.trace import TracedOperation
from dsa_hw.channels.walk import Walk, rule


@rule("batch_norm", "instance_norm")
def batch_norm(walk: Walk, operation: TracedOperation) -> Ids:
    """Record scale, shift and statistics, one of each per channel."""
    value = walk.value(operation.arguments["input"])
    channels = walk.vector(value, 1)
    for name in ("weight", "bias", "running_mean", "running_var"):
        walk.per_channel(operation.arguments[name], channels)
    return value.ids


@rule("layer_norm", "rms_norm")
def layer_norm(walk: Walk, operation: TracedOperation) -> Ids:
    """Record scale and shift per channel; the masked network needs statistics over the kept channels."""
    value = walk.value(operation.arguments["input"])
    count = len(operation.arguments["normalized_shape"])
    axes = range(len(value.shape) - count, len(value.shape))
    inside = [a for a in varying(value.ids) if a in axes]
    weight = operation.arguments["weight"]
    if not inside:
        # The channels are on an outer axis: each has its own statistics, and the scale does not index them.
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
    """Treat each group like a layer norm; the groups must keep equal sizes."""
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
