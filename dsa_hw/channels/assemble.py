"""From traced operations to channel groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn

from dsa_hw.channels.groups import ROOT, ChannelGroups, Frozen
from dsa_hw.channels.identities import Ids, Use, fixed
from dsa_hw.channels.rules import run
from dsa_hw.channels.sizes import Cut, Sizes, parts
from dsa_hw.channels.standardised import standardised_weights
from dsa_hw.channels.trace import Trace, trace
from dsa_hw.channels.walk import LARGEST_FREE_TENSOR, Pad, Value, Walk
from dsa_hw.utils.arrays import Ints

__all__ = ["analyse", "assemble"]


def analyse(model: nn.Module, example_inputs: Any) -> tuple[Walk, ChannelGroups]:
    """Trace a network and find its channel groups by the rules, without the verification of `find_groups`."""
    walk = _walk(trace(model, example_inputs))
    return walk, assemble(walk, model, {})


def _walk(traced: Trace) -> Walk:
    walk = Walk(traced)
    for graph_name, name in {**traced.tensors, **traced.constants}.items():
        tensor = traced.values.get(name)
        if tensor is None:
            walk.values[graph_name] = Value(fixed(0), ())
            continue
        mine = graph_name in traced.tensors or name in traced.attributes
        own = tensor.is_floating_point() and 1 < tensor.numel() <= LARGEST_FREE_TENSOR and mine
        large = tensor.is_floating_point() and tensor.numel() > LARGEST_FREE_TENSOR and graph_name in traced.tensors
        # An empty array marks a parameter or buffer whose identities are created on first use.
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
    walk.standardised = standardised_weights(traced)
    computing = {name for found in walk.standardised.values() for name in found.inside}
    for operation in traced.operations:
        if operation.name in computing:  # their convolution records the channels of its weight
            meta = operation.node.meta["val"]
            walk.values[operation.name] = Value(fixed(meta.ndim), tuple(meta.shape), meta.element_size())
            continue
        for node in operation.node.all_input_nodes:
            walk.values.setdefault(node.name, Value(fixed(0), ()))  # subgraphs of higher-order operations
        run(walk, operation)
        for value in parts(walk.values[operation.name]):
            if (value.ids >= 0).any():
                scale = prod(value.shape) // value.ids.size
                walk.ledger.uses.append(Use(operation.name, None, value.ids, "activation", operation.name, scale))
    for node in traced.outputs:
        for value in parts(walk.values[node.name]):
            walk.ledger.freeze(value.ids, "network output")
    return walk


def assemble(walk: Walk, model: nn.Module, more_frozen: Mapping[int, str]) -> ChannelGroups:
    """Form channel groups: components of identities with equal uses form a group.

    Args:
        walk: A completed walk.
        model: The network.
        more_frozen: Identities that verification has frozen, with the reason.

    Returns:
        The channel groups.
    """
    ledger = walk.ledger
    labels, count = ledger.components
    reasons: dict[int, str] = {}
    for ids, reason in [*ledger.frozen, *((np.array([i], np.int64), r) for i, r in more_frozen.items())]:
        for label in np.unique(labels[ids]).tolist():
            reasons.setdefault(label, reason)

    signature, producer, consumed = walk.signatures
    for pad in walk.pads:
        if not _own_module(model, walk, pad):
            for label in np.unique(labels[pad.ids]).tolist():
                reasons.setdefault(
                    label, f"{pad.operation} pads channels inside a larger forward; put it into a module of its own"
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
    unit = np.full(count + 1, -1, np.int64)  # label -> index among all units; the last entry is for FIXED
    identities: list[Ids] = []
    total = 0
    for (use_number, _, reason), members in sets.items():
        name = _module_of(ledger.uses[use_number].owner) if use_number >= 0 else "(constant)"
        if not reason and len(members) == 1:
            reason = "a single unit: its channels can only be removed together"
        if reason:
            frozen.append(Frozen(name, len(members), reason, _makers(ledger.uses, labels, members)))
            continue
        names.append(name)
        sizes.append(len(members))
        identities.append(first_id[members])
        unit[members] = np.arange(total, total + len(members))
        total += len(members)
    unit[unit < 0] = total
    return _groups(
        walk,
        model,
        labels,
        unit,
        names,
        np.array(sizes, np.int64),
        frozen=_merged(frozen),
        identities=tuple(identities),
    )


def _makers(uses: Sequence[Use], labels: Ids, members: Sequence[int]) -> tuple[str, ...]:
    """Return the modules that create the channels with these labels."""
    wanted = np.zeros(int(labels.max()) + 1, bool)
    wanted[list(members)] = True
    found = (u for u in uses if u.role == "out" and wanted[labels[u.ids[u.ids >= 0]]].any())
    return tuple(dict.fromkeys(_module_of(u.owner) for u in found))


def _merged(frozen: Sequence[Frozen]) -> tuple[Frozen, ...]:
    """Merge entries with equal name and reason."""
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
    return tensor.removesuffix(".weight") if tensor != "weight" else ROOT


def _own_module(model: nn.Module, walk: Walk, pad: Pad) -> bool:
    """Return whether the module of the padding only moves one tensor, so that `shrink` can replace it."""
    try:
        module = model.get_submodule(pad.operation.module)
    except AttributeError:
        return False
    inside = [o for o in walk.trace.operations if o.module == pad.operation.module]
    sources = {n.name for o in inside for n in o.node.all_input_nodes} - {o.name for o in inside}
    leaf = pad.operation.module and not any(True for _ in [*module.children(), *module.parameters(), *module.buffers()])
    return bool(leaf) and len(sources) == 1 and all(o.kind in ("slice", "pad", "alias") for o in inside)


def _means(walk: Walk, counted: Sizes) -> dict[str, tuple[tuple[int, Ids] | None, ...]]:
    """Return the means of each module that computes one over channels; those of its children count as its own."""
    over = {mean.operation.name: (mean.axis, counted.units(mean.ids)) for mean in walk.means}
    result: dict[str, list[tuple[int, Ids] | None]] = {mean.operation.module: [] for mean in walk.means}
    for operation in walk.trace.operations if result else ():
        if operation.kind == "mean":
            path = operation.module
            while path and path not in result:
                path = path.rpartition(".")[0]
            if path in result:
                result[path].append(over.get(operation.name))
    return {path: tuple(calls) for path, calls in result.items()}


def _standardised(walk: Walk, cuts: Iterable[Cut]) -> dict[str, Ints]:
    """Return the units of the inputs of each module that standardises its weight."""
    modules = {o.name: o.module for o in walk.trace.operations if o.name in walk.standardised}
    return {modules[cut.operation]: cut.units for cut in cuts if cut.role == "standardised"}


def _groups(
    walk: Walk, model: nn.Module, labels: Ids, unit: Ids, names: Sequence[str], sizes: Ints, **more: Any
) -> ChannelGroups:
    shapes = {name: tuple(t.shape) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    counted = Sizes(walk, labels, unit, sizes, [], shapes, [name for name, _ in model.named_parameters()])
    total = int(sizes.sum())
    owner = np.repeat(np.arange(len(sizes)), sizes)
    cuts: dict[tuple[str, int | None, str], Cut] = {}
    makers: list[dict[str, None]] = [{} for _ in sizes]
    for use in walk.ledger.uses:
        if use.role == "activation":
            continue
        found = counted.units(use.ids)
        if (found == total).all():
            continue
        if use.role == "out":
            for k in np.unique(owner[found[found < total]]).tolist():
                makers[k][_module_of(use.owner)] = None
        if use.role != "pad":
            cuts.setdefault((use.owner, use.dim, use.role), Cut(use.owner, use.dim, found, use.role, use.operation))
    return ChannelGroups(
        names=_unique(names),
        sizes=sizes,
        members=tuple(tuple(m) for m in makers),
        shapes=shapes,
        inputs=tuple(walk.values[n.name].shape for n in walk.trace.inputs),
        cuts=tuple(cuts.values()),
        pads=tuple((pad, counted.units(pad.ids)) for pad in walk.pads),
        extents=tuple((e.module, e.axis, counted.units(e.ids)) for e in walk.extents),
        means=_means(walk, counted),
        standardised=_standardised(walk, cuts.values()),
        counted=dataclasses.replace(counted, cuts=tuple(cuts.values())),
        **more,
    )
