"""Channel identities: which elements of a tensor are removed together.

Every tensor of the traced network has an integer array of the same rank, in which an axis has full length, or length 1
where the identity does not change along it. Broadcast to the shape of the tensor, it gives the identity of each
element; ``FIXED`` (-1) marks elements that are never removed. An operation that moves data makes the same move on the
integers. An operation that forces channels to be removed together adds an edge between identities. The connected
components are the units that can be removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dsa_hw.utils.arrays import Ints

__all__ = ["FIXED", "Ids", "Ledger", "Use", "compress", "fixed", "reshape", "varying"]

Ids = Ints
FIXED = -1


def fixed(rank: int) -> Ids:
    """Return the identities of a tensor without removable elements."""
    return np.full((1,) * rank, FIXED, np.int64)


def varying(ids: Ids) -> tuple[int, ...]:
    """Return the axes along which the identity may change."""
    return tuple(axis for axis, size in enumerate(ids.shape) if size > 1)


def compress(ids: Ids) -> Ids:
    """Shorten every axis along which the identity is constant to length 1."""
    for axis in varying(ids):
        first = ids.take([0], axis)
        if (ids == first).all():
            ids = first
    return ids


def reshape(ids: Ids, old: Sequence[int], new: Sequence[int]) -> Ids:
    """Return the identities after ``tensor.reshape(new)``, expanding only the axes that are merged or split.

    Both shapes are divided into the shortest runs of axes with equal products. A run along which no identity changes
    keeps length 1; the others are expanded and reshaped.

    Args:
        ids: The identities before.
        old: Shape of the tensor before.
        new: Shape of the tensor after.

    Returns:
        The identities after, with constant axes of length 1.
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
    """One place where identities are counted or removed: a dimension of a tensor, or an activation.

    ``role``: "out" (created here), "in" (summed over here), "per" (one value per channel), "norm" (one value per
    channel, and statistics over all of them), "standardised" (summed over by a convolution that normalises its weight
    with statistics over it), "free" (a tensor used element by element; ``dim`` is None and ``ids`` has
    its shape), "pad" (zeros inserted here), "activation" (elements of the output of an operation).
    """

    owner: str
    dim: int | None
    ids: Ids
    role: str
    operation: str = ""
    weight: int = 1
    """Number of elements of the owner for each entry of ``ids``."""


