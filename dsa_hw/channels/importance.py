"""Which channels to keep: importance scores per unit, and the best ones.

A unit has several members (a residual group has every convolution that writes into the sum). Each member's scores are
divided by their mean before they are averaged, so that a layer with large weights does not dominate the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dsa_hw.channels.groups import ChannelGroups
from dsa_hw.errors import WidthError

__all__ = ["IMPORTANCES", "Importance", "register_importance", "scores", "select_channels"]

Scores = list[NDArray[np.float64]]
Importance = Callable[[nn.Module, ChannelGroups], Sequence[Any]]
IMPORTANCES: dict[str, Importance] = {}


def register_importance(name: str) -> Callable[[Importance], Importance]:
    """Register a way to score units: ``function(model, groups)`` returns K arrays of shape (C_k,)."""

    def register(function: Importance) -> Importance:
        IMPORTANCES[name] = function
        return function

    return register


def scores(model: nn.Module, groups: ChannelGroups, importance: str | Importance = "gamma") -> Scores:
    """Checked importance of every unit: K arrays of shape (C_k,), finite and not negative."""
    if isinstance(importance, str):
        if importance not in IMPORTANCES:
            raise WidthError(
                f"importance {importance!r} is unknown: choose from {', '.join(sorted(IMPORTANCES))} or give a function"
            )
        function = IMPORTANCES[importance]
    else:
        function = importance
    result = []
    given = list(function(model, groups))
    if len(given) != len(groups):
        raise WidthError(f"importance for {len(given)} groups, but there are {len(groups)} channel groups")
    for name, size, values in zip(groups.names, groups.sizes, given, strict=True):
        array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, np.float64)
        if array.shape != (size,):
            raise WidthError(f"importance of group {name!r} has shape {array.shape}: it must be ({size},)")
        if not np.isfinite(array).all() or (array < 0).any():
            raise WidthError(
                f"importance of group {name!r} has NaN, infinite or negative values: check the weights for NaN"
            )
        result.append(array)
    return result


def select_channels(
    model: nn.Module,
    groups: ChannelGroups,
    widths: Sequence[int] | NDArray[Any] | Mapping[str, int] | pd.Series,
    importance: str | Importance = "gamma",
) -> list[NDArray[np.int64]]:
    """The ``widths[k]`` most important units of each group: K sorted arrays of indices (ties: the lower index)."""
    return [
        np.sort(np.argsort(-score, kind="stable")[:width])
        for score, width in zip(scores(model, groups, importance), groups.check_widths(widths), strict=True)
    ]


_Member = tuple[NDArray[np.int64], NDArray[np.float64]]


def _combined(groups: ChannelGroups, members: list[_Member]) -> Scores:
    """Average over members of scores normalised to mean 1. Each member: (unit of each entry, score of each entry)."""
    total = int(groups.offsets[-1])
    score = np.zeros(total)
    counts = np.zeros(total)
    owner = np.repeat(np.arange(len(groups)), groups.sizes)
    for units, values in members:
        inside = units < total
        units, values = units[inside], values[inside]
        summed = np.bincount(units, values, total)
        present = np.bincount(units, minlength=total) > 0
        for k in np.unique(owner[units]):
            part = present & (owner == k)
            mean = summed[part].mean()
            score[part] += summed[part] / mean if mean > 0 or np.isnan(mean) else 1.0
            counts[part] += 1
    return np.split(score / np.maximum(counts, 1), groups.offsets[1:-1]) if len(groups) else []


def _producers(model: nn.Module, groups: ChannelGroups, order: int) -> list[_Member]:
    """For each weight that makes channels: the L1 or L2 norm of what makes each of them."""
    parameters = dict(model.named_parameters())
    result = []
    for cut in groups.cuts:
        if cut.role == "out" and cut.dim is not None and cut.tensor in parameters:
            weight = parameters[cut.tensor].detach().movedim(cut.dim, 0).flatten(1).double()
            result.append((cut.units, torch.linalg.vector_norm(weight, order, dim=1).cpu().numpy()))
    return result


@register_importance("l1")
def _l1(model: nn.Module, groups: ChannelGroups) -> Scores:
    """L1 norm of the weights that make the channel."""
    return _combined(groups, _producers(model, groups, 1))


@register_importance("l2")
def _l2(model: nn.Module, groups: ChannelGroups) -> Scores:
    """L2 norm of the weights that make the channel."""
    return _combined(groups, _producers(model, groups, 2))


@register_importance("auto")
@register_importance("gamma")
def _gamma(model: nn.Module, groups: ChannelGroups) -> Scores:
    """|gamma| of the batch norms on the group's channels (the paper); L1 of weights for groups without any."""
    parameters = dict(model.named_parameters())
    kinds = {operation.name: operation.kind for operation in groups.operations}
    makers = {frozenset(cut.units.tolist()) for cut in groups.cuts if cut.role == "out"}
    scales: list[_Member] = []
    covered = np.zeros(int(groups.offsets[-1]) + 1, bool)
    for cut in groups.cuts:
        scale = cut.role == "per" and kinds.get(cut.operation) == "batch_norm" and cut.tensor.endswith("weight")
        # A norm over a concatenation belongs to several groups. Only a norm that covers the channels of one producer
        # exactly is used.
        if scale and cut.tensor in parameters and frozenset(cut.units.tolist()) in makers:
            scales.append((cut.units, parameters[cut.tensor].detach().abs().double().cpu().numpy()))
            covered[cut.units] = True
    gamma = _combined(groups, scales)
    without_norm = [not covered[start:stop].all() for start, stop in itertools.pairwise(groups.offsets)]
    weights = _l1(model, groups) if any(without_norm) else gamma
    return [w if s else g for g, w, s in zip(gamma, weights, without_norm, strict=True)]
