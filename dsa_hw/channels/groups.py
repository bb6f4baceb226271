"""Operations -> channel groups: what can be removed from a network, together with what."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dsa_hw.channels.counts import Count, Operation
from dsa_hw.channels.identities import Ids
from dsa_hw.channels.sizes import Cut, Sizes
from dsa_hw.channels.walk import Pad
from dsa_hw.errors import WidthError

__all__ = ["ROOT", "ChannelGroups", "Frozen"]

Kept = Sequence[NDArray[np.int64]]

ROOT = "(root)"


@dataclass(frozen=True)
class Frozen:
    """Channels that stay, and why."""

    name: str
    channels: int
    reason: str
    members: tuple[str, ...] = ()
    """The modules that make them."""


@dataclass(frozen=True, eq=False)
class ChannelGroups:
    """K channel groups of one network: group k has ``sizes[k]`` units, and a unit is removed whole or not at all."""

    names: tuple[str, ...]
    sizes: NDArray[np.int64]
    members: tuple[tuple[str, ...], ...]
    """For each group the modules that make its channels."""
    frozen: tuple[Frozen, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every parameter and buffer of the network."""
    inputs: tuple[tuple[int, ...], ...]
    """Shapes of the example inputs."""
    cuts: tuple[Cut, ...] = field(repr=False)
    """Which dimension of which tensor the units index."""
    pads: tuple[tuple[Pad, Ids], ...] = field(repr=False)
    """Channels of zeros, and the unit of each."""
    extents: tuple[tuple[str, int, Ids], ...] = field(repr=False)
    """Modules that regroup channels: (module, axis whose length it may hold as a number, unit at each position)."""
    identities: tuple[Ids, ...] = field(repr=False)
    """For each group, one identity of each of its units."""
    counted: Sizes = field(repr=False)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Every operation in execution order, with its sizes as functions of the keep ratios."""
        return self.counted.operations

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        stay = sum(f.channels for f in self.frozen)
        return f"<{len(self)} channel groups, {int(self.sizes.sum())} removable units; {stay} channels frozen>"

    def to_frame(self) -> pd.DataFrame:
        """A row per group, then a row per frozen set: group, channels, members, flops_share, why_frozen.

        ``flops_share`` is the part of the network's FLOPs that goes into making the group's channels.
        """
        shares, rest = self._flops_shares()
        rows = [
            (name, int(size), ", ".join(members), float(share), "")
            for name, size, members, share in zip(self.names, self.sizes, self.members, shares, strict=True)
        ]
        makers = collections.Counter(dict.fromkeys(rest, 0))
        for f in self.frozen:
            makers.update(dict.fromkeys(f.members, f.channels))
        for f in self.frozen:
            share = sum(rest.get(m, 0.0) * f.channels / makers[m] for m in f.members)
            rows.append((f.name, f.channels, ", ".join(f.members), share, f.reason))
        left = sum(work for module, work in rest.items() if not makers[module])
        if left > 1e-12:
            rows.append(("(none)", 0, "", left, "work that makes no removable channels"))
        return pd.DataFrame(rows, columns=["group", "channels", "members", "flops_share", "why_frozen"])

    def _flops_shares(self) -> tuple[NDArray[np.float64], dict[str, float]]:
        """Share of FLOPs of each group, and by module what is left for frozen channels."""
        shares, rest = np.zeros(len(self)), dict[str, float]()
        for operation in self.operations:
            for term in operation.flops:
                # The first factor counts the channels that the operation makes.
                made = term.factors[0] if term.factors else Count(1.0, np.zeros(len(self)))
                work = float(term(np.ones(len(self))))
                shares += work * made.coefficients / made.dense
                module = operation.module or ROOT
                rest[module] = rest.get(module, 0.0) + work * made.constant / made.dense
        total = (shares.sum() + sum(rest.values())) or 1.0
        return shares / total, {module: work / total for module, work in rest.items()}

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Where each group's units start when all units are laid end to end, and their total: shape (K + 1,)."""
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the groups and over names and shapes of all tensors: the same network has the same one."""
        content = [list(self.names), self.sizes.tolist(), {k: list(v) for k, v in sorted(self.shapes.items())}]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def check_widths(self, widths: Sequence[int] | NDArray[Any] | Mapping[str, int] | pd.Series) -> NDArray[np.int64]:
        """Widths as a vector of K integers with 1 <= widths[k] <= sizes[k], or ``WidthError``."""
        if isinstance(widths, (Mapping, pd.Series)):
            given = {str(name): int(width) for name, width in widths.items()}
            if unknown := sorted(set(given) - set(self.names)):
                raise WidthError(f"no channel group is called {unknown[0]!r}: the groups are {', '.join(self.names)}")
            widths = [given.get(name, int(size)) for name, size in zip(self.names, self.sizes, strict=True)]
        array = np.asarray(widths)
        if array.shape != (len(self),):
            raise WidthError(f"{array.size} widths for {len(self)} channel groups: give one width per group")
        if array.size and not np.issubdtype(array.dtype, np.integer):
            raise WidthError(
                f"widths are whole channel counts, not {array.dtype}: multiply keep ratios by groups.sizes and round"
            )
        bad = np.flatnonzero((array < 1) | (array > self.sizes))
        if bad.size:
            k = int(bad[0])
            raise WidthError(f"width {array[k]} for group {self.names[k]!r}: it must be from 1 to {self.sizes[k]}")
        return array.astype(np.int64)

    def check_kept(self, kept: Kept) -> list[NDArray[np.int64]]:
        """Kept units as K sorted arrays of distinct indices, none of them empty, or ``WidthError``."""
        if len(kept) != len(self):
            raise WidthError(f"kept units for {len(kept)} groups, but there are {len(self)} channel groups")
        result = []
        for name, size, units in zip(self.names, self.sizes, kept, strict=True):
            array = np.unique(np.asarray(units, np.int64))
            if array.size == 0 or array.size != np.size(units) or array[0] < 0 or array[-1] >= size:
                raise WidthError(
                    f"kept units of group {name!r} must be distinct and from 0 to {size - 1}, at least one of them"
                )
            result.append(array)
        return result

    def flat_mask(self, kept: Kept) -> NDArray[np.bool_]:
        """True for each kept unit, all groups end to end, and a last True for what always stays."""
        mask = np.zeros(int(self.offsets[-1]) + 1, bool)
        mask[-1] = True
        for start, units in zip(self.offsets, self.check_kept(kept), strict=False):
            mask[start + units] = True
        return mask

    def slices(self, kept: Kept) -> dict[str, dict[int, NDArray[np.int64]]]:
        """Tensor name -> {dimension: kept indices}, for every tensor of the network that changes."""
        mask = self.flat_mask(kept)
        result: dict[str, dict[int, NDArray[np.int64]]] = {}
        for cut in self.cuts:
            keep = mask[cut.units]
            if keep.all():
                continue
            if cut.dim is not None:
                result.setdefault(cut.tensor, {})[cut.dim] = np.flatnonzero(keep)
                continue
            for dim in range(keep.ndim):
                line = keep.any(axis=tuple(a for a in range(keep.ndim) if a != dim))
                if not line.all():
                    result.setdefault(cut.tensor, {})[dim] = np.flatnonzero(line)
        return result
