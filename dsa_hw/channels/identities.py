"""Channel identities: which removable thing sits where in a tensor.

Every tensor of the traced network carries an integer array of its own rank, in which an axis is either full length or
1 (the same everywhere along it). Broadcast to the tensor's shape it says for each element which identity the element
belongs to; ``FIXED`` (-1) marks what can never be removed. Moving data is then the same move on the integers, and
whatever forces channels to be removed together is an edge between identities. At the end, the connected components
are the units that can be removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

__all__ = ["FIXED", "Ids", "Ledger", "Use", "compress", "fixed", "reshape", "varying"]

Ids = NDArray[np.int64]
FIXED = -1


def fixed(rank: int) -> Ids:
    """Identities of a tensor that has none."""
    return np.full((1,) * rank, FIXED, np.int64)


def varying(ids: Ids) -> tuple[int, ...]:
    """Axes along which the identity changes."""
    return tuple(axis for axis, size in enumerate(ids.shape) if size > 1)


def compress(ids: Ids) -> Ids:
    """Shorten every axis along which the identity is constant to length 1."""
    for axis in varying(ids):
        first = ids.take([0], axis)
        if (ids == first).all():
            ids = first
    return ids


def reshape(ids: Ids, old: Sequence[int], new: Sequence[int]) -> Ids:
    """The identities after ``tensor.reshape(new)``, expanding only the axes that are really mixed.

    Both shapes are cut into the shortest runs of axes with equal products. A run in which nothing varies stays
    short; the others are expanded and reshaped.
    """
    source: list[int] = []
    target: list[int] = []
    for old_run, new_run in _runs(old, new):
        if all(ids.shape[axis] == 1 for axis in old_run):
            source += [1] * len(old_run)
            target += [1] * len(new_run)
        else:
            source += [old[axis] for axis in old_run]
            target += [new[axis] for axis in new_run]
    return compress(np.broadcast_to(ids, source).reshape(target))


def _runs(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    if prod(old) == 0:
        return [(list(range(len(old))), list(range(len(new))))]
    runs = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = ([i], old[i]) if i < len(old) else ([], 1)
        below, under = ([j], new[j]) if j < len(new) else ([], 1)
        i, j = i + 1, j + 1
        while right != under:
            if right < under:
                left, right, i = [*left, i], right * old[i], i + 1
            else:
                below, under, j = [*below, j], under * new[j], j + 1
        runs.append((left, below))
    return runs


@dataclass(frozen=True, eq=False)
class Use:
    """One place where identities are counted or cut: a dimension of a tensor, or an activation.

    ``role``: "out" (made here), "in" (summed over here), "per" (one value per channel), "norm" (one value per channel,
    and statistics over all of them), "free" (a tensor used as it is; ``dim`` is None and ``ids`` has its shape), "pad"
    (zeros put in here), "activation" (elements of an operation's output).
    """

    owner: str
    dim: int | None
    ids: Ids
    role: str
    operation: str = ""
    weight: int = 1
    """Elements of the owner that each entry of ``ids`` stands for."""


@dataclass
class Ledger:
    """All that was found while walking the network: identities, edges, uses and what is frozen."""

    size: int = 0
    uses: list[Use] = field(default_factory=list)
    frozen: list[tuple[Ids, str]] = field(default_factory=list)
    boxes: list[tuple[Ids, str]] = field(default_factory=list)
    _edges: list[tuple[Ids, Ids]] = field(default_factory=list)
    _slots: dict[tuple[str, int | None], Ids] = field(default_factory=dict)

    def fresh(self, count: int) -> Ids:
        """``count`` new identities."""
        start, self.size = self.size, self.size + count
        return np.arange(start, self.size, dtype=np.int64)

    def freeze(self, ids: Ids, reason: str) -> None:
        """These can never be removed."""
        ids = ids[ids >= 0]
        if ids.size:
            self.frozen.append((np.unique(ids), reason))

    def join(self, a: Ids, b: Ids, reason: str) -> None:
        """Remove ``a[i]`` and ``b[i]`` only together; an identity that meets FIXED is frozen for ``reason``."""
        a, b = np.broadcast_arrays(a, b)
        both = (a >= 0) & (b >= 0) & (a != b)
        if both.any():
            self._edges.append((a[both], b[both]))
        self.freeze(a[(b < 0)], reason)
        self.freeze(b[(a < 0)], reason)

    def join_along(self, ids: Ids, axes: Sequence[int], reason: str) -> Ids:
        """Join everything along ``axes``; returns the identities with those axes of length 1."""
        axes = [axis for axis in axes if ids.shape[axis] > 1]
        if not axes:
            return ids
        first = ids
        for axis in axes:
            first = first.take([0], axis)
        self.join(ids, first, reason)
        return first

    def slot(self, owner: str, dim: int | None, ids: Ids, role: str, operation: str) -> None:
        """Record that dimension ``dim`` of tensor ``owner`` is indexed by ``ids`` (again: join with the first time)."""
        known = self._slots.setdefault((owner, dim), ids)
        if known is not ids:
            self.join(known, ids, f"{owner} is shared with channels that cannot be removed")
        self.uses.append(Use(owner, dim, ids, role, operation))

    def made(self, owner: str, dim: int, count: int, role: str, operation: str) -> Ids:
        """Identities of dimension ``dim`` of tensor ``owner``: new the first time, the same ones afterwards."""
        ids = self._slots.get((owner, dim))
        if ids is None:
            ids = self._slots[(owner, dim)] = self.fresh(count)
        self.uses.append(Use(owner, dim, ids, role, operation))
        return ids

    def free(self, owner: str, shape: Sequence[int], operation: str) -> Ids:
        """A tensor used as it is: an identity for each of its elements."""
        ids = self._slots.get((owner, None))
        if ids is None:
            ids = self._slots[(owner, None)] = self.fresh(prod(shape)).reshape(tuple(shape))
            self.uses.append(Use(owner, None, ids, "free", operation))
        return ids

    def box(self, ids: Ids, reason: str) -> None:
        """What is left of this array must stay a box: rows and columns go, single entries never."""
        self.boxes.append((ids, reason))

    @cached_property
    def components(self) -> tuple[Ids, int]:
        """(label of every identity, number of labels) after making every box a box; asked for once the walk is done.

        In the order of the operations, since a box that was mended decides how the next one looks: a channel shuffle
        is a view to (g, C / g) and its transpose, and only the first says which axis shrinks.
        """
        labels, count = _connect(self.size, self._edges)
        changed = True
        while changed:
            changed = False
            for ids, reason in self.boxes:
                named = np.where(ids >= 0, labels[ids], FIXED)
                axes = [a for a in range(ids.ndim) if (named != named.take([0], a)).any()]
                if len(axes) < 2:
                    continue
                # The axis that shrinks is the last one that still varies: C // g in a view to (g, C // g), and the
                # number of heads once the channels inside each head are joined by the attention itself.
                start = len(self._edges)
                self.join_along(ids, [a for a in range(ids.ndim) if a != axes[-1]], reason)
                merged, left = _connect(count, [(labels[a], labels[b]) for a, b in self._edges[start:]])
                changed = changed or left < count
                labels, count = merged[labels], left
        return labels, count


def _connect(size: int, edges: Sequence[tuple[Ids, Ids]]) -> tuple[Ids, int]:
    """(label of each of ``size`` nodes, number of connected components)."""
    if not edges:
        return np.arange(size, dtype=np.int64), size
    rows = np.concatenate([a for a, _ in edges])
    columns = np.concatenate([b for _, b in edges])
    graph = coo_array((np.ones(rows.size, np.int8), (rows, columns)), shape=(size, size))
    count, labels = connected_components(graph, directed=False)
    return labels.astype(np.int64), int(count)