@dataclass
class Ledger:
    """What a walk over the network records: identities, edges, uses and frozen identities."""

    size: int = 0
    uses: list[Use] = field(default_factory=list)
    frozen: list[tuple[Ids, str]] = field(default_factory=list)
    boxes: list[tuple[Ids, str]] = field(default_factory=list)
    broadcasts: list[tuple[Ids, Ids, str]] = field(default_factory=list)
    _edges: list[tuple[Ids, Ids]] = field(default_factory=list)
    _slots: dict[tuple[str, int | None], Ids] = field(default_factory=dict)

    def fresh(self, count: int) -> Ids:
        """Create ``count`` identities."""
        start, self.size = self.size, self.size + count
        return np.arange(start, self.size, dtype=np.int64)

    def freeze(self, ids: Ids, reason: str) -> None:
        """Record that these identities are never removed."""
        ids = ids[ids >= 0]
        if ids.size:
            self.frozen.append((np.unique(ids), reason))

    def join(self, a: Ids, b: Ids, reason: str) -> None:
        """Remove ``a[i]`` and ``b[i]`` only together; freeze an identity that is joined with FIXED."""
        a, b = np.broadcast_arrays(a, b)
        both = (a >= 0) & (b >= 0) & (a != b)
        if both.any():
            self._edges.append((a[both], b[both]))
        self.freeze(a[(b < 0)], reason)
        self.freeze(b[(a < 0)], reason)

    def join_along(self, ids: Ids, axes: Sequence[int], reason: str) -> Ids:
        """Join all identities along ``axes``; return the identities with these axes of length 1."""
        axes = [axis for axis in axes if ids.shape[axis] > 1]
        if not axes:
            return ids
        first = ids
        for axis in axes:
            first = first.take([0], axis)
        self.join(ids, first, reason)
        return first

    def slot(self, owner: str, dim: int | None, ids: Ids, role: str, operation: str) -> None:
        """Record that ``ids`` index dimension ``dim`` of tensor ``owner``; join them with those of earlier uses."""
        known = self._slots.setdefault((owner, dim), ids)
        if known is not ids:
            self.join(known, ids, f"{owner} is shared with channels that cannot be removed")
        self.uses.append(Use(owner, dim, ids, role, operation))

    def made(self, owner: str, dim: int, count: int, role: str, operation: str) -> Ids:
        """Return the identities of dimension ``dim`` of tensor ``owner``, created on first use."""
        ids = self._slots.get((owner, dim))
        if ids is None:
            ids = self._slots[(owner, dim)] = self.fresh(count)
        self.uses.append(Use(owner, dim, ids, role, operation))
        return ids

    def free(self, owner: str, shape: Sequence[int], operation: str) -> Ids:
        """Return one identity per element of a tensor that is used element by element, created on first use."""
        ids = self._slots.get((owner, None))
        if ids is None:
            ids = self._slots[(owner, None)] = self.fresh(prod(shape)).reshape(tuple(shape))
            self.uses.append(Use(owner, None, ids, "free", operation))
        return ids

    def elements(self, owner: str) -> Ids | None:
        """Return the identities of a tensor that is used element by element, or None for another."""
        return self._slots.get((owner, None))

    def box(self, ids: Ids, reason: str) -> None:
        """Require that only whole rows and columns of this array are removed, never single entries."""
        self.boxes.append((ids, reason))

    def broadcast(self, ids: Ids, other: Ids, reason: str) -> None:
        """Record that each entry of ``ids`` is used for a line of ``other``, which varies along more axes.

        Where whole lines along the axes of ``ids`` are removed (heads), all entries stay; otherwise an entry is removed
        with its line. Which of the two holds is known after the walk.
        """
        self.broadcasts.append((ids, other, reason))

    @cached_property
    def components(self) -> tuple[Ids, int]:
        """Label of every identity and number of labels, with the requirements of `box` enforced.

        Use it after the walk. Boxes are processed in the order of the operations, because enforcing one affects the
        next: a channel shuffle is a view to (g, C / g) and its transpose, and only the first determines which axis
        shrinks.
        """
        labels, count = _connect(self.size, self._edges)
        for ids, other, reason in self.broadcasts:
            named = np.where(other >= 0, labels[other], FIXED)
            if all((named == named.take([0], axis)).all() for axis in varying(ids)):
                self.freeze(ids, reason)
            else:
                self.join(ids, other, reason)
        labels, count = _connect(self.size, self._edges) if self.broadcasts else (labels, count)
        changed = True
        while changed:
            changed = False
            for ids, reason in self.boxes:
                named = np.where(ids >= 0, labels[ids], FIXED)
                axes = [a for a in range(ids.ndim) if (named != named.take([0], a)).any()]
                if len(axes) < 2:
                    continue
                # The axis that shrinks is the last one that still varies: C // g in a view to (g, C // g), and the
                # number of heads where attention has joined the channels within each head.
                start = len(self._edges)
                self.join_along(ids, [a for a in range(ids.ndim) if a != axes[-1]], reason)
                merged, left = _connect(count, [(labels[a], labels[b]) for a, b in self._edges[start:]])
                changed = changed or left < count
                labels, count = merged[labels], left
        return labels, count


def _connect(size: int, edges: Sequence[tuple[Ids, Ids]]) -> tuple[Ids, int]:
    """Return the label of each of ``size`` nodes and the number of connected components."""
    if not edges:
        return np.arange(size, dtype=np.int64), size
    rows = np.concatenate([a for a, _ in edges])
    columns = np.concatenate([b for _, b in edges])
    graph = coo_array((np.ones(rows.size, np.int8), (rows, columns)), shape=(size, size))
    count, labels = connected_components(graph, directed=False)
    return labels.astype(np.int64), int(count)
