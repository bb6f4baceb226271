"""Simulated annealing over keep ratios, as AutoCompress searches them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from tqdm import tqdm

from dsa_hw.errors import DsaError
from dsa_hw.methods.baselines._evaluation import Evaluator, unit_scores
from dsa_hw.methods.baselines._limits import Limits, dense_proposal
from dsa_hw.methods.baselines._options import Evaluation, read
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.methods.registry import register_method
from dsa_hw.utils.arrays import Floats, Ints

__all__ = ["annealing"]


@dataclass(frozen=True)
class _Options(Evaluation):
    """``steps``: configurations to try. The temperature falls geometrically from ``hot`` to ``cold`` times the loss
    that uniform pruning costs; the spread of a move (of log alpha) falls alike from ``wide`` to ``narrow``.
    """

    steps: int = 200
    hot: float = 0.1
    cold: float = 0.001
    wide: float = 0.5
    narrow: float = 0.05

    def __post_init__(self) -> None:
        """Refuse a schedule that rises or ends at nothing."""
        super().__post_init__()
        if self.steps < 1 or not 0.0 < self.cold <= self.hot or not 0.0 < self.narrow <= self.wide:
            raise DsaError(
                "annealing needs steps >= 1, 0 < cold <= hot and 0 < narrow <= wide; found "
                f"{self.steps}, {self.cold}, {self.hot}, {self.narrow} and {self.wide}"
            )


@register_method("annealing")
def annealing(problem: Problem) -> Proposal:
    """The best keep ratios that a seeded random walk from uniform ones finds.

    A move perturbs log alpha of a random few groups, then scales all keep ratios by one factor until the budgets
    are just kept, so every point of the walk uses them up. Worse points are accepted with probability
    exp(-(loss - present) / temperature). Options: steps, hot, cold, wide, narrow, and those of evaluation.
    """
    options = read(problem, _Options, "annealing")
    limits = Limits(problem)
    if limits.met:
        return dense_proposal(problem)
    importance = unit_scores(problem)
    evaluator = Evaluator(problem, problem.model, importance, options)
    rng = np.random.default_rng(problem.seed)
    present = best = limits.scaled(np.ones(len(problem.groups)))
    loss = least = evaluator(_widths(present, limits))
    # Uniform pruning may cost nothing on few batches; then any worsening is refused.
    unit = max(loss - evaluator.dense, 1e-12) if math.isfinite(loss) else max(abs(evaluator.dense), 1e-12)
    rows = [{"step": 0, "loss": loss, "accepted": True, "best": least}]
    for step in tqdm(range(1, options.steps + 1), desc="annealing", disable=not problem.progress, leave=False):
        way = (step - 1) / max(options.steps - 1, 1)
        temperature = unit * options.hot * (options.cold / options.hot) ** way
        spread = options.wide * (options.narrow / options.wide) ** way
        trial = _moved(present, spread, limits, rng)
        found = evaluator(_widths(trial, limits))
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


def _widths(alpha: Floats, limits: Limits) -> Ints:
    """The nearest whole widths: what the loss is asked for."""
    return np.maximum(np.rint(alpha * limits.sizes).astype(np.int64), 1)
