"""Simulated annealing over keep ratios, as in AutoCompress."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dsa_hw.errors import DsaError
from dsa_hw.methods.baselines._evaluation import Evaluator, unit_scores
from dsa_hw.methods.baselines._limits import Limits
from dsa_hw.methods.baselines._options import Evaluation, baseline
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.utils.arrays import Floats
from dsa_hw.utils.progress import tracked

__all__ = ["annealing"]


@dataclass(frozen=True)
class AnnealingOptions(Evaluation):
    """Options of annealing; temperature and spread fall geometrically.

    Attributes:
        steps: Configurations to try.
        hot: First temperature, over the loss that uniform pruning costs.
        cold: Last temperature, over the same.
        wide: First spread of a move, in log alpha.
        narrow: Last spread of a move.
    """

    steps: int = 200
    hot: float = 0.1
    cold: float = 0.001
    wide: float = 0.5
    narrow: float = 0.05

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.steps < 1 or not 0.0 < self.cold <= self.hot or not 0.0 < self.narrow <= self.wide:
            raise DsaError(
                "Options of annealing must have steps >= 1, 0 < cold <= hot and 0 < narrow <= wide; got "
                f"{self.steps}, {self.cold}, {self.hot}, {self.narrow} and {self.wide}."
            )


@baseline("annealing", AnnealingOptions)
def annealing(problem: Problem, limits: Limits, options: AnnealingOptions) -> Proposal:
    """Propose the best keep ratios of a seeded random walk that starts from uniform ones.

    A move perturbs log alpha of a few random groups and then scales all keep ratios by one factor, so that every point
    of the walk uses the budgets up. A worse point is accepted with probability exp(-(loss - present) / temperature).
    """
    importance = unit_scores(problem)
    evaluator = Evaluator(problem, problem.model, importance, options)
    rng = np.random.default_rng(problem.seed)
    present = best = limits.scaled(np.ones(len(problem.groups)))
    loss = least = evaluator(limits.nearest(present))
    # Uniform pruning may cost nothing on few batches; then no worse point is accepted.
    unit = max(loss - evaluator.dense, 1e-12) if math.isfinite(loss) else max(abs(evaluator.dense), 1e-12)
    rows = [{"step": 0, "loss": loss, "accepted": True, "best": least}]
    for step in tracked(range(1, options.steps + 1), "annealing", shown=problem.progress):
        done = (step - 1) / max(options.steps - 1, 1)
        temperature = unit * options.hot * (options.cold / options.hot) ** done
        spread = options.wide * (options.narrow / options.wide) ** done
        trial = _moved(present, spread, limits, rng)
        found = evaluator(limits.nearest(trial))
        accepted = found <= loss or rng.random() < math.exp(-(found - loss) / temperature)
        if accepted:
            present, loss = trial, found
        if found < least:
            best, least = trial, found
        rows.append({"step": step, "loss": found, "accepted": accepted, "best": least})
    return Proposal(best, problem.model, importance, pd.DataFrame(rows))


def _moved(alpha: Floats, spread: float, limits: Limits, rng: np.random.Generator) -> Floats:
    chosen = rng.random(alpha.size) < max(2.0 / alpha.size, 0.2)
    chosen[rng.integers(alpha.size)] = True
    return limits.scaled(limits.clip(alpha * np.exp(spread * rng.standard_normal(alpha.size) * chosen)))
