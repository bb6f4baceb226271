"""Values per unit that are comparable between groups: raw |gamma| and raw filter norms, differentiable."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import torch
from torch import Tensor, nn

from dsa_hw.channels import ChannelGroups
from dsa_hw.channels.importance import scores
from dsa_hw.utils.arrays import Floats

__all__ = ["Gammas", "Norms", "gamma_scores"]

_log = logging.getLogger(__name__)


class Gammas:
    """Scales of the batch norms on each unit.

    A norm speaks for a group if it covers the channels of one of its producers exactly (one over a concatenation
    speaks for none). ``covered`` (U,) says which of all units, laid end to end, have any.
    """

    def __init__(self, model: nn.Module, groups: ChannelGroups) -> None:
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
        """Mean or maximum ("mean", "amax") of |gamma| over the members of each unit, (U,); 0 where there is none."""
        if not self._members:
            return torch.zeros(self.total)
        units = torch.cat([units for units, _ in self._members])
        values = torch.cat([gamma.abs().float() for _, gamma in self._members])
        # One place more, for channels that always stay.
        empty = values.new_zeros(self.total + 1)
        return empty.scatter_reduce(0, units, values, how, include_self=False)[:-1]


def gamma_scores(model: nn.Module, groups: ChannelGroups, how: str = "mean") -> list[Floats]:
    """Raw |gamma| of every unit, K arrays (C_k,), one scale for the whole network.

    A group without batch norm on every unit takes the L1 norms of its weights instead ("l1": mean 1 in each member),
    times the mean |gamma| of the rest of the network: an ordinary group, in which the small weights go first. In a
    network without batch norms that leaves the normalised norms alone. Said in the log.
    """
    gammas = Gammas(model, groups)
    raw = gammas.reduced(how).detach().double().cpu().numpy()
    covered = gammas.covered
    level = float(raw[covered].mean()) if covered.any() else 1.0
    silent = [not covered[start:stop].all() for start, stop in itertools.pairwise(groups.offsets)]
    names = [name for name, s in zip(groups.names, silent, strict=True) if s]
    weights = scores(model, groups, "l1") if names else []
    if names:
        _log.warning("no batch norm on %s: weight norms stand in for |gamma| there", ", ".join(names))
    parts = np.split(raw, groups.offsets[1:-1])
    return [weights[k] * level if s else parts[k] for k, s in enumerate(silent)]


class Norms:
    """Size of the filters that make a unit, over every member of its group.

    The norm of one filter depends little on its number of inputs (He initialisation makes it sqrt(2)), so root mean
    squares over filters are comparable between groups, those over single weights are not.
    """

    def __init__(self, model: nn.Module, groups: ChannelGroups) -> None:
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
        """Filters of each unit (U,)."""

    def rms(self) -> Tensor:
        """sqrt(mean over the unit's filters of ||w||^2), (U,), differentiable; about 0 where there is none."""
        sums = self.count.new_zeros(self.total + 1)
        for units, parameter, dim in self._members:
            squares = parameter.float().square().movedim(dim, 0).flatten(1).sum(1)
            sums = sums.index_add(0, units, squares)
        # sqrt has no slope at 0, where a channel that is gone should stay.
        return (sums[:-1] / self.count.clamp(min=1.0) + 1e-12).sqrt()
