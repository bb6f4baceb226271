"""NetAdapt: greedy search, one group narrower at a time, the one whose loss says it is missed least."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

from dsa_hw.errors import DsaError
from dsa_hw.methods.baselines._evaluation import Evaluator, prepared, ranks, seeded, unit_scores
from dsa_hw.methods.baselines._limits import Limits, dense_proposal
from dsa_hw.methods.baselines._options import Evaluation, Training, read
from dsa_hw.methods.baselines._training import fine_tune, needs_train
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.methods.registry import register_method
from dsa_hw.training.loaders import RepeatingLoader
from dsa_hw.utils.arrays import Floats, Ints

__all__ = ["netadapt"]


@dataclass(frozen=True)
class _Options(Training, Evaluation):
    """``iterations``: steps in which the limits fall linearly from the dense costs.

    ``score_steps``: weight steps on each candidate before it is scored (the paper's short-term fine-tuning; 0 scores
    the masked network as it is). ``tune_steps``: weight steps on the winner of each iteration.
    """

    iterations: int = 20
    score_steps: int = 0
    tune_steps: int = 0

    def __post_init__(self) -> None:
        """Refuse a search without steps."""
        super().__post_init__()
        if self.iterations < 1:
            raise DsaError(f"netadapt needs at least 1 iteration; found {self.iterations}")


@register_method("netadapt")
def netadapt(problem: Problem) -> Proposal:
    """Widths on the grid by greedy search; ``problem.costs`` are the measured costs.

    In iteration i every limit is B_j(i). Take the budget that is exceeded most; for each group find the largest width
    that alone brings its cost to B_j(i); keep the candidate with the least loss; repeat until every B_j(i) is kept.
    Where no group alone can do it, the one with the least loss per saved cost goes to its floor. Which units go is
    decided once, by ``problem.importance`` of the dense network. Options: iterations, score_steps, tune_steps, and
    those of evaluation and training.
    """
    options = read(problem, _Options, "netadapt")
    limits = Limits(problem)
    if limits.met:
        return dense_proposal(problem)
    search = _Search(problem, limits, options)
    with (
        seeded(problem, problem.model),
        tqdm(total=options.iterations, desc="netadapt", disable=not problem.progress, leave=False) as bar,
    ):
        for i in range(1, options.iterations + 1):
            # Exactly the limits at the end; one above the dense cost stays where it is.
            left = 1.0 - i / options.iterations
            search.reach(i, limits.costs.limits + left * np.maximum(limits.costs.dense - limits.costs.limits, 0.0))
            bar.update()
    return Proposal(search.widths / limits.sizes, search.tuned, search.importance, pd.DataFrame(search.rows))


class _Search:
    """The present widths and weights."""

    def __init__(self, problem: Problem, limits: Limits, options: _Options) -> None:
        self.problem, self.limits, self.options = problem, limits, options
        self.importance = unit_scores(problem)
        self.evaluator = Evaluator(problem, problem.model, self.importance, options)
        self.widths: Ints = limits.sizes.copy()
        self.rows: list[dict[str, Any]] = []
        trains = options.score_steps > 0 or options.tune_steps > 0
        self._batches = RepeatingLoader(needs_train(problem, "netadapt")) if trains else None
        self.tuned: nn.Module = prepared(problem.model, options) if trains else problem.model
        self._ranks = ranks(self.importance)

    def reach(self, iteration: int, limits: Floats) -> None:
        """Make groups narrower, one at a time, until the costs are within ``limits`` (J,)."""
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
        """The group to make narrower for budget j, its new width, and the loss then."""
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
        # The floor of all groups keeps the limits, so there is a group that can still be narrowed.
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
        fine_tune(self.problem, model, self.options, self._masks(widths), self._batches, steps)

    def _masks(self, widths: Ints) -> list[Tensor]:
        pairs = zip(self._ranks, widths.tolist(), strict=True)
        return [torch.from_numpy((rank < width).astype(np.float32)) for rank, width in pairs]
