"""Knapsack: against enumeration of all configurations; its importance is the Fisher estimate of DSA."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dsa_hw.errors import DsaError, InfeasibleBudgetError
from dsa_hw.methods.baselines import knapsack
from dsa_hw.methods.baselines._limits import Limits
from dsa_hw.methods.baselines.knapsack import KnapsackOptions, Taylor, _Program
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.dsa.fisher import fisher
from dsa_hw.methods.problem import Problem
from tests.fakes.problems import Network, loader, problem_of, used


class Bilinear:
    """alpha'A alpha + b'alpha with entries >= 0."""

    def __init__(self, k: int, rng: np.random.Generator, coupling: float) -> None:
        self.a, self.b = coupling * rng.exponential(size=(k, k)), rng.exponential(size=k) + 0.1

    def value(self, alpha: Tensor) -> Tensor:
        return ((alpha @ torch.from_numpy(self.a)) * alpha).sum(-1) + alpha @ torch.from_numpy(self.b)

    def gradient(self, alpha: Any) -> Any:
        return alpha @ (self.a + self.a.T) + self.b


class TinyGroups:
    """What the knapsack uses of channel groups."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = np.array(sizes)

    def __len__(self) -> int:
        return self.sizes.size


def knapsack_against_enumeration(seed: int, coupling: float, count: int = 1) -> float:
    """Importance kept by the program over the best of all configurations."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(3, 9, 4).tolist()
    costs = [Bilinear(4, rng, coupling) for _ in range(count)]
    share = rng.uniform(0.25, 0.9)
    limits = [share * float(c.value(torch.ones(4, dtype=torch.float64))) for c in costs]
    grid = np.array([1, 1, 2, 1])
    problem: Any = Problem(nn.Identity(), TinyGroups(sizes), CostSet(costs, sizes, limits), grid=grid)  # type: ignore[arg-type]
    importance = [rng.exponential(size=c) for c in sizes]
    try:
        program = _Program(Limits(problem), importance, KnapsackOptions())
    except InfeasibleBudgetError:
        return 1.0
    position, _ = program.solve()
    tables = [sorted({*range(g, c + 1, g), c}) for c, g in zip(sizes, grid.tolist(), strict=True)]
    every = np.array(list(itertools.product(*tables)))
    values = np.stack([np.asarray(c.value(torch.from_numpy(every / sizes))) for c in costs], -1)
    sums = [np.cumsum(np.sort(b)[::-1]) for b in importance]
    worth = sum(s[every[:, k] - 1] for k, s in enumerate(sums))
    best = float(worth[(values <= limits).all(-1)].max())
    widths = program.widths(position)
    assert any((row == widths).all() for row in every[(values <= limits).all(-1)])
    return sum(float(s[w - 1]) for s, w in zip(sums, widths, strict=True)) / best


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.integers(1, 2))
def test_solution_is_optimal_for_separable_costs(seed: int, count: int) -> None:
    assert knapsack_against_enumeration(seed, 0.0, count) == pytest.approx(1.0, abs=1e-6)


def test_solution_is_near_optimal_for_coupled_costs() -> None:
    ratios = np.array([knapsack_against_enumeration(seed, 1.0, 1 + seed % 2) for seed in range(25)])
    assert (ratios <= 1.0 + 1e-9).all()
    assert ratios.min() > 0.93
    assert ratios.mean() > 0.99


def test_taylor_scores_are_the_fisher_scores_that_dsa_ranks_with(network: Network) -> None:
    model, groups, _ = network
    val = list(loader(512, 32, shuffle=False))
    scores = Taylor(problem_of(network, val=val), KnapsackOptions())(model)
    for one, other in zip(scores, fisher(model, groups, val, nn.functional.cross_entropy), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_importance_of_the_problem_is_used(network: Network) -> None:
    groups = network[1]
    wanted = [np.full(size, 1.0 if k else 1e6) for k, size in enumerate(groups.sizes)]
    problem = problem_of(network, share=0.5, importance=lambda *_: wanted)
    proposal = knapsack(problem)
    assert proposal.importance is not None
    np.testing.assert_array_equal(proposal.importance[0], wanted[0])
    assert proposal.alpha[0] == 1.0
    assert used(problem, proposal.alpha)[0] <= 1.0


def test_loss_without_gradient_is_refused_for_taylor_importance(dead_branch: Network) -> None:
    model, _, x = dead_branch
    with torch.no_grad():
        val = [(x, model(x))]
    with pytest.raises(DsaError, match="no gradient"):
        knapsack(problem_of(dead_branch, val=val, loss=nn.functional.mse_loss))
    other = problem_of(dead_branch, val=val, loss=nn.functional.mse_loss, importance="l1")
    assert used(other, knapsack(other).alpha)[0] <= 1.0


def test_several_steps_meet_the_budget_and_tune_between(network: Network) -> None:
    options = {"steps": 3, "tune_steps": 2, "batches": 1}
    problem = problem_of(network, share=0.4, options=options, train=loader(), val=loader())
    proposal = knapsack(problem)
    assert used(problem, proposal.alpha)[0] <= 1.0
    assert sorted(set(proposal.history["step"])) == [1, 2, 3]
    assert proposal.model is not problem.model
    pairs = zip(problem.model.parameters(), proposal.model.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)
    again = knapsack(problem)
    np.testing.assert_array_equal(proposal.alpha, again.alpha)
    with pytest.raises(DsaError, match="`train` loader"):
        knapsack(replace(problem, train=None))


def test_importance_is_averaged_over_steps_and_units_that_are_gone_stay_gone(network: Network) -> None:
    """Against two calls by hand: the importance of the second step is that of the network after the first."""
    val = list(loader(64, 32, shuffle=False))
    problem = problem_of(network, share=0.5, val=val, options={"steps": 2})
    proposal = knapsack(problem)
    dense = problem.costs.dense
    half = problem.costs.limits + 0.5 * (dense - problem.costs.limits)
    first = knapsack(replace(problem, costs=problem.costs.with_limits(half), options={}))
    assert first.importance is not None
    assert proposal.importance is not None
    widths = np.rint(first.alpha * problem.groups.sizes).astype(int)
    assert (np.rint(proposal.alpha * problem.groups.sizes) <= widths).all()
    pairs = zip(first.importance, widths, strict=True)
    alive = [np.isin(np.arange(len(s)), np.argsort(-s, kind="stable")[:w]) for s, w in pairs]
    second = Taylor(problem, KnapsackOptions())(problem.model, alive)
    for found, one, two, kept in zip(proposal.importance, first.importance, second, alive, strict=True):
        np.testing.assert_allclose(found, np.where(kept, (one + two) / 2, 0.0), rtol=1e-6, atol=1e-30)
