"""Network slimming: one threshold on |gamma| for the whole network."""

from __future__ import annotations

import pandas as pd

from dsa_hw.methods.baselines._limits import Limits, dense_proposal
from dsa_hw.methods.baselines._options import Nothing, read
from dsa_hw.methods.baselines._units import gamma_scores
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.methods.registry import register_method

__all__ = ["global_gamma"]


@register_method("global_gamma")
def global_gamma(problem: Problem) -> Proposal:
    """Remove the units with the smallest raw |gamma|, as few as keep every budget. No options.

    Where several batch norms speak for a unit (residual, depthwise), their mean counts. Groups without batch norm:
    see ``gamma_scores``. The network's gammas are taken as they are; train with an L1 penalty first to follow the
    paper to the letter.
    """
    read(problem, Nothing, "global_gamma")
    limits = Limits(problem)
    if limits.met:
        return dense_proposal(problem)
    importance = gamma_scores(problem.model, problem.groups)
    widths, threshold = limits.threshold(importance)
    history = pd.DataFrame({"threshold": [threshold], "units": [int(widths.sum())]})
    return Proposal(widths / limits.sizes, problem.model, importance, history)
