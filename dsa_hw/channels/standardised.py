"""Weight standardisation: convolutions that normalise their weight in ``forward``.

``conv2d(x, batch_norm(weight.reshape(1, outputs, -1), training=True).reshape_as(weight))``, as in the networks without
normalisation of activations (NFNet), in BiT and in hybrid vision transformers. The statistics of an output are those
over the kept inputs, in the masked network too.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from dsa_hw.channels.trace import Trace, TracedOperation

__all__ = ["Standardised", "standardised_weights"]

_MOVES = frozenset({"view", "reshape", "reshape_as", "view_as", "flatten", "squeeze", "unsqueeze"})


@dataclass(frozen=True, eq=False)
class Standardised:
    """The weight of a convolution, and the scales of its outputs, by their names in the ``state_dict``."""

    weight: str
    scale: str | None
    inside: frozenset[str]
    """Names of the operations that compute the weight."""


def standardised_weights(trace: Trace) -> dict[str, Standardised]:
    """Return the convolutions of a network that standardise their weight, by the name of the operation."""
    operations = {o.name: o for o in trace.operations}
    found = {}
    for operation in trace.operations:
        weight = operation.arguments.get("weight") if operation.kind.startswith("conv") else None
        if isinstance(weight, fx.Node) and (made := _standardised(operations, trace, weight)) is not None:
            found[operation.name] = made
    return found


def _standardised(operations: dict[str, TracedOperation], trace: Trace, weight: fx.Node) -> Standardised | None:
    inside: set[str] = set()
    norm = operations.get(_source(operations, weight, inside).name)
    if norm is None or norm.kind != "batch_norm" or len(norm.node.users) > 1:
        return None
    given = norm.arguments
    if not given["training"] or any(given[n] is not None for n in ("bias", "running_mean", "running_var")):
        return None
    inside.add(norm.name)
    tensor = _source(operations, given["input"], inside)
    outputs = int(weight.meta["val"].shape[0])
    if tensor.name not in trace.tensors or tensor.meta["val"].shape != weight.meta["val"].shape:
        return None
    if tuple(given["input"].meta["val"].shape[:2]) != (1, outputs):
        return None
    scale = None
    if isinstance(given["weight"], fx.Node):
        scale = _source(operations, given["weight"], inside, multiplied=True)
        if scale.name not in trace.tensors or scale.meta["val"].numel() != scale.meta["val"].shape[0] != outputs:
            return None
    name = None if scale is None else trace.tensors[scale.name]
    return Standardised(trace.tensors[tensor.name], name, frozenset(inside))


def _source(
    operations: dict[str, TracedOperation], node: fx.Node, inside: set[str], *, multiplied: bool = False
) -> fx.Node:
    """Follow views (and products with a number) back to what they are made from; add them to ``inside``."""
    while (operation := operations.get(node.name)) is not None and len(node.users) == 1:
        by_number = operation.kind == "mul" and len(node.all_input_nodes) == 1 and multiplied
        if operation.kind not in _MOVES and not by_number:
            break
        inside.add(node.name)
        node = node.all_input_nodes[0]
    return node
