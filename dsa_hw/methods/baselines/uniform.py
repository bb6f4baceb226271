"""The same keep ratio everywhere: what every allocation has to beat."""

from __future__ import annotations

import numpy as np

from dsa_hw.methods.baselines._limits import Limits, dense_proposal
from dsa_hw.methods.baselines._options import Nothing, read
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.methods.registry import register_method

__all__ = ["uniform"]


@register_method("uniform")
def uniform(problem: Problem) -> Proposal:
    """The largest common keep ratio that keeps every budget; groups whose floor is higher stay at it. No options."""
    read(problem, Nothing, "uniform")
    limits = Limits(problem)
    if limits.met:
        return dense_proposal(problem)
    return Proposal(limits.scaled(np.ones(len(problem.groups))), problem.model)
