"""From identities to sizes as functions of the keep ratios (``Count`` and ``Term``).

Computed on first access, because finding and verifying groups does not need them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch

from dsa_hw.channels.counts import Count, Operation, Term
from dsa_hw.channels.identities import Ids
from dsa_hw.channels.trace import TracedOperation
from dsa_hw.channels.walk import Value, Walk
from dsa_hw.utils.arrays import Bools, Ints

__all__ = ["Cut", "Sizes", "parts"]

_VIEWS = frozenset({
    "view", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "swapaxes", "t", "movedim", "select",
    "slice", "narrow", "expand", "expand_as", "alias", "detach", "chunk", "split", "split_with_sizes", "unbind",
    "getitem", "unfold", "view_as", "dropout", "meshgrid"
})  # fmt: skip
"""Operations that move no data in evaluation mode."""


@dataclass(frozen=True, eq=False)
class Cut:
    """A dimension of a tensor and the removable unit at each of its positions.

    ``units`` indexes the units of all groups, concatenated; the number of units marks what is never removed. ``dim`` is
    None for a tensor that is used element by element; ``units`` then has the shape of the tensor.
    """

    tensor: str
    dim: int | None
    units: Ids
    role: str
    operation: str


@dataclass(frozen=True, eq=False)
class Sizes:
    """Sizes of tensors, operations and memory of one network with channel groups."""

    walk: Walk
    labels: Ids
    """Identity -> label of its component."""
    unit_of_label: Ids
    """Label -> unit, or the number of units for what is never removed; the last entry is for FIXED."""
    sizes: Ints
    """Number of units of each group."""
    cuts: Sequence[Cut]
    shapes: Mapping[str, tuple[int, ...]]
    parameter_names: Sequence[str]

    def units(self, ids: Ids) -> Ids:
        """Return the unit of each identity, in the shape of ``ids``."""
        if not self.labels.size:
            return np.full(ids.shape, int(self.sizes.sum()))
        return self.unit_of_label[np.where(ids >= 0, self.labels[np.maximum(ids, 0)], -1)]

    def count(self, ids: Ids, weight: float = 1.0) -> Count:
        """Return the number of kept entries of ``ids``, times ``weight``."""
        return self._count(self.units(ids), weight)

    def _count(self, units: Ids, weight: float = 1.0) -> Count:
        inside = units[units < self._group_of_unit.size]
        coefficients = np.bincount(self._group_of_unit[inside], minlength=len(self.sizes)).astype(np.float64)
        return Count(weight * (units.size - inside.size), weight * coefficients)

    @cached_property
    def _group_of_unit(self) -> Ints:
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def kept(self, value: Value, axis: int, mask: Bools) -> Bools:
        """Return which positions of an axis are kept, with ``mask`` True for each kept unit."""
        ids = self.walk.known(value).ids
        if ids.shape[axis] == 1:
            return np.ones(value.shape[axis], bool)
        return np.asarray(mask[self.units(ids)].any(axis=tuple(a for a in range(ids.ndim) if a != axis)))

    def shape(self, value: Value, mask: Bools) -> tuple[int, ...]:
        """Return the shape of a tensor in the shrunk network, with ``mask`` True for each kept unit."""
        return tuple(int(self.kept(value, axis, mask).sum()) for axis in range(len(value.shape)))

    def elements(self, value: Value) -> Count:
        """Return the number of elements of an activation."""
        if value.name is not None and not value.ids.size:
            return Count(float(prod(value.shape)), np.zeros(len(self.sizes)))
        return self.count(value.ids, prod(value.shape) / max(value.ids.size, 1))

    @cached_property
    def _dimensions(self) -> dict[str, dict[int | None, Count]]:
        result: dict[str, dict[int | None, Count]] = {}
        for cut in self.cuts:
            result.setdefault(cut.tensor, {})[cut.dim] = self._count(cut.units)
        return result

    def tensor(self, name: str) -> Term:
        """Return the number of elements of a parameter or buffer."""
        factors = self._dimensions.get(name, {})
        if None in factors:  # counted element by element
            return Term(1.0, (factors[None],))
        rest = prod(n for d, n in enumerate(self.shapes[name]) if d not in factors)
        return Term(float(rest), tuple(factors.values()))

    @cached_property
    def parameters(self) -> tuple[Term, ...]:
        """Elements of every parameter, one term each."""
        return tuple(self.tensor(name) for name in self.parameter_names)

    @cached_property
    def operations(self) -> tuple[Operation, ...]:
        """Every operation in execution order."""
        walk = self.walk
        flops: dict[str, list[Term]] = {}
        for work in walk.flops:
            flops.setdefault(work.operation, []).append(Term(work.scale, tuple(self.count(f) for f in work.factors)))
        result = []
        for traced in walk.trace.operations:
            sources = traced.node.all_input_nodes
            weights = [walk.trace.tensors[n.name] for n in sources if n.name in walk.trace.tensors]
            read = [v for n in sources if n.name not in walk.trace.tensors for v in parts(walk.values[n.name])]
            written = parts(walk.values[traced.name])
            outputs = [self.elements(v) for v in written]
            terms = tuple(flops.get(traced.name, ()))
            result.append(
                Operation(
                    name=traced.name,
                    kind=traced.kind,
                    module=traced.module,
                    flops=terms,
                    weights=tuple(self.tensor(name) for name in weights if name in self.shapes),
                    inputs=tuple(self.elements(v) for v in read),
                    output=Count(
                        sum(c.constant for c in outputs),
                        sum((c.coefficients for c in outputs), np.zeros(len(self.sizes))),
                    ),
                    view=_is_view(traced),
                    depthwise=traced.kind.startswith("conv") and any(len(t.factors) == 1 for t in terms),
                    itemsize=written[0].itemsize if written else 4,
                    images=int(written[0].shape[0]) if written and written[0].shape else 1,
                )
            )
        return tuple(result)

    @cached_property
    def liveness(self) -> tuple[tuple[tuple[int, ...], ...], tuple[Term, ...]]:
        """Indices of the activations that are alive during each operation, and the bytes of each activation.

        An activation is freed after its last use; a view keeps the tensor alive that it refers to. Parameters and
        buffers are not activations.
        """
        walk = self.walk
        operations = walk.trace.operations
        storage: list[Term] = []
        owner: dict[str, tuple[int, ...]] = {}
        last: dict[int, int] = {}
        born: dict[int, int] = {}
        for node in walk.trace.inputs:
            owner[node.name] = (len(storage),)
            born[len(storage)] = 0
            value = walk.values[node.name]
            storage.append(Term(float(value.itemsize), (self.elements(value),)))
        for step, operation in enumerate(operations):
            sources = [i for n in operation.node.all_input_nodes for i in owner.get(n.name, ())]
            for index in sources:
                last[index] = step
            if _is_view(operation) or _in_place(operation):
                viewed = operation.node.all_input_nodes[:1] if _in_place(operation) else operation.node.all_input_nodes
                owner[operation.name] = tuple(dict.fromkeys(i for n in viewed for i in owner.get(n.name, ())))
                continue
            made = []
            for value in parts(walk.values[operation.name]):
                made.append(len(storage))
                born[len(storage)] = step
                storage.append(Term(float(value.itemsize), (self.elements(value),)))
            owner[operation.name] = tuple(made)
            for index in made:
                last[index] = step
        for node in walk.trace.outputs:
            for index in owner.get(node.name, ()):
                last[index] = len(operations) - 1
        alive = [
            tuple(i for i in range(len(storage)) if born[i] <= s <= last.get(i, 0)) for s in range(len(operations))
        ]
        return tuple(alive), tuple(storage)


def parts(value: Any) -> tuple[Value, ...]:
    """Return the tensors of an operation with one or several outputs."""
    return tuple(v for v in value if v is not None) if isinstance(value, tuple) else (value,)


def _is_view(operation: TracedOperation) -> bool:
    """Return whether the output shares the memory of the input; for ``reshape`` this depends on the strides."""
    if operation.kind in _VIEWS:
        return True
    if operation.kind not in ("reshape", "flatten", "contiguous", "to", "reshape_as"):
        return False
    before, after = operation.node.all_input_nodes[0].meta["val"], operation.node.meta["val"]
    if operation.kind == "to":
        return bool(before.dtype == after.dtype)
    if operation.kind == "contiguous":
        return bool(before.is_contiguous())
    try:
        torch.empty_strided(before.shape, before.stride(), device="meta").view(after.shape)
    except RuntimeError:
        return False
    return True


def _in_place(operation: TracedOperation) -> bool:
    schema = getattr(operation.node.target, "_schema", None)
    return schema is not None and schema.is_mutable
