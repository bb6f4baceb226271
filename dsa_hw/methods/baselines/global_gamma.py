"""Network slimming: one threshold on |gamma| for the whole network."""

from __future__ import annotations

import pandas as pd

from dsa_hw.methods.baselines._limits import Limits
from dsa_hw.methods.baselines._options import NoOptions, baseline
from dsa_hw.methods.baselines._units import gamma_scores
from dsa_hw.methods.problem import Problem, Proposal

__all__ = ["global_gamma"]


@baseline("global_gamma", NoOptions)
def global_gamma(problem: Problem, limits: Limits, options: NoOptions) -> Proposal:
    """Remove the units with the smallest raw |gamma|, as few as meet every budget.

    For a unit with several batch norms (residual, depthwise) their mean counts. For groups without batch norm see
    `gamma_scores`. The gammas are used as they are; the paper first trains with an L1 penalty on them.
    """
    importance = gamma_scores(problem.model, problem.groups)
    widths, threshold = limits.threshold(importance)
    history = pd.DataFrame({"threshold": [threshold], "units": [int(widths.sum())]})
    return Proposal(widths / limits.sizes, problem.model, importance, history)
