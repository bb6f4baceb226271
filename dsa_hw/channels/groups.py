"""Channel groups: what can be removed from a network."""

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

from dsa_hw.channels.counts import Count, Operation
from dsa_hw.channels.identities import Ids
from dsa_hw.channels.sizes import Cut, Sizes
from dsa_hw.channels.walk import Pad
from dsa_hw.errors import WidthError
from dsa_hw.utils.arrays import Bools, Floats, Ints
from dsa_hw.utils.text import unknown_name

__all__ = ["ROOT", "ChannelGroups", "Frozen", "architecture_fingerprint"]

Kept = Sequence[Ints | Sequence[int]]

ROOT = "(root)"


@dataclass(frozen=True)
class Frozen:
    """Channels that cannot be removed, and the reason."""

    name: str
    channels: int
    reason: str
    members: tuple[str, ...] = ()
    """The modules that create them."""


def architecture_fingerprint(names: Sequence[str], sizes: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> str:
    """Return the SHA-256 of names and sizes of channel groups, and of names and shapes of all tensors."""
    content = [list(names), list(sizes), {k: list(v) for k, v in sorted(shapes.items())}]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class ChannelGroups:
    """K channel groups of one network; `find_groups` makes them.

    Group k has ``sizes[k]`` units, and a unit is removed as a whole: one channel almost everywhere, more where channels
    can only be removed together (a head of attention, the i-th channel of every group of a grouped convolution).

    Example:
        >>> import torch
        >>> from dsa_hw import find_groups
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
        >>> groups = find_groups(model, torch.randn(1, 3, 16, 16))
        >>> groups
        <1 channel groups, 8 removable units; 4 channels frozen>
        >>> groups.to_frame().query("why_frozen != ''")[["group", "channels", "why_frozen"]]
          group  channels      why_frozen
        1     2         4  network output
    """

    names: tuple[str, ...]
    sizes: Ints
    members: tuple[tuple[str, ...], ...]
    """For each group the modules that create its channels."""
    frozen: tuple[Frozen, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every parameter and buffer of the network."""
    inputs: tuple[tuple[int, ...], ...]
    """Shapes of the example inputs."""
    cuts: tuple[Cut, ...] = field(repr=False)
    """Which dimensions of which tensors the units index."""
    pads: tuple[tuple[Pad, Ids], ...] = field(repr=False)
    """Paddings with channels of zeros, and the unit of each channel."""
    extents: tuple[tuple[str, int, Ids], ...] = field(repr=False)
    """Views of channels: (module, axis whose length it may store as an attribute, unit at each position)."""
    identities: tuple[Ids, ...] = field(repr=False)
    """For each group, one identity of each of its units."""
    means: Mapping[str, tuple[tuple[int, Ids] | None, ...]] = field(repr=False)
    """Module -> its calls of ``mean`` in order: axis and unit at each position, or None for one not over channels."""
    standardised: Mapping[str, Ints] = field(repr=False)
    """Convolution that standardises its weight -> the unit of each of its inputs."""
    counted: Sizes = field(repr=False)
    """Sizes of the network as functions of the keep ratios."""

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
        """Return a table with a row per group, then a row per frozen set of channels.

        Columns: group, channels, members, flops_share (share of the FLOPs of the network that computes these channels)
        and why_frozen.
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
            rows.append(("(none)", 0, "", left, "operations without removable channels"))
        return pd.DataFrame(rows, columns=["group", "channels", "members", "flops_share", "why_frozen"])

    def _flops_shares(self) -> tuple[Floats, dict[str, float]]:
        """Return the share of FLOPs of each group, and of the frozen channels of each module."""
        shares, rest = np.zeros(len(self)), dict[str, float]()
        for operation in self.operations:
            for term in operation.flops:
                # The first factor counts the channels that the operation creates.
                made = term.factors[0] if term.factors else Count(1.0, np.zeros(len(self)))
                work = float(term(np.ones(len(self))))
                shares += work * made.coefficients / made.dense
                module = operation.module or ROOT
                rest[module] = rest.get(module, 0.0) + work * made.constant / made.dense
        total = (shares.sum() + sum(rest.values())) or 1.0
        return shares / total, {module: work / total for module, work in rest.items()}

    @cached_property
    def offsets(self) -> Ints:
        """Index of the first unit of each group among the units of all groups, and their total; shape (K + 1,)."""
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the groups and of the names and shapes of all tensors; equal for equal architectures."""
        return architecture_fingerprint(self.names, self.sizes.tolist(), self.shapes)

    def check_widths(self, widths: Sequence[int] | np.ndarray[Any, Any] | Mapping[str, int] | pd.Series) -> Ints:
        """Return widths as a vector of K integers with 1 <= widths[k] <= sizes[k].

        Raises:
            WidthError: The widths do not match the groups.
        """
        if isinstance(widths, (Mapping, pd.Series)):
            given = {str(name): int(width) for name, width in widths.items()}
            if unknown := sorted(set(given) - set(self.names)):
                raise WidthError(unknown_name("channel group", unknown[0], self.names))
            widths = [given.get(name, int(size)) for name, size in zip(self.names, self.sizes, strict=True)]
        array = np.asarray(widths)
        if array.shape != (len(self),):
            raise WidthError(f"`widths` must have one entry per channel group ({len(self)}); got shape {array.shape}.")
        if array.size and not np.issubdtype(array.dtype, np.integer):
            raise WidthError(
                f"`widths` must be integers; got {array.dtype}. Multiply keep ratios by groups.sizes and round them."
            )
        bad = np.flatnonzero((array < 1) | (array > self.sizes))
        if bad.size:
            k = int(bad[0])
            raise WidthError(f"The width of group {self.names[k]!r} must be from 1 to {self.sizes[k]}; got {array[k]}.")
        return array.astype(np.int64)

    def check_kept(self, kept: Kept) -> list[Ints]:
        """Return kept units as K sorted arrays.

        Raises:
            WidthError: An array is empty, repeats an index or has one that is out of range.
        """
        if len(kept) != len(self):
            raise WidthError(f"`kept` must have one array per channel group ({len(self)}); got {len(kept)}.")
        result = []
        for name, size, units in zip(self.names, self.sizes, kept, strict=True):
            array = np.unique(np.asarray(units, np.int64))
            if array.size == 0 or array.size != np.size(units) or array[0] < 0 or array[-1] >= size:
                raise WidthError(
                    f"The kept units of group {name!r} must be at least one index, distinct and from 0 to {size - 1}."
                )
            result.append(array)
        return result

    def flat_mask(self, kept: Kept) -> Bools:
        """Return True for each kept unit of all groups, concatenated, and a final True for what is never removed."""
        mask = np.zeros(int(self.offsets[-1]) + 1, bool)
        mask[-1] = True
        for start, units in zip(self.offsets, self.check_kept(kept), strict=False):
            mask[start + units] = True
        return mask

    def slices(self, kept: Kept) -> dict[str, dict[int, Ints]]:
        """Return {tensor: {dimension: kept indices}} for every tensor that changes."""
        mask = self.flat_mask(kept)
        result: dict[str, dict[int, Ints]] = {}
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
