"""Operations -> channel groups: what can be removed from a network, together with what."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import nn

from dsa_hw.channels.counts import Count, Operation, Term
from dsa_hw.channels.identities import Ids, Use, fixed
from dsa_hw.channels.rules import LARGEST_FREE_TENSOR, Pad, Value, Walk, run
from dsa_hw.channels.trace import Trace, TracedOperation, trace
from dsa_hw.errors import WidthError

__all__ = ["ChannelGroups", "Cut", "Frozen", "analyse"]

Kept = Sequence[NDArray[np.int64]]

_VIEWS = frozenset({
    "view", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "swapaxes", "t", "movedim", "select",
    "slice", "narrow", "expand", "expand_as", "alias", "detach", "chunk", "split", "split_with_sizes", "unbind",
    "getitem", "unfold", "view_as", "dropout", "meshgrid"
})  # fmt: skip
"""Operations that move no data in evaluation mode."""


_ROOT = "(root)"


@dataclass(frozen=True)
class Frozen:
    """Channels that stay, and why."""

    name: str
    channels: int
    reason: str
    members: tuple[str, ...] = ()
    """The modules that make them."""


@dataclass(frozen=True, eq=False)
class Cut:
    """A dimension of a tensor and the removable unit at each of its positions.

    ``units`` indexes all units of all groups laid end to end; the number of units itself marks what always stays.
    ``dim`` is None for a tensor used as it is: then ``units`` has the tensor's shape.
    """

    tensor: str
    dim: int | None
    units: Ids
    role: str
    operation: str


@dataclass(frozen=True, eq=False)
class ChannelGroups:
    """K channel groups of one network: group k has ``sizes[k]`` units, and a unit is removed whole or not at all."""

    names: tuple[str, ...]
    sizes: NDArray[np.int64]
    members: tuple[tuple[str, ...], ...]
    """For each group the modules that make its channels."""
    frozen: tuple[Frozen, ...]
    operations: tuple[Operation, ...]
    parameters: tuple[Term, ...]
    """Elements of every parameter of the network, one term each."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every parameter and buffer of the network."""
    inputs: tuple[tuple[int, ...], ...]
    """Shapes of the example inputs."""
    live: tuple[tuple[int, ...], ...] = field(repr=False)
    """For each operation, the indices of the tensors (``storage``) that are alive while it runs."""
    storage: tuple[Term, ...] = field(repr=False)
    """Bytes of every activation that is kept in memory: the inputs, then outputs that are not views."""
    cuts: tuple[Cut, ...] = field(repr=False)
    pads: tuple[tuple[Pad, Ids], ...] = field(repr=False)
    extents: tuple[tuple[str, Ids], ...] = field(repr=False)
    identities: tuple[Ids, ...] = field(repr=False)
    """For each group, one identity of each of its units."""
    trace: Trace = field(repr=False)

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
                module = operation.module or _ROOT
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


def analyse(model: nn.Module, example_inputs: Any) -> tuple[Walk, ChannelGroups]:
    """Trace, walk and assemble; nothing has been verified yet (``find_groups`` does)."""
    walk = _walk(trace(model, example_inputs))
    return walk, assemble(walk, model, {})


def _walk(traced: Trace) -> Walk:
    walk = Walk(traced)
    for graph_name, name in {**traced.tensors, **traced.constants}.items():
        tensor = traced.values.get(name)
        if tensor is None:
            walk.values[graph_name] = Value(fixed(0), ())
            continue
        own = tensor.is_floating_point() and 1 < tensor.numel() <= LARGEST_FREE_TENSOR and graph_name in traced.tensors
        large = tensor.is_floating_point() and tensor.numel() > LARGEST_FREE_TENSOR and graph_name in traced.tensors
        # An empty array of identities says: one of the model's tensors, identities on demand.
        ids = np.empty(0, np.int64) if own else fixed(tensor.ndim)
        walk.values[graph_name] = Value(
            ids,
            tuple(tensor.shape),
            tensor.element_size(),
            name if own or large else None,
            None if own or large else tensor,
        )
    for node in traced.inputs:
        meta = node.meta.get("val")
        if isinstance(meta, torch.Tensor):
            walk.values[node.name] = Value(fixed(meta.ndim), tuple(int(n) for n in meta.shape), meta.element_size())
        else:
            walk.values[node.name] = Value(fixed(0), ())
    for operation in traced.operations:
        run(walk, operation)
        for value in _parts(walk.values[operation.name]):
            if (value.ids >= 0).any():
                scale = prod(value.shape) // value.ids.size
                walk.ledger.uses.append(Use(operation.name, None, value.ids, "activation", operation.name, scale))
    for node in traced.outputs:
        for value in _parts(walk.values[node.name]):
            walk.ledger.freeze(value.ids, "network output")
    return walk


