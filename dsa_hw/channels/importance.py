"""Importance of units, and the selection of the most important ones.

Several layers may create the channels of a group (every convolution that writes into a residual sum). The scores of
each layer are divided by their mean before they are averaged, so that a layer with large weights does not dominate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from dsa_hw.channels.groups import ChannelGroups
from dsa_hw.errors import WidthError
from dsa_hw.utils.arrays import Floats, Ints
from dsa_hw.utils.text import unknown_name

__all__ = ["IMPORTANCES", "Importance", "register_importance", "scores", "select_channels"]

Scores = list[Floats]
Importance = Callable[[nn.Module, ChannelGroups], Sequence[Any]]
IMPORTANCES: dict[str, Importance] = {}


def register_importance(name: str) -> Callable[[Importance], Importance]:
    """Register an importance by name (decorator).

    The function takes (model, groups) and returns K arrays of shape (C_k,): a score for each unit of each group, finite
    and not negative.

    Example:
        >>> import numpy as np
        >>> from dsa_hw.channels import register_importance
        >>> from dsa_hw.channels.importance import IMPORTANCES
        >>> @register_importance("last")
        ... def last(model, groups):
        ...     return [np.arange(size) for size in groups.sizes]
        >>> IMPORTANCES.pop("last") is last  # remove it again
        True
    """

    def register(function: Importance) -> Importance:
        IMPORTANCES[name] = function
        return function

    return register


def scores(model: nn.Module, groups: ChannelGroups, importance: str | Importance = "gamma") -> Scores:
    """Compute and check the importance of every unit.

    Args:
        model: The network.
        groups: Its channel groups.
        importance: A registered name or a function of (model, groups).

    Returns:
        K arrays of shape (C_k,), finite and not negative.

    Raises:
        WidthError: The name is unknown, or the scores do not match the groups.
    """
    if isinstance(importance, str):
        if importance not in IMPORTANCES:
            raise WidthError(unknown_name("importance", importance, IMPORTANCES))
        function = IMPORTANCES[importance]
    else:
        function = importance
    result = []
    given = list(function(model, groups))
    if len(given) != len(groups):
        raise WidthError(f"The importance must have one array per channel group ({len(groups)}); got {len(given)}.")
    for name, size, values in zip(groups.names, groups.sizes, given, strict=True):
        array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, np.float64)
        if array.shape != (size,):
            raise WidthError(f"The importance of group {name!r} must have shape ({size},); got {array.shape}.")
        if not np.isfinite(array).all() or (array < 0).any():
            raise WidthError(
                f"The importance of group {name!r} must be finite and not negative. Check the weights for NaN."
            )
        result.append(array)
    return result


def select_channels(
    model: nn.Module,
    groups: ChannelGroups,
    widths: Sequence[int] | np.ndarray[Any, Any] | Mapping[str, int] | pd.Series,
    importance: str | Importance = "gamma",
) -> list[Ints]:
    """Select the most important units of each group.

    Args:
        model: The network.
        groups: Its channel groups.
        widths: How many units of each group to keep: K integers, or a mapping from names of groups to integers (all
            units of the groups that it does not name).
        importance: ``gamma`` (scales of batch norms; L1 norms for groups without), ``l1``, ``l2`` (norms of the weights
            that create the channel), ``fpgm`` (their distance from the other filters of the layer), a name registered
            with `register_importance`, or a function of (model, groups).

    Returns:
        K sorted arrays of indices. Of units with equal importance, those with lower indices are kept.

    Raises:
        WidthError: Widths or importances do not match the groups.

    Example:
        >>> import torch
        >>> from dsa_hw import find_groups, select_channels
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 1, bias=False), torch.nn.Conv2d(4, 2, 1))
        >>> with torch.no_grad():
        ...     _ = model[0].weight.copy_(torch.tensor([3.0, -1.0, 2.0, 5.0]).view(4, 1, 1, 1))
        >>> groups = find_groups(model, torch.randn(1, 1, 4, 4))
        >>> select_channels(model, groups, [2])
        [array([0, 3])]
    """
    return [
        np.sort(np.argsort(-score, kind="stable")[:width])
        for score, width in zip(scores(model, groups, importance), groups.check_widths(widths), strict=True)
    ]


_Member = tuple[Ints, Floats]


def _combined(groups: ChannelGroups, members: list[_Member]) -> Scores:
    """Average the scores of the members, each normalised to mean 1; a member is (units, scores) of its entries."""
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


def _producers(model: nn.Module, groups: ChannelGroups, score: Callable[[Tensor], Tensor]) -> list[_Member]:
    """Return for each weight that creates channels the score of each channel, a function of its rows (C, values)."""
    parameters = dict(model.named_parameters())
    result = []
    for cut in groups.cuts:
        if cut.role == "out" and cut.dim is not None and cut.tensor in parameters:
            weight = parameters[cut.tensor].detach().movedim(cut.dim, 0).flatten(1).double()
            result.append((cut.units, score(weight).cpu().numpy()))
    return result


@register_importance("l1")
def _l1(model: nn.Module, groups: ChannelGroups) -> Scores:
    """Score by the L1 norm of the weights that create the channel."""
    return _combined(groups, _producers(model, groups, lambda rows: rows.abs().sum(1)))


@register_importance("l2")
def _l2(model: nn.Module, groups: ChannelGroups) -> Scores:
    """Score by the L2 norm of the weights that create the channel, as SFP does (He et al. 2018)."""
    return _combined(groups, _producers(model, groups, lambda rows: rows.norm(dim=1)))


@register_importance("fpgm")
def _fpgm(model: nn.Module, groups: ChannelGroups) -> Scores:
    """Score by the distance from the other filters of the layer, as FPGM does (He et al. 2019).

    Filters near the geometric median of the layer, whose summed distance to all others is smallest, go first: the
    others can replace them best.
    """
    return _combined(groups, _producers(model, groups, lambda rows: torch.cdist(rows, rows).sum(1)))


@register_importance("auto")
@register_importance("gamma")
def _gamma(model: nn.Module, groups: ChannelGroups) -> Scores:
    """Score by |gamma| of the batch norms of the group, as in the DSA paper; by L1 for groups without any."""
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
