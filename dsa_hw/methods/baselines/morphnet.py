"""MorphNet: train with an L1 penalty on gamma weighted by cost, threshold, then one width multiplier."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from dsa_hw.methods.baselines._evaluation import prepared
from dsa_hw.methods.baselines._limits import Limits, dense_proposal
from dsa_hw.methods.baselines._options import Training, read
from dsa_hw.methods.baselines._training import needs_train, steps_of, strength, train
from dsa_hw.methods.baselines._units import Gammas, gamma_scores
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.methods.registry import register_method
from dsa_hw.utils.arrays import Floats
from dsa_hw.utils.modules import device_of

__all__ = ["allocate_morphnet", "morphnet", "train_morphnet"]

# The weights follow the living units; cost gradients change slowly, so not at every step.
_REFRESH = 20


@dataclass(frozen=True)
class _Options(Training):
    """``strength`` is the coefficient of the penalty; None chooses it by ``pull``, see ``_training.strength``.

    A unit lives while its |gamma| is over ``alive``. ``threshold``: the |gamma| at or below which units go; None
    takes the smallest that keeps the budgets.
    """

    strength: float | None = None
    pull: float = 0.5
    alive: float = 0.01
    threshold: float | None = None


def train_morphnet(problem: Problem) -> nn.Module:
    """A copy of the model, trained with the weighted penalty. Does not depend on the limits, only on the costs.

    The penalty is coefficient * sum_k c_k sum_{u in k} |gamma_u|, where c_k is what one unit of group k costs,
    sum_j (dF_j/dalpha_k) / (C_k F_j(1)), at the keep ratios of the living units, scaled to a mean of 1 over all units.
    Where several batch norms speak for a unit the largest |gamma| counts, as in the paper. Groups without
    batch norm are not penalised.
    """
    options = read(problem, _Options, "morphnet")
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
            living = ((gamma > options.alive) | ~covered).cpu().numpy()
            weights = torch.from_numpy(_prices(limits, living)).to(gamma)
        age += 1
        return factor * (weights * gamma).sum()

    train(problem, model, options, steps, penalty, "morphnet")
    return model.train(problem.model.training)


def _prices(limits: Limits, living: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Floats:
    """c_k for every unit (U,), mean 1."""
    parts = np.split(living, np.cumsum(limits.sizes)[:-1])
    alpha = limits.clip(np.array([part.mean() for part in parts]))
    price = np.repeat((limits.costs.gradients(alpha) / limits.costs.dense[:, None]).sum(0) / limits.sizes, limits.sizes)
    mean = float(price.mean())
    return price / mean if mean > 0.0 else np.ones_like(price)


def allocate_morphnet(problem: Problem, trained: nn.Module) -> Proposal:
    """Keep the units of ``trained`` over the threshold, then multiply all widths by the largest omega that fits.

    Widths do not grow beyond the dense network's, since there are no weights for more.
    """
    options = read(problem, _Options, "morphnet")
    limits = Limits(problem)
    if limits.met:
        return dense_proposal(problem)
    importance = gamma_scores(trained, problem.groups, "amax")
    widths, threshold = limits.threshold(importance, options.threshold)
    living = widths / limits.sizes
    alpha = limits.scaled(living)
    free = (alpha > limits.floor) & (alpha < 1.0)
    omega = float(np.median((alpha / living)[free])) if free.any() else 1.0
    history = pd.DataFrame({"threshold": [threshold], "units": [int(widths.sum())], "omega": [omega]})
    return Proposal(alpha, trained, importance, history)


@register_method("morphnet")
def morphnet(problem: Problem) -> Proposal:
    """``train_morphnet`` for ``problem.epochs`` (1), then ``allocate_morphnet``.

    Options: strength, pull, alive, threshold and those of training.
    """
    read(problem, _Options, "morphnet")
    if Limits(problem).met:
        return dense_proposal(problem)
    needs_train(problem, "morphnet")
    return allocate_morphnet(problem, train_morphnet(problem))
