"""Cross-entropy method over keep ratios: a search with one action per group, as in AMC, without its agent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from dsa_hw.errors import DsaError
from dsa_hw.methods.baselines._evaluation import Evaluator, unit_scores
from dsa_hw.methods.baselines._limits import Limits
from dsa_hw.methods.baselines._options import Evaluation, baseline
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.utils.progress import counted_steps

__all__ = ["cem"]

# The distribution moves half of the way to the best draws and keeps some width, so that it does not stop early.
_KEEP = 0.5
_FLOOR = 0.05  # of log alpha


@dataclass(frozen=True)
class CemOptions(Evaluation):
    """Options of the cross-entropy method.

    Attributes:
        steps: Configurations to try.
        population: Configurations of one generation.
        elite: Share of them that the next generation is drawn around.
        spread: First standard deviation of log alpha.
    """

    steps: int = 200
    population: int = 20
    elite: float = 0.25
    spread: float = 0.5

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.steps < 1 or self.population < 2 or not 0.0 < self.elite <= 1.0 or not self.spread > 0.0:
            raise DsaError(
                "Options of cem must have steps >= 1, population >= 2, 0 < elite <= 1 and spread > 0; got "
                f"{self.steps}, {self.population}, {self.elite} and {self.spread}."
            )


@baseline("cem", CemOptions)
def cem(problem: Problem, limits: Limits, options: CemOptions) -> Proposal:
    """Propose the best keep ratios of a seeded cross-entropy search that starts around uniform ones.

    Each generation draws log alpha of all groups from a normal distribution and scales every draw by one factor, so
    that it uses the budgets up. Mean and standard deviation of the best draws are those of the next generation.
    """
    importance = unit_scores(problem)
    evaluator = Evaluator(problem, problem.model, importance, options)
    rng = np.random.default_rng(problem.seed)
    best = limits.scaled(np.ones(len(problem.groups)))
    least = evaluator(limits.nearest(best))
    mean, deviation = np.log(best), np.full(best.size, options.spread)
    rows = [{"step": 0, "loss": least, "best": least}]
    with counted_steps(options.steps, "cem", shown=problem.progress) as tried:
        while len(rows) <= options.steps:
            count = min(options.population, options.steps + 1 - len(rows))
            drawn = np.exp(mean + deviation * rng.standard_normal((count, mean.size)))
            points = [limits.scaled(limits.clip(row)) for row in drawn]
            losses = []
            for point in points:
                loss = evaluator(limits.nearest(point))
                losses.append(loss)
                if loss < least:
                    best, least = point, loss
                rows.append({"step": len(rows), "loss": loss, "best": least})
                tried("")
            order = np.argsort(losses, kind="stable")[: max(2, round(options.elite * options.population))]
            chosen = np.log([points[i] for i in order])
            mean = _KEEP * mean + (1 - _KEEP) * chosen.mean(0)
            deviation = np.maximum(_KEEP * deviation + (1 - _KEEP) * chosen.std(0), _FLOOR)
    return Proposal(best, problem.model, importance, pd.DataFrame(rows))
