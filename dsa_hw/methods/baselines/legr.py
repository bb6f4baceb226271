"""LeGR: one threshold on scores that are a learnt affine function of filter norms in each group (Chin et al. 2020)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dsa_hw.errors import DsaError
from dsa_hw.methods.baselines._evaluation import Evaluator, unit_scores
from dsa_hw.methods.baselines._limits import Limits
from dsa_hw.methods.baselines._options import Evaluation, baseline
from dsa_hw.methods.baselines._units import Norms
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.utils.arrays import Floats
from dsa_hw.utils.progress import tracked

__all__ = ["legr"]


@dataclass(frozen=True)
class LegrOptions(Evaluation):
    """Options of LeGR.

    Attributes:
        steps: Configurations to try.
        population: Candidates that are kept; the oldest goes first.
        tournament: Candidates that are drawn from them, of which the best is mutated.
        rate: Share of the groups that a mutation changes, at least one.
    """

    steps: int = 200
    population: int = 40
    tournament: int = 10
    rate: float = 0.1

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.steps < 1 or not 1 <= self.tournament <= self.population or not 0.0 < self.rate <= 1.0:
            raise DsaError(
                "Options of legr must have steps >= 1, 1 <= tournament <= population and 0 < rate <= 1; got "
                f"{self.steps}, {self.tournament}, {self.population} and {self.rate}."
            )


@baseline("legr", LegrOptions)
def legr(problem: Problem, limits: Limits, options: LegrOptions) -> Proposal:
    """Propose the best widths of a seeded evolution over a scale a_k and a shift b_k for each group.

    The score of unit u in group k is a_k s_u + b_k, with s_u its squared filter norm, or ``problem.importance`` if that
    is named. The units with the lowest scores of all groups are removed, as few as meet every budget, and the loss of
    the masked network is the fitness. The first candidate is a = 1, b = 0; the following ones are random until the
    population is full; then the best of a tournament is mutated, with steps that shrink to 0.
    """
    importance = _norms(problem) if problem.importance == "auto" else unit_scores(problem)
    evaluator = Evaluator(problem, problem.model, importance, options)
    rng = np.random.default_rng(problem.seed)
    k = len(importance)
    # Shifts are in units of the spread of all scores: a group must be able to move past the others.
    spread = max(float(np.concatenate(importance).std()), 1e-12)
    population: deque[tuple[float, Floats, Floats]] = deque(maxlen=options.population)
    widths, least, rows = limits.sizes, np.inf, []
    for step in tracked(range(options.steps), "legr", shown=problem.progress):
        scale, shift = np.ones(k), np.zeros(k)
        if step:
            changed, size = np.ones(k, bool), 1.0
            if len(population) == options.population:
                drawn = rng.choice(options.population, options.tournament, replace=False)
                _, scale, shift = min((population[i] for i in drawn), key=lambda candidate: candidate[0])
                changed = rng.random(k) < options.rate
                changed[rng.integers(k)] = True
                size = 1.0 - step / options.steps
            scale = scale * np.exp(size * rng.standard_normal(k) * changed)
            shift = shift + spread * size * rng.standard_normal(k) * changed
        found, _ = limits.threshold([a * s + b for a, s, b in zip(scale, importance, shift, strict=True)])
        loss = evaluator(found)
        population.append((loss, scale, shift))
        if loss < least:
            widths, least = found, loss
        rows.append({"step": step, "loss": loss, "best": least})
    if not np.isfinite(least):  # every network gave NaN
        widths, _ = limits.threshold(importance)
    return Proposal(widths / limits.sizes, problem.model, importance, pd.DataFrame(rows))


def _norms(problem: Problem) -> list[Floats]:
    squares = Norms(problem.model, problem.groups).rms().detach().double().cpu().numpy() ** 2
    return np.split(squares, problem.groups.offsets[1:-1])