def _parts(value: Any) -> tuple[Value, ...]:
    return tuple(v for v in value if v is not None) if isinstance(value, tuple) else (value,)


def assemble(walk: Walk, model: nn.Module, more_frozen: Mapping[int, str]) -> ChannelGroups:
    """Components with the same uses form a group. ``more_frozen``: identity -> reason, found by verification."""
    ledger = walk.ledger
    labels, count = ledger.components()
    reasons: dict[int, str] = {}
    for ids, reason in [*ledger.frozen, *((np.array([i], np.int64), r) for i, r in more_frozen.items())]:
        for label in np.unique(labels[ids]).tolist():
            reasons.setdefault(label, reason)

    # The signature of a unit is the multiset of its uses; equal ones get equal sums of random 64-bit numbers.
    random = np.random.default_rng(0).integers(1, 2**63, size=len(ledger.uses), dtype=np.uint64)
    signature = np.zeros(count, np.uint64)
    producer = np.full(count, -1, np.int64)
    consumed = np.zeros(count, bool)
    for number, use in enumerate(ledger.uses):
        found = labels[use.ids[use.ids >= 0]]
        with np.errstate(over="ignore"):
            np.add.at(signature, found, random[number] * np.uint64(use.weight))
        if use.role == "out":
            fresh = found[producer[found] < 0]
            producer[fresh] = number
        elif use.role in ("in", "norm"):
            consumed[found] = True
    for pad in walk.pads:
        if not _own_module(model, walk, pad):
            for label in np.unique(labels[pad.ids]).tolist():
                reasons.setdefault(
                    label, f"{pad.operation} pads channels inside a larger forward: put it into a module of its own"
                )

    first_id = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(first_id, labels, np.arange(labels.size))
    sets: dict[tuple[int, int, str], list[int]] = {}
    relevant = np.flatnonzero((producer >= 0) | consumed)
    for label in relevant[np.argsort(first_id[relevant], kind="stable")].tolist():
        if producer[label] < 0:
            reasons.setdefault(label, "no operation produces them")
        sets.setdefault((int(producer[label]), int(signature[label]), reasons.get(label, "")), []).append(label)

    names: list[str] = []
    sizes: list[int] = []
    frozen: list[Frozen] = []
    unit = np.full(count + 1, -1, np.int64)  # label -> index among all units; the last entry serves FIXED
    identities: list[Ids] = []
    total = 0
    for (use_number, _, reason), members in sets.items():
        name = _module_of(ledger.uses[use_number].owner) if use_number >= 0 else "(constant)"
        if not reason and len(members) == 1:
            reason = "a single unit: all of its channels can only be removed together"
        if reason:
            frozen.append(Frozen(name, len(members), reason, _makers(ledger.uses, labels, members)))
            continue
        names.append(name)
        sizes.append(len(members))
        identities.append(first_id[members])
        unit[members] = np.arange(total, total + len(members))
        total += len(members)
    unit[unit < 0] = total
    return _build(
        walk, model, labels, unit, _unique(names), np.array(sizes, np.int64), _merged(frozen), tuple(identities)
    )


