"""MorphNet: training with an L1 penalty on gamma weighted by cost, a threshold, then one width multiplier."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from dsa_hw.methods.baselines._evaluation import prepared
from dsa_hw.methods.baselines._limits import Limits, dense_proposal
from dsa_hw.methods.baselines._options import Training, baseline, read_options
from dsa_hw.methods.baselines._training import needs_train, steps_of, strength, train
from dsa_hw.methods.baselines._units import Gammas, gamma_scores
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.utils.arrays import Bools, Floats
from dsa_hw.utils.modules import device_of

__all__ = ["allocate_morphnet", "morphnet", "train_morphnet"]

# Steps between updates of the weights of the penalty: cost gradients change slowly.
_REFRESH = 20


@dataclass(frozen=True)
class MorphNetOptions(Training):
    """Options of MorphNet.

    Attributes:
        strength: Coefficient of the penalty; None computes it from ``pull``, see `_training.strength`.
        pull: Share of a typical |gamma| that the penalty alone would remove.
        alive: Units with a larger |gamma| count as kept when the penalty is weighted.
        threshold: Units of at most this |gamma| are removed; None takes the smallest threshold that meets the budgets.
    """

    strength: float | None = None
    pull: float = 0.5
    alive: float = 0.01
    threshold: float | None = None


def train_morphnet(problem: Problem) -> nn.Module:
    """Return a copy of the network, trained with the weighted penalty.

    The result depends on the costs but not on the limits. The penalty is coefficient * sum_k c_k sum_{u in k}
    |gamma_u|, where c_k is the cost of one unit of group k, sum_j (dF_j/dalpha_k) / (C_k F_j(1)), at the keep ratios of
    the units that are alive, scaled to a mean of 1 over all units. For a unit with several batch norms the largest
    |gamma| counts, as in the paper. Groups without batch norm are not penalised.
    """
    options = read_options(problem, MorphNetOptions, "morphnet")
    steps = steps_of(problem, "morphnet")
    limits = Limits(problem, check=False)
    model = prepared(problem.model, options)
    gammas = Gammas(model, problem.groups)
    covered = torch.from_numpy(gammas.covered).to(device_of(model))
    factor = options.strength
    if factor is None:
        first = gammas.reduced("amax")[covered]
        factor = strength(first, options.pull, steps, options) if first.numel() else 0.0
    weights, age = torch.empty(0), 0

    def penalty() -> Tensor:
        nonlocal weights, age
        gamma = gammas.reduced("amax")
        if age % _REFRESH == 0:
            alive = ((gamma > options.alive) | ~covered).cpu().numpy()
            weights = torch.from_numpy(_prices(limits, alive)).to(gamma)
        age += 1
        return factor * (weights * gamma).sum()

    train(problem, model, options, steps, penalty, "morphnet")
    return model.train(problem.model.training)


def _prices(limits: Limits, alive: Bools) -> Floats:
    """Return c_k for every unit (U,), with mean 1."""
    parts = np.split(alive, np.cumsum(limits.sizes)[:-1])
    alpha = limits.clip(np.array([part.mean() for part in parts]))
    price = np.repeat(limits.costs.share_gradients(alpha).sum(0) / limits.sizes, limits.sizes)
    mean = float(price.mean())
    return price / mean if mean > 0.0 else np.ones_like(price)


def allocate_morphnet(problem: Problem, trained: nn.Module) -> Proposal:
    """Keep the units of ``trained`` above the threshold, then multiply all widths by the largest omega that fits.

    Widths do not grow beyond those of the dense network, because there are no weights for more.
    """
    options = read_options(problem, MorphNetOptions, "morphnet")
    limits = Limits(problem)
    if limits.met:
        return dense_proposal(problem)
    importance = gamma_scores(trained, problem.groups, "amax")
    widths, threshold = limits.threshold(importance, options.threshold)
    alive = widths / limits.sizes
    alpha = limits.scaled(alive)
    free = (alpha > limits.floor) & (alpha < 1.0)
    omega = float(np.median((alpha / alive)[free])) if free.any() else 1.0
    history = pd.DataFrame({"threshold": [threshold], "units": [int(widths.sum())], "omega": [omega]})
    return Proposal(alpha, trained, importance, history)


@baseline("morphnet", MorphNetOptions)
def morphnet(problem: Problem, limits: Limits, options: MorphNetOptions) -> Proposal:
    """Run `train_morphnet` for ``problem.epochs`` (default 1), then `allocate_morphnet`."""
    needs_train(problem, "morphnet")
    return allocate_morphnet(problem, train_morphnet(problem))
