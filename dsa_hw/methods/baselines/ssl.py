"""SSL: training with a group lasso on the weights of each unit, then one threshold on their norm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from torch import Tensor, nn

from dsa_hw.methods.baselines._evaluation import prepared
from dsa_hw.methods.baselines._limits import Limits, dense_proposal
from dsa_hw.methods.baselines._options import Training, baseline, read_options
from dsa_hw.methods.baselines._training import needs_train, steps_of, strength, train
from dsa_hw.methods.baselines._units import Norms
from dsa_hw.methods.problem import Problem, Proposal

__all__ = ["allocate_ssl", "ssl", "train_ssl"]


@dataclass(frozen=True)
class SslOptions(Training):
    """Options of SSL.

    Attributes:
        strength: Coefficient of the penalty; None computes it from ``pull``, see `_training.strength`.
        pull: Share of a typical filter norm that the penalty alone would remove.
    """

    strength: float | None = None
    pull: float = 0.5


def train_ssl(problem: Problem) -> nn.Module:
    """Return a copy of the network, trained with the group lasso.

    The result does not depend on the limits: train once, then call `allocate_ssl` for each budget. The penalty is
    coefficient * sum_u sqrt(M_u) ||w_u||, with w_u the weights of all M_u filters that produce unit u in any member of
    its group. Its gradient shortens a typical filter by the coefficient, for any M_u.
    """
    options = read_options(problem, SslOptions, "ssl")
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
    """Remove the units of ``trained`` with the smallest filters, as few as meet every budget.

    The size of a unit is the root mean square of the norms of its filters.
    """
    limits = Limits(problem)
    if limits.met:
        return dense_proposal(problem)
    norms = Norms(trained, problem.groups).rms().detach().double().cpu().numpy()
    importance = np.split(norms, problem.groups.offsets[1:-1])
    widths, threshold = limits.threshold(importance)
    history = pd.DataFrame({"threshold": [threshold], "units": [int(widths.sum())]})
    return Proposal(widths / limits.sizes, trained, importance, history)


@baseline("ssl", SslOptions)
def ssl(problem: Problem, limits: Limits, options: SslOptions) -> Proposal:
    """Run `train_ssl` for ``problem.epochs`` (default 1), then `allocate_ssl`."""
    needs_train(problem, "ssl")
    return allocate_ssl(problem, train_ssl(problem))
