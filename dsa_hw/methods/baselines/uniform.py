"""Uniform pruning: the same keep ratio for every group."""

from __future__ import annotations

import numpy as np

from dsa_hw.methods.baselines._limits import Limits
from dsa_hw.methods.baselines._options import NoOptions, baseline
from dsa_hw.methods.problem import Problem, Proposal

__all__ = ["uniform"]


@baseline("uniform", NoOptions)
def uniform(problem: Problem, limits: Limits, options: NoOptions) -> Proposal:
    """Propose the largest common keep ratio within every budget; a group with a higher floor stays at its floor."""
    return Proposal(limits.scaled(np.ones(len(problem.groups))), problem.model)
