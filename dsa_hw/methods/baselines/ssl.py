"""SSL: train with a group lasso on each unit's weights, then one threshold on their size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from torch import Tensor, nn

from dsa_hw.methods.baselines._evaluation import prepared
from dsa_hw.methods.baselines._limits import Limits, dense_proposal
from dsa_hw.methods.baselines._options import Training, read
from dsa_hw.methods.baselines._training import needs_train, steps_of, strength, train
from dsa_hw.methods.baselines._units import Norms
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.methods.registry import register_method

__all__ = ["allocate_ssl", "ssl", "train_ssl"]


@dataclass(frozen=True)
class _Options(Training):
    """``strength`` is the coefficient of the penalty; None chooses it by ``pull``, see ``_training.strength``."""

    strength: float | None = None
    pull: float = 0.5


def train_ssl(problem: Problem) -> nn.Module:
    """A copy of the model, trained with the group lasso. Does not depend on the limits: train once, allocate often.

    The penalty is coefficient * sum_u sqrt(M_u) ||w_u||, a group lasso, with w_u the weights of all M_u filters that
    make unit u in any member of its group. Its gradient shortens a typical filter by the coefficient, whatever M_u is.
    """
    options = read(problem, _Options, "ssl")
    steps = steps_of(problem, "ssl")
    model = prepared(problem.model, options)
    norms = Norms(model, problem.groups)
    factor = options.strength
    if factor is None:
        factor = strength(norms.rms(), options.pull, steps, options)

    def penalty() -> Tensor:
        return factor * (norms.count * norms.rms()).sum()

    train(problem, model, options, steps, penalty, "ssl")
    return model.train(problem.model.training)


def allocate_ssl(problem: Problem, trained: nn.Module) -> Proposal:
    """Remove the units of ``trained`` with the smallest filters, as few as keep every budget.

    The size of a unit is the root mean square of the norms of its filters.
    """
    read(problem, _Options, "ssl")
    limits = Limits(problem)
    if limits.met:
        return dense_proposal(problem)
    norms = Norms(trained, problem.groups).rms().detach().double().cpu().numpy()
    importance = np.split(norms, problem.groups.offsets[1:-1])
    widths, threshold = limits.threshold(importance)
    history = pd.DataFrame({"threshold": [threshold], "units": [int(widths.sum())]})
    return Proposal(widths / limits.sizes, trained, importance, history)


@register_method("ssl")
def ssl(problem: Problem) -> Proposal:
    """``train_ssl`` for ``problem.epochs`` (1), then ``allocate_ssl``. Options: strength, pull, and training's."""
    read(problem, _Options, "ssl")
    if Limits(problem).met:
        return dense_proposal(problem)
    needs_train(problem, "ssl")
    return allocate_ssl(problem, train_ssl(problem))