def _makers(uses: Sequence[Use], labels: Ids, members: Sequence[int]) -> tuple[str, ...]:
    """The modules that make the channels with these labels."""
    wanted = np.zeros(int(labels.max()) + 1, bool)
    wanted[list(members)] = True
    found = (u for u in uses if u.role == "out" and wanted[labels[u.ids[u.ids >= 0]]].any())
    return tuple(dict.fromkeys(_module_of(u.owner) for u in found))


def _merged(frozen: Sequence[Frozen]) -> tuple[Frozen, ...]:
    """One entry per name and reason."""
    sets: dict[tuple[str, str], list[Frozen]] = {}
    for f in frozen:
        sets.setdefault((f.name, f.reason), []).append(f)
    return tuple(
        Frozen(name, sum(f.channels for f in same), reason, tuple(dict.fromkeys(m for f in same for m in f.members)))
        for (name, reason), same in sets.items()
    )


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return tuple(result)


def _module_of(tensor: str) -> str:
    return tensor.removesuffix(".weight") if tensor != "weight" else _ROOT


def _own_module(model: nn.Module, walk: Walk, pad: Pad) -> bool:
    """Whether the padding's module holds nothing else than moves of one tensor, so that it can be replaced."""
    try:
        module = model.get_submodule(pad.operation.module)
    except AttributeError:
        return False
    inside = [o for o in walk.trace.operations if o.module == pad.operation.module]
    sources = {n.name for o in inside for n in o.node.all_input_nodes} - {o.name for o in inside}
    leaf = pad.operation.module and not any(True for _ in [*module.children(), *module.parameters(), *module.buffers()])
    return (
        bool(leaf) and len(sources) == 1 and all(o.kind in ("slice", "pad", "constant_pad_nd", "alias") for o in inside)
    )


def _build(
    walk: Walk,
    model: nn.Module,
    labels: Ids,
    unit: Ids,
    names: tuple[str, ...],
    sizes: NDArray[np.int64],
    frozen: tuple[Frozen, ...],
    identities: tuple[Ids, ...],
) -> ChannelGroups:
    total = int(sizes.sum())
    group_of_unit = np.repeat(np.arange(len(sizes)), sizes)

    def units(ids: Ids) -> Ids:
        return unit[np.where(ids >= 0, labels[np.maximum(ids, 0)], -1)] if labels.size else np.full(ids.shape, total)

    def count(ids: Ids, weight: float = 1.0) -> Count:
        found = units(ids).ravel()
        inside = found[found < total]
        coefficients = np.bincount(group_of_unit[inside], minlength=len(sizes)).astype(np.float64)
        return Count(weight * (found.size - inside.size), weight * coefficients)

    def elements(value: Value) -> Count:
        if value.name is not None and not value.ids.size:
            return Count(float(prod(value.shape)), np.zeros(len(sizes)))
        return count(value.ids, prod(value.shape) / max(value.ids.size, 1))

    cuts: dict[tuple[str, int | None, str], Cut] = {}
    makers: list[dict[str, None]] = [{} for _ in sizes]
    for use in walk.ledger.uses:
        if use.role == "activation":
            continue
        found = units(use.ids)
        if (found == total).all():
            continue
        if use.role == "out":
            for k in np.unique(group_of_unit[found[found < total]]).tolist():
                makers[k][_module_of(use.owner)] = None
        if use.role != "pad":
            cuts.setdefault((use.owner, use.dim, use.role), Cut(use.owner, use.dim, found, use.role, use.operation))

    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    dims: dict[str, dict[int, Count]] = {}
    free: dict[str, Count] = {}
    for cut, use_ids in ((c, c.units) for c in cuts.values()):
        inside = use_ids[use_ids < total]
        coefficients = np.bincount(group_of_unit[inside.ravel()], minlength=len(sizes)).astype(np.float64)
        size = Count(float(use_ids.size - inside.size), coefficients)
        if cut.dim is None:
            free[cut.tensor] = size
        else:
            dims.setdefault(cut.tensor, {})[cut.dim] = size

    def weight_term(name: str) -> Term:
        if name in free:
            return Term(1.0, (free[name],))
        factors = dims.get(name, {})
        rest = prod(n for d, n in enumerate(tensors[name].shape) if d not in factors)
        return Term(float(rest), tuple(factors.values()))

    flops: dict[str, list[Term]] = {}
    for work in walk.flops:
        flops.setdefault(work.operation, []).append(Term(work.scale, tuple(count(f) for f in work.factors)))
    operations = []
    for traced in walk.trace.operations:
        sources = traced.node.all_input_nodes
        weights = [walk.trace.tensors[n.name] for n in sources if n.name in walk.trace.tensors]
        activations = [v for n in sources if n.name not in walk.trace.tensors for v in _parts(walk.values[n.name])]
        outputs = _parts(walk.values[traced.name])
        output = _sum([elements(v) for v in outputs], len(sizes))
        depthwise = traced.kind.startswith("conv") and any(len(t.factors) == 1 for t in flops.get(traced.name, ()))
        operations.append(
            Operation(
                name=traced.name,
                kind=traced.kind,
                module=traced.module,
                flops=tuple(flops.get(traced.name, ())),
                weights=tuple(weight_term(name) for name in weights if name in tensors),
                inputs=tuple(elements(v) for v in activations),
                output=output,
                view=_is_view(traced),
                depthwise=depthwise,
                itemsize=outputs[0].itemsize if outputs else 4,
            )
        )
    live, storage = _liveness(walk, elements)
    return ChannelGroups(
        names=names,
        sizes=sizes,
        members=tuple(tuple(m) for m in makers),
        frozen=frozen,
        operations=tuple(operations),
        parameters=tuple(weight_term(name) for name, _ in model.named_parameters()),
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        inputs=tuple(walk.values[n.name].shape for n in walk.trace.inputs),
        live=live,
        storage=storage,
        cuts=tuple(cuts.values()),
        pads=tuple((pad, units(pad.ids)) for pad in walk.pads),
        extents=tuple((e.module, units(e.ids)) for e in walk.extents),
        identities=identities,
        trace=walk.trace,
    )


