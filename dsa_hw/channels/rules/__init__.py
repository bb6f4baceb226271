"""What each operation does to channel identities: one function per kind of operation, registered by name.

A rule gets the walk (ledger and values) and the operation. It returns the identities of the output and records which
dimensions of which tensors the channels index, what must be removed together, and what counts as FLOPs. An operation
without a rule freezes the channels that reach it and is reported; nothing is guessed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dsa_hw.channels.identities import fixed, varying
from dsa_hw.channels.rules import elementwise, movement, normalisation, producers, products, recurrent, reduction
from dsa_hw.channels.trace import TracedOperation
from dsa_hw.channels.walk import LARGEST_FREE_TENSOR, RULES, Value, Walk, unknown

__all__ = ["elementwise", "movement", "normalisation", "producers", "products", "recurrent", "reduction", "run"]


def run(walk: Walk, operation: TracedOperation) -> None:
    """Apply the rule for ``operation`` and store the identities of its output in ``walk.values``."""
    walk.current = operation
    node = operation.node
    target_tags = getattr(node.target, "tags", ())
    function = RULES.get(operation.kind)
    if function is None and torch.Tag.pointwise in target_tags:
        function = elementwise.pointwise
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
    """Compute the result where all arguments are known at trace time (arithmetic on index tables)."""
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
