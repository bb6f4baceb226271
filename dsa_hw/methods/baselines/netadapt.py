"""NetAdapt: greedy search that narrows one group at a time, the one with the least loss."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from dsa_hw.errors import DsaError
from dsa_hw.methods.baselines._evaluation import Evaluator, prepared, seeded, unit_scores
from dsa_hw.methods.baselines._limits import Limits
from dsa_hw.methods.baselines._options import Evaluation, Training, baseline
from dsa_hw.methods.baselines._training import fine_tune, needs_train
from dsa_hw.methods.baselines._units import masks_of
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.training.loaders import RepeatingLoader
from dsa_hw.utils.arrays import Floats, Ints
from dsa_hw.utils.progress import counted_steps

__all__ = ["netadapt"]


@dataclass(frozen=True)
class NetAdaptOptions(Training, Evaluation):
    """Options of NetAdapt.

    Attributes:
        iterations: Steps in which the limits fall linearly from the dense costs.
        score_steps: Weight steps on each candidate before it is scored, the paper's short-term fine-tuning; 0 scores
            the masked network as it is.
        tune_steps: Weight steps on the best candidate of each iteration.
    """

    iterations: int = 20
    score_steps: int = 0
    tune_steps: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.iterations < 1:
            raise DsaError(f"Option 'iterations' must be at least 1; got {self.iterations}.")


@baseline("netadapt", NetAdaptOptions)
def netadapt(problem: Problem, limits: Limits, options: NetAdaptOptions) -> Proposal:
    """Propose widths on the grid by greedy search; the costs of the problem replace the paper's look-up tables.

    In iteration i every limit is B_j(i). Take the budget that is exceeded most; for each group find the largest width
    that alone brings its cost to B_j(i); keep the candidate with the least loss; repeat until every B_j(i) is met.
    If no group alone suffices, the one with the least loss per saved cost goes to its floor. Units are ranked once, by
    ``problem.importance`` of the dense network.
    """
    search = _Search(problem, limits, options)
    with (
        seeded(problem, problem.model),
        counted_steps(options.iterations, "netadapt", shown=problem.progress) as count,
    ):
        for i in range(1, options.iterations + 1):
            # The last iteration has exactly the limits. A limit above the dense cost stays as it is.
            left = 1.0 - i / options.iterations
            search.reach(i, limits.costs.limits + left * np.maximum(limits.costs.dense - limits.costs.limits, 0.0))
            count("")
    # Weights that were tuned only to score a candidate are not kept.
    weights = search.tuned if options.tune_steps else problem.model
    return Proposal(search.widths / limits.sizes, weights, search.importance, pd.DataFrame(search.rows))


class _Search:
    """The present widths and weights."""

    def __init__(self, problem: Problem, limits: Limits, options: NetAdaptOptions) -> None:
        self.problem, self.limits, self.options = problem, limits, options
        self.importance = unit_scores(problem)
        self.evaluator = Evaluator(problem, problem.model, self.importance, options)
        self.widths: Ints = limits.sizes.copy()
        self.rows: list[dict[str, Any]] = []
        trains = options.score_steps > 0 or options.tune_steps > 0
        self._batches = RepeatingLoader(needs_train(problem, "netadapt")) if trains else None
        self.tuned: nn.Module = prepared(problem.model, options) if trains else problem.model

    def reach(self, iteration: int, limits: Floats) -> None:
        """Narrow groups, one at a time, until the costs are within ``limits`` (J,)."""
        while True:
            here = self.limits.costs.at_widths(self.widths)
            over = (here - limits) / limits
            j = int(np.argmax(over))
            if over[j] <= 0.0:
                return
            group, width, loss = self._best(j, float(here[j]), float(limits[j]))
            self.widths[group] = width
            self.rows.append(
                {
                    "iteration": iteration,
                    "budget": j,
                    "group": self.problem.groups.names[group],
                    "width": width,
                    "loss": loss,
                    "cost": float(self.limits.costs.at_widths(self.widths)[j]),
                }
            )
            if self.options.tune_steps:
                self._tune(self.tuned, self.widths, self.options.tune_steps)
                self.evaluator.load(self.tuned)

    def _best(self, j: int, here: float, bound: float) -> tuple[int, int, float]:
        """Return the group to narrow for budget j, its new width and its loss."""
        candidates, partial = [], []
        for k, allowed in enumerate(self.limits.allowed):
            narrower = allowed[allowed < self.widths[k]]
            if narrower.size == 0:
                continue
            trial = np.tile(self.widths, (narrower.size, 1))
            trial[:, k] = narrower
            cost = self.limits.costs.at_widths(trial)[:, j]
            fits = np.flatnonzero(cost <= bound)
            if fits.size:
                candidates.append((k, int(narrower[fits[-1]]), 0.0))
            else:
                partial.append((k, int(narrower[0]), here - float(cost[0])))
        if candidates:
            scored = [(self._loss(k, width), k, width) for k, width, _ in candidates]
            loss, k, width = min(scored)
            return k, width, loss
        # The floor of all groups is within the limits, so at least one group can still be narrowed.
        base = self.evaluator(self.widths)
        rated = []
        for k, width, saved in partial:
            loss = self._loss(k, width)
            rated.append(((loss - base) / saved if saved > 0.0 else np.inf, k, width, loss))
        _, k, width, loss = min(rated)
        return k, width, loss

    def _loss(self, group: int, width: int) -> float:
        widths = self.widths.copy()
        widths[group] = width
        if not self.options.score_steps:
            return self.evaluator(widths)
        twin = copy.deepcopy(self.tuned)
        self._tune(twin, widths, self.options.score_steps)
        self.evaluator.load(twin)
        loss = self.evaluator(widths)
        self.evaluator.load(self.tuned)
        return loss

    def _tune(self, model: nn.Module, widths: Ints, steps: int) -> None:
        assert self._batches is not None
        masks = masks_of(self.evaluator.order, widths)
        fine_tune(self.problem, model, self.options, masks, self._batches, steps)
