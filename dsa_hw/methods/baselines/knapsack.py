"""Knapsack: widths that maximise importance within the budgets by integer programming, as in HALP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor, nn

from dsa_hw.errors import DsaError
from dsa_hw.methods.baselines._evaluation import Evaluator, prepared, seeded, unit_scores
from dsa_hw.methods.baselines._limits import Limits
from dsa_hw.methods.baselines._options import Evaluation, Training, baseline
from dsa_hw.methods.baselines._training import fine_tune, needs_train
from dsa_hw.methods.baselines._units import masks_of, ranks
from dsa_hw.methods.dsa.fisher import mask_slopes
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.training.loaders import RepeatingLoader
from dsa_hw.utils.arrays import Bools, Floats, Ints
from dsa_hw.utils.inputs import as_inputs

__all__ = ["knapsack"]

# Second-order corrections of the limits at one linearisation before its range is halved.
_CORRECTIONS = 6
# Random projections of the outputs of each batch of synthetic inputs.
_DRAWS = 4


@dataclass(frozen=True)
class KnapsackOptions(Training):
    """Options of the knapsack.

    Attributes:
        steps: Steps in which the limits fall linearly from the dense costs. Importance is taken again at each, in the
            network as it is pruned by then, and averaged over the steps.
        tune_steps: Weight steps on the masked network after each step but the last.
        batches: How many batches to take importance from, the first ones; as many as DSA ranks channels with.
        levels: Widths per group in one integer program, at most.
        rounds: Integer programs, at most.
        gap: Relative optimality gap at which the solver stops.
    """

    steps: int = 1
    tune_steps: int = 0
    batches: int = 16
    levels: int = 32
    rounds: int = 60
    gap: float = 1e-6

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.steps < 1 or self.batches < 1 or self.levels < 2 or self.rounds < 1:
            raise DsaError(
                "Options of knapsack must have steps >= 1, batches >= 1, levels >= 2 and rounds >= 1; got "
                f"{self.steps}, {self.batches}, {self.levels} and {self.rounds}."
            )


@baseline("knapsack", KnapsackOptions)
def knapsack(problem: Problem, limits: Limits, options: KnapsackOptions) -> Proposal:
    """Maximise the importance of the kept units with every cost within its limit.

    maximise sum_k I_k(w_k), I_k(w) the sum of the w largest importances of group k. The costs are linearised *between*
    groups and exact *along* each: around the present widths p,

        F_j(w) ~ F_j(p) + sum_k (F_j(p with w_k in place of p_k) - F_j(p)),

    which is a multiple-choice knapsack with a binary variable for each width of each group. It ignores products of two
    changes, so its solution is checked against the true costs. A better solution within the limits becomes the new p.
    If it exceeds a limit, that limit is tightened by the excess and the program is solved again. After a few times the
    range around p in which widths may be chosen is halved. The search ends when the range is empty.

    Importance is that of `Taylor` unless ``problem.importance`` names another, which should be comparable between
    groups (those by norms of weights are not: each group has mean 1). With several ``steps`` units that are gone stay
    gone.
    """
    taylor = Taylor(problem, options) if problem.importance == "auto" else None
    trains = options.tune_steps > 0 and options.steps > 1
    batches = RepeatingLoader(needs_train(problem, "knapsack")) if trains else None
    model = prepared(problem.model, options) if trains else problem.model
    costs, widths = limits.costs, limits.sizes
    importance = [np.zeros(size) for size in limits.sizes]
    alive = [np.ones(size, bool) for size in limits.sizes]
    rows: list[dict[str, Any]] = []
    with seeded(problem, problem.model):
        for step in range(1, options.steps + 1):
            scores = taylor(model, alive) if taylor else unit_scores(replace(problem, model=model))
            importance = [
                np.where(kept, old + (new - old) / step, 0.0)
                for old, new, kept in zip(importance, scores, alive, strict=True)
            ]
            left = 1.0 - step / options.steps
            bounds = costs.limits + left * np.maximum(costs.dense - costs.limits, 0.0)
            here = Limits(replace(problem, costs=costs.with_limits(bounds)))
            program = _Program(here, importance, options)
            position, found = program.solve()
            widths = np.minimum(program.widths(position), [int(kept.sum()) for kept in alive])
            masks = masks_of(ranks(importance), widths)
            alive = [mask.numpy() > 0 for mask in masks]
            rows += [{"step": step, **row} for row in found]
            if batches is not None and step < options.steps:
                fine_tune(problem, model, options, masks, batches, options.tune_steps)
    return Proposal(widths / limits.sizes, model, importance, pd.DataFrame(rows))


class _Program:
    """Integer programs over configurations, which are positions (K,) in the lists of allowed widths."""

    def __init__(self, limits: Limits, importance: list[Floats], options: KnapsackOptions) -> None:
        self.limits, self.options = limits, options
        sums = [np.cumsum(np.sort(score)[::-1]) for score in importance]
        self.worth = [s[w - 1] for s, w in zip(sums, limits.allowed, strict=True)]
        self.last = np.array([w.size - 1 for w in limits.allowed])

    def widths(self, position: Ints) -> Ints:
        return np.array([w[p] for w, p in zip(self.limits.allowed, position, strict=True)], np.int64)

    def kept(self, position: Ints) -> float:
        return float(sum(v[p] for v, p in zip(self.worth, position, strict=True)))

    def costs(self, position: Ints) -> Floats:
        return self.limits.costs.at_widths(self.widths(position))

    def solve(self) -> tuple[Ints, list[dict[str, Any]]]:
        present = self._start()
        rows: list[dict[str, Any]] = []
        radius = int(self.last.max())
        slack, corrections = np.zeros(self.limits.costs.limits.size), 0
        while radius >= 1 and len(rows) < self.options.rounds:
            found = self._step(present, radius, self.limits.costs.limits - slack)
            over = self.costs(found) - self.limits.costs.limits if found is not None else slack
            kept = self.kept(found) if found is not None else -np.inf
            better = kept > self.kept(present) * (1.0 + 1e-12)
            rows.append({"radius": radius, "kept": kept, "over": float((over / self.limits.costs.limits).max())})
            if found is not None and better and (over <= 0.0).all():
                present = found
            elif found is not None and better and corrections < _CORRECTIONS:
                slack, corrections = slack + np.maximum(over, 0.0), corrections + 1
                continue
            else:
                radius //= 2
            slack, corrections = np.zeros_like(slack), 0
        return present, rows

    def _start(self) -> Ints:
        """Return uniform keep ratios, rounded down."""
        alpha = self.limits.scaled(np.ones(self.limits.sizes.size))
        wanted = alpha * self.limits.sizes * (1.0 + 1e-12)
        pairs = zip(self.limits.allowed, wanted, strict=True)
        return np.array([np.searchsorted(w, x, "right") - 1 for w, x in pairs], np.int64)

    def _step(self, present: Ints, radius: int, bounds: Floats) -> Ints | None:
        """Solve the linearised program around ``present``; None if it has no solution."""
        low, high = np.maximum(present - radius, 0), np.minimum(present + radius, self.last)
        offers = [self._offers(int(a), int(p), int(b)) for a, p, b in zip(low, present, high, strict=True)]
        owner = np.repeat(np.arange(len(offers)), [len(o) for o in offers])
        choice = np.concatenate(offers)
        trial = np.tile(self.widths(present), (choice.size, 1))
        trial[np.arange(choice.size), owner] = [self.limits.allowed[k][p] for k, p in zip(owner, choice, strict=True)]
        base = self.costs(present)
        change = self.limits.costs.at_widths(trial) - base
        unit = np.maximum(np.abs(self.limits.costs.limits), np.finfo(float).tiny)
        worth = np.array([self.worth[k][p] for k, p in zip(owner, choice, strict=True)])
        one = sparse.csr_array((np.ones(owner.size), (owner, np.arange(owner.size))))
        result = milp(
            -worth / max(float(worth.max()), 1e-300),
            constraints=[
                LinearConstraint(one, 1.0, 1.0),
                LinearConstraint(change.T / unit[:, None], -np.inf, (bounds - base) / unit),
            ],
            integrality=np.ones(owner.size, np.int64),
            bounds=Bounds(0.0, 1.0),
            options={"mip_rel_gap": self.options.gap},
        )
        if result.x is None:
            return None
        picked = np.flatnonzero(result.x > 0.5)
        position = present.copy()
        position[owner[picked]] = choice[picked]
        return position

    def _offers(self, low: int, present: int, high: int) -> Ints:
        """Return at most ``levels`` positions from low to high, and the present one."""
        even = np.linspace(low, high, min(self.options.levels, high - low + 1)).round().astype(np.int64)
        return np.union1d(even, [present]).astype(np.int64)


class Taylor:
    """The mean of (dL/dm_u)^2 of each unit, in the estimate that DSA ranks channels with.

    That is the squared first-order change of the loss when unit u is removed, and comparable between groups. Synthetic
    inputs have the dense outputs as targets, where the gradient is 0. There the second order is used: in the
    Gauss-Newton approximation it is the mean square of d(v . outputs)/dm_u over random signs v.
    """

    def __init__(self, problem: Problem, options: KnapsackOptions) -> None:
        """Fetch the batches."""
        how = Evaluation(options.precision, options.channels_last, options.batches, statistics="stored")
        self._problem, self._precision = problem, options.precision
        self._evaluator = Evaluator(problem, problem.model, unit_scores(problem), how)

    def __call__(self, model: nn.Module, alive: Sequence[Bools] | None = None) -> list[Floats]:
        """Return K arrays (C_k,) for a network without the units that are not ``alive``; None keeps all.

        Raises:
            DsaError: The loss has no gradient by the masks.
        """
        problem, evaluator = self._problem, self._evaluator
        evaluator.load(model)
        for parameter in evaluator.model.parameters():
            parameter.requires_grad_(False)
        sizes = problem.groups.sizes.tolist()
        masks = [torch.ones(c) if alive is None else torch.from_numpy(alive[k]).float() for k, c in enumerate(sizes)]
        if evaluator.synthetic:
            found = _output_slopes(problem, evaluator, masks)
        else:
            found = mask_slopes(
                evaluator.model, problem.groups, evaluator.batches, problem.loss, precision=self._precision, at=masks
            )
        if not any(score.any() for score in found):
            raise DsaError(
                "The loss has no gradient at the dense network, so that all Taylor importances are 0. Its targets may "
                "be its own outputs. Give labels, or no data at all, or another importance such as importance='gamma'."
            )
        return found


def _output_slopes(problem: Problem, evaluator: Evaluator, at: Sequence[Tensor]) -> list[Floats]:
    generator = torch.Generator().manual_seed(problem.seed)
    sums = [np.zeros(size) for size in problem.groups.sizes.tolist()]
    for inputs, _ in evaluator.batches:
        masks = [mask.clone().requires_grad_() for mask in at]
        with torch.enable_grad(), evaluator.running(masks):
            args, kwargs = as_inputs(inputs)
            outputs = evaluator.model(*args, **kwargs)
            for _ in range(_DRAWS):
                projected = _projected(outputs, generator)
                slopes = torch.autograd.grad(projected, masks, retain_graph=True, allow_unused=True)
                for total, slope in zip(sums, slopes, strict=True):
                    if slope is not None:
                        total += slope.double().cpu().numpy() ** 2
    return [total / (_DRAWS * len(evaluator.batches)) for total in sums]


def _projected(outputs: Any, generator: torch.Generator) -> Tensor:
    parts = []
    for y in torch.utils._pytree.tree_leaves(outputs):
        if isinstance(y, torch.Tensor) and y.is_floating_point():
            signs = torch.randint(0, 2, y.shape, generator=generator) * 2 - 1
            scale = y.detach().float().std(correction=0).clamp(min=torch.finfo(torch.float32).tiny)
            parts.append((y.float() * signs.to(y.device)).mean() / scale)
    return torch.stack(parts).sum()
