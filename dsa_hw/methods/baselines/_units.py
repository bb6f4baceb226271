"""Values per unit that are comparable between groups: raw |gamma| and raw filter norms, differentiable; and ranks.

A unit is a channel of a channel group; U is the number of units of all groups, laid end to end.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dsa_hw.channels import ChannelGroups
from dsa_hw.channels.importance import scores
from dsa_hw.utils.arrays import Floats, Ints

__all__ = ["Gammas", "Norms", "gamma_scores", "masks_of", "ranks"]

_log = logging.getLogger(__name__)


def ranks(importance: Sequence[Floats]) -> list[Ints]:
    """Return the rank of each unit in its group, 0 for the most important one.

    Of equally important units the one of the lower index comes first, as in `dsa_hw.select_channels`.
    """
    return [np.argsort(np.argsort(-s, kind="stable"), kind="stable") for s in importance]


def masks_of(order: Sequence[Ints], widths: Ints) -> list[Tensor]:
    """Return masks that keep the first ``widths`` (K,) units of each group in the ``order`` of their ranks."""
    pairs = zip(order, widths.tolist(), strict=True)
    return [torch.from_numpy((rank < width).astype(np.float32)) for rank, width in pairs]


class Gammas:
    """Scales of the batch norms on each unit.

    A batch norm counts for a group if it covers the channels of one of its producers exactly. One over a concatenation
    counts for none.

    Attributes:
        covered: Which units (U,) have a batch norm.
    """

    def __init__(self, model: nn.Module, groups: ChannelGroups) -> None:
        """Find the batch norms of ``model``."""
        parameters = dict(model.named_parameters())
        kinds = {operation.name: operation.kind for operation in groups.operations}
        makers = {frozenset(cut.units.tolist()) for cut in groups.cuts if cut.role == "out"}
        self.total = int(groups.offsets[-1])
        self._members: list[tuple[Tensor, nn.Parameter]] = []
        for cut in groups.cuts:
            scale = cut.role == "per" and kinds.get(cut.operation) == "batch_norm" and cut.tensor.endswith("weight")
            if scale and cut.tensor in parameters and frozenset(cut.units.tolist()) in makers:
                parameter = parameters[cut.tensor]
                self._members.append((torch.from_numpy(cut.units).to(parameter.device), parameter))
        covered = np.zeros(self.total + 1, bool)
        for units, _ in self._members:
            covered[units.cpu().numpy()] = True
        self.covered = covered[:-1]

    def reduced(self, how: str) -> Tensor:
        """Return the "mean" or maximum ("amax") of |gamma| over the batch norms of each unit (U,), or 0."""
        if not self._members:
            return torch.zeros(self.total)
        units = torch.cat([units for units, _ in self._members])
        values = torch.cat([gamma.abs().float() for _, gamma in self._members])
        # The last place is for channels that always stay.
        empty = values.new_zeros(self.total + 1)
        return empty.scatter_reduce(0, units, values, how, include_self=False)[:-1]


def gamma_scores(model: nn.Module, groups: ChannelGroups, how: str = "mean") -> list[Floats]:
    """Return the raw |gamma| of every unit, K arrays (C_k,), on one scale for the whole network.

    A group without a batch norm on every unit uses the L1 norms of its weights ("l1", with mean 1 in each member),
    times the mean |gamma| of the rest of the network; this is logged. In a network without batch norms only the
    normalised norms remain.

    Args:
        model: The network.
        groups: Its channel groups.
        how: See `Gammas.reduced`.
    """
    gammas = Gammas(model, groups)
    raw = gammas.reduced(how).detach().double().cpu().numpy()
    covered = gammas.covered
    level = float(raw[covered].mean()) if covered.any() else 1.0
    without = [not covered[start:stop].all() for start, stop in itertools.pairwise(groups.offsets)]
    parts = np.split(raw, groups.offsets[1:-1])
    if not any(without):
        return parts
    names = [name for name, missing in zip(groups.names, without, strict=True) if missing]
    _log.warning("No batch norm on %s: weight norms replace |gamma| there.", ", ".join(names))
    weights = scores(model, groups, "l1")
    return [weights[k] * level if missing else parts[k] for k, missing in enumerate(without)]


class Norms:
    """Norms of the filters that produce each unit, over all members of its group.

    The norm of one filter depends little on its number of inputs (He initialisation makes it sqrt(2)). So root mean
    squares over filters are comparable between groups; those over single weights are not.

    Attributes:
        count: Number of filters of each unit (U,).
    """

    def __init__(self, model: nn.Module, groups: ChannelGroups) -> None:
        """Find the producers of each unit in ``model``."""
        parameters = dict(model.named_parameters())
        self.total = int(groups.offsets[-1])
        self._members: list[tuple[Tensor, nn.Parameter, int]] = []
        count = torch.zeros(self.total + 1)
        for cut in groups.cuts:
            if cut.role == "out" and cut.dim is not None and cut.tensor in parameters:
                parameter = parameters[cut.tensor]
                units = torch.from_numpy(cut.units)
                count.index_add_(0, units, torch.ones(units.numel()))
                self._members.append((units.to(parameter.device), parameter, cut.dim))
        self.count = count[:-1].to(self._members[0][0].device if self._members else "cpu")

    def rms(self) -> Tensor:
        """Return sqrt(mean over the filters of ||w||^2) of each unit (U,), differentiable; about 0 without filters."""
        sums = self.count.new_zeros(self.total + 1)
        for units, parameter, dim in self._members:
            squares = parameter.float().square().movedim(dim, 0).flatten(1).sum(1)
            sums = sums.index_add(0, units, squares)
        # sqrt has an infinite slope at 0, where a removed channel should stay.
        return (sums[:-1] / self.count.clamp(min=1.0) + 1e-12).sqrt()
