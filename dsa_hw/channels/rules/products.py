"""Products of two activations: matrix products, einsum, attention."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import fx

from dsa_hw.channels.identities import Ids, fixed
from dsa_hw.channels.rules.elementwise import merge
from dsa_hw.channels.rules.producers import linear_layer
from dsa_hw.channels.trace import TracedOperation
from dsa_hw.channels.walk import Flops, Value, Walk, mixed, rule, unknown


@rule("matmul", "mm", "bmm", "addmm")
def matmul(walk: Walk, operation: TracedOperation) -> Ids:
    """Treat a product with a parameter as a linear layer, any other as a contraction of activations."""
    arguments = operation.arguments
    bias = arguments["self"] if operation.kind == "addmm" else None
    first, second = [a for a in arguments.values() if isinstance(a, fx.Node) and a is not bias]
    right = walk.values[second.name]
    if walk.tensor_name(second) is not None and len(right.shape) == 2 and walk.tensor_name(first) is None:
        return linear_layer(walk, operation, first, second, bias, dim_in=0)
    if bias is not None:
        return unknown(walk, operation)
    a, b = walk.value(first), walk.value(second)
    if len(a.shape) < 2 or len(b.shape) < 2:
        return unknown(walk, operation)
    rank = len(walk.shape)
    letters = "abcdefgh"[: rank - 2]
    left = letters[rank - len(a.shape) :] + "xy"
    other = letters[rank - len(b.shape) :] + "yz"
    return _contract(walk, [(left, a), (other, b)], letters + "xz")


@rule("einsum")
def einsum(walk: Walk, operation: TracedOperation) -> Ids:
    """Contract two activations over the letters that the output does not have."""
    values = [walk.value(v) for v in operation.arguments["tensors"]]
    equation = str(operation.arguments["equation"]).replace(" ", "")
    if "->" not in equation or "." in equation:
        return unknown(walk, operation)
    left, out = equation.split("->")
    subscripts = left.split(",")
    if any(len(set(s)) < len(s) for s in [*subscripts, out]) or len(values) != 2:
        return unknown(walk, operation)
    return _contract(walk, list(zip(subscripts, values, strict=True)), out)


def _contract(walk: Walk, operands: Sequence[tuple[str, Value]], out: str) -> Ids:
    """Join along the letters that are not in ``out``, and join what meets in an element of the output."""
    size = {letter: n for letters, v in operands for letter, n in zip(letters, v.shape, strict=True) if n > 1}
    aligned = []
    for letters, value in operands:
        ids = mixed(walk, value.ids, [i for i, letter in enumerate(letters) if letter not in out])
        order = [letter for letter in out if letter in letters]
        kept = ids.transpose([letters.index(x) for x in order] + [i for i, x in enumerate(letters) if x not in out])
        kept = kept.reshape(kept.shape[: len(order)])
        shape = tuple(value.shape[letters.index(x)] if x in letters else 1 for x in out)
        full = kept.reshape(tuple(kept.shape[order.index(x)] if x in letters else 1 for x in out))
        aligned.append(Value(full, shape))
    result = merge(walk, aligned, [size.get(x, 1) for x in out])
    summed = prod(size.get(x, 1) for x in {x for letters, _ in operands for x in letters} - set(out))
    walk.flops.append(_activation_flops(walk, 2.0 * summed, result, walk.shape))
    return result


def _activation_flops(walk: Walk, per_element: float, ids: Ids, shape: Sequence[int]) -> Flops:
    return Flops(walk.name, per_element * prod(shape) / ids.size, (ids,))


@rule("scaled_dot_product_attention")
def attention(walk: Walk, operation: TracedOperation) -> Ids:
    """Make a head of queries, keys and values one unit: its channels share one softmax.

    FLOPs are those of the two matrix products, q k' and (softmax) v.
    """
    arguments = operation.arguments
    q, k, v = (walk.value(arguments[n]) for n in ("query", "key", "value"))
    heads = [mixed(walk, x.ids, [len(x.shape) - 2, len(x.shape) - 1]) for x in (q, k, v)]
    if any(h.shape != heads[0].shape for h in heads):
        for x in (q, k, v):
            walk.ledger.freeze(x.ids, f"{operation} uses one head of keys for several heads of queries")
        heads = [fixed(len(q.shape))]
    for other in heads[1:]:
        walk.ledger.join(heads[0], other, walk.reason)
    if isinstance(mask := arguments.get("attn_mask"), fx.Node):
        merge(walk, [Value(heads[0], (*q.shape[:-1], k.shape[-2])), walk.value(mask)], (*q.shape[:-1], k.shape[-2]))
    for width in (q.shape[-1], v.shape[-1]):
        walk.flops.append(_activation_flops(walk, 2.0 * width, heads[0], (*q.shape[:-1], k.shape[-2])))
    return walk.ledger.join_along(v.ids, [len(v.shape) - 2], walk.reason)
