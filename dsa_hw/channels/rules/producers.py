"""Layers that create channels: convolution, linear, embedding."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from dsa_hw.channels.identities import FIXED, Ids, fixed, varying
from dsa_hw.channels.trace import TracedOperation
from dsa_hw.channels.walk import Flops, Walk, rule, unknown

__all__ = ["linear_layer"]


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(walk: Walk, operation: TracedOperation) -> Ids:
    """Create the output channels of a dense, grouped or depthwise convolution, transposed or not.

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
    name, reading = walk.tensor_name(weight), "in"
    if (standardised := walk.standardised.get(operation.name)) is not None:
        name, reading = standardised.weight, "standardised"
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
        ledger.slot(name, dim_in, incoming, reading, walk.name)
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
            ledger.slot(name, 1, first_in, reading, walk.name)
            outgoing = ledger.made(name, 0, outgoing_count, "out", walk.name)
            ledger.join_along(outgoing.reshape(groups, -1), [0], walk.reason)
            factors = (outgoing, first_in)
    walk.flops.append(Flops(walk.name, scale, factors))
    walk.per_channel(arguments["bias"], outgoing)
    if standardised is not None and standardised.scale is not None:
        ledger.slot(standardised.scale, 0, outgoing, "per", walk.name)
    return outgoing.reshape((1,) * axis + (-1,) + (1,) * rank)


@rule("linear")
def linear(walk: Walk, operation: TracedOperation) -> Ids:
    """Sum over the last axis; weights are (out, in)."""
    arguments = operation.arguments
    return linear_layer(walk, operation, arguments["input"], arguments["weight"], arguments["bias"], dim_in=1)


def linear_layer(walk: Walk, operation: TracedOperation, source: Any, weight: Any, bias: Any, dim_in: int) -> Ids:
    """Create the outputs of a matrix product with a parameter that has its inputs on dimension ``dim_in``.

    Where the channels are on another axis (a layer that mixes tokens), each channel is treated alike: they pass on, and
    the weights stay whole.
    """
    value = walk.value(source)
    name = walk.tensor_name(weight)
    if varying(value.ids) and value.ids.shape[-1] == 1 and name is not None:
        for dim, size in ((dim_in, value.shape[-1]), (1 - dim_in, walk.shape[-1])):
            walk.ledger.slot(name, dim, np.full(size, FIXED), "per", walk.name)
        walk.per_channel(bias, np.full(walk.shape[-1], FIXED))
        walk.flops.append(Flops(walk.name, 2.0 * walk.shape[-1] * prod(value.shape) / value.ids.size, (value.ids,)))
        return value.ids
    incoming = walk.vector(value, -1)
    rank = len(walk.shape)
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
    """Make the columns of the table channels; its rows (the words) stay."""
    name = walk.tensor_name(operation.arguments["weight"])
    if name is None:
        return unknown(walk, operation)
    ids = walk.ledger.made(name, 1, walk.shape[-1], "out", walk.name)
    return ids.reshape((1,) * (len(walk.shape) - 1) + (-1,))