def _sum(counts: Sequence[Count], k: int) -> Count:
    return Count(sum(c.constant for c in counts), sum((c.coefficients for c in counts), np.zeros(k)))


def _liveness(walk: Walk, elements: Any) -> tuple[tuple[tuple[int, ...], ...], tuple[Term, ...]]:
    """Which activations are alive while each operation runs, if each is freed right after its last use.

    A view keeps the tensor alive that it looks into. The model's own tensors are not activations.
    """
    operations = walk.trace.operations
    storage: list[Term] = []
    owner: dict[str, tuple[int, ...]] = {}
    last: dict[int, int] = {}
    born: dict[int, int] = {}
    for node in walk.trace.inputs:
        owner[node.name] = (len(storage),)
        born[len(storage)] = 0
        value = walk.values[node.name]
        storage.append(Term(float(value.itemsize), (elements(value),)))
    for step, operation in enumerate(operations):
        sources = [i for n in operation.node.all_input_nodes for i in owner.get(n.name, ())]
        for index in sources:
            last[index] = step
        if _is_view(operation) or _in_place(operation):
            looked_into = operation.node.all_input_nodes[:1] if _in_place(operation) else operation.node.all_input_nodes
            owner[operation.name] = tuple(dict.fromkeys(i for n in looked_into for i in owner.get(n.name, ())))
            continue
        made = []
        for value in _parts(walk.values[operation.name]):
            made.append(len(storage))
            born[len(storage)] = step
            storage.append(Term(float(value.itemsize), (elements(value),)))
        owner[operation.name] = tuple(made)
        for index in made:
            last[index] = step
    for node in walk.trace.outputs:
        for index in owner.get(node.name, ()):
            last[index] = len(operations) - 1
    alive = [tuple(i for i in range(len(storage)) if born[i] <= s <= last.get(i, 0)) for s in range(len(operations))]
    return tuple(alive), tuple(storage)


def _is_view(operation: TracedOperation) -> bool:
    """Whether the output looks into the input's memory; ``reshape`` and ``contiguous`` do if the strides allow it."""
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
