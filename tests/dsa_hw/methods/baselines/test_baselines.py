"""Properties that every baseline has."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import budgets
from dsa_hw.errors import DsaError, InfeasibleBudgetError
from dsa_hw.methods import baselines
from dsa_hw.methods.problem import realise
from dsa_hw.methods.registry import available_methods, solve
from tests.fakes.problems import Network, problem_of, used

METHODS = ("uniform", "global_gamma", "ssl", "morphnet", "netadapt", "annealing", "knapsack", "legr", "cem", "dmcp")
every = pytest.mark.parametrize("name", METHODS)


@every
@pytest.mark.parametrize("share", [0.7, 0.3])
def test_budget_is_met_and_used(network: Network, name: str, share: float) -> None:
    problem = problem_of(network, name, share)
    before = copy.deepcopy(problem.model.state_dict())
    proposal = solve(problem, name)
    assert proposal.alpha.shape == (len(problem.groups),)
    assert (proposal.alpha >= problem.minimum).all()
    assert (proposal.alpha <= 1.0).all()
    assert used(problem, proposal.alpha).max() <= 1.0
    result = realise(problem, proposal)
    real = used(problem, result.widths / problem.groups.sizes)
    # One unit of the stem can be 12% of the smaller budget. So the budget is used up, or no further unit fits.
    fuller = (result.widths + np.eye(len(result.widths), dtype=int)) / problem.groups.sizes
    more = [used(problem, row).max() for row in fuller if (row <= 1.0).all()]
    assert real.max() <= 1.0
    assert real.max() >= 0.98 or (real.max() >= 0.88 and min(more) > 1.0)
    assert result.model(torch.randn(2, 3, 8, 8)).shape == (2, 4)
    assert all(torch.equal(before[k], v) for k, v in problem.model.state_dict().items())
    assert not problem.model.training


@every
def test_several_budgets_are_met_at_once(network: Network, name: str) -> None:
    groups = network[1]
    costs = [budgets.flops(groups), budgets.params(groups), budgets.activation_memory(groups)]
    limits = [0.5 * costs[0].dense, 0.4 * costs[1].dense, 0.9 * costs[2].dense]
    problem = problem_of(network, name, costs=costs, limits=limits)
    proposal = solve(problem, name)
    assert used(problem, proposal.alpha).max() <= 1.0
    real = used(problem, realise(problem, proposal).widths / groups.sizes)
    assert 0.95 <= real.max() <= 1.0


@every
def test_fitted_and_counted_budgets_are_met_at_once(network: Network, latency: budgets.CostModel, name: str) -> None:
    params = budgets.params(network[1])
    problem = problem_of(network, name, costs=[latency, params], limits=[0.7 * latency.dense, 0.6 * params.dense])
    proposal = solve(problem, name)
    assert used(problem, proposal.alpha).max() <= 1.0
    real = used(problem, realise(problem, proposal).widths / network[1].sizes)
    assert 0.95 <= real.max() <= 1.0


@every
def test_widths_are_on_the_grid(network: Network, name: str) -> None:
    groups = network[1]
    problem = problem_of(network, name, 0.5, grid=np.full(len(groups), 8))
    result = realise(problem, solve(problem, name))
    assert all(w % 8 == 0 or w == c for w, c in zip(result.widths, groups.sizes, strict=True))
    assert used(problem, result.widths / groups.sizes).max() <= 1.0


@every
def test_dense_network_within_the_budget_is_proposed_without_training(network: Network, name: str) -> None:
    problem = problem_of(network, name, 1.0, train=None)
    proposal = solve(problem, name)
    assert (proposal.alpha == 1.0).all()
    assert proposal.model is problem.model


@every
def test_infeasible_budget_names_the_smallest_feasible(network: Network, name: str) -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(problem_of(network, name, 1e-4), name)
    smallest = caught.value.smallest
    assert smallest is not None
    fine = problem_of(network, name, limits=[smallest])
    assert realise(fine, solve(fine, name)).widths.tolist() == [
        max(1, int(np.ceil(0.05 * c))) for c in fine.groups.sizes
    ]
    with pytest.raises(InfeasibleBudgetError):
        solve(problem_of(network, name, limits=[smallest * (1 - 1e-9)]), name)


@every
def test_unknown_options_are_refused(network: Network, name: str) -> None:
    with pytest.raises(DsaError, match=f"{name}.*'sped'"):
        solve(problem_of(network, name, options={"sped": 1}), name)


@every
def test_same_seed_gives_the_same_proposal_and_global_random_numbers_are_kept(network: Network, name: str) -> None:
    torch.manual_seed(1)
    first = solve(problem_of(network, name, seed=3), name)
    torch.manual_seed(2)
    torch.rand(5)
    state = torch.get_rng_state()
    second = solve(problem_of(network, name, seed=3), name)
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(first.alpha, second.alpha)
    assert first.history.equals(second.history)


@pytest.mark.parametrize("name", ["netadapt", "annealing", "knapsack", "legr", "cem"])
@pytest.mark.parametrize("guidance", ["val", "none"])
def test_group_without_effect_is_pruned_most(dead_branch: Network, name: str, guidance: str) -> None:
    model, groups, _ = dead_branch
    more: dict[str, Any] = {}
    if guidance == "val":
        inputs = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            target = model(inputs)
        # At its own outputs a network has no gradient, so the knapsack needs labels.
        labels = name == "knapsack"
        more["val"] = [(inputs, target.argmax(1) if labels else target)]
        more["loss"] = nn.functional.cross_entropy if labels else nn.functional.mse_loss
    options: dict[str, Any] = {"annealing": {"steps": 150}, "legr": {"population": 16}}.get(name, {})
    if name != "knapsack":  # whose importance is always that of the dense network as it is
        options["statistics"] = "stored"
    problem = problem_of(dead_branch, share=0.6, options=options, **more)
    dead = next(k for k, m in enumerate(groups.members) if "dead.0" in m)
    live = next(k for k, m in enumerate(groups.members) if "live.0" in m)
    proposal, plain = solve(problem, name), baselines.uniform(dataclasses.replace(problem, options={}))
    assert proposal.alpha[dead] < 0.75 * plain.alpha[dead]
    assert proposal.alpha[live] > plain.alpha[live]
    probe = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        errors = [(realise(problem, p).model(probe) - model(probe)).square().mean() for p in (proposal, plain)]
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("name", ["netadapt", "annealing", "knapsack", "legr", "cem"])
def test_unusable_data_is_refused_with_the_reason(network: Network, name: str) -> None:
    with pytest.raises(DsaError, match="no batch"):
        solve(problem_of(network, name, val=[]), name)
    with pytest.raises(DsaError, match="nothing to evaluate on"):
        solve(problem_of(network, name, example_inputs=()), name)
    if name != "knapsack":
        one = [(torch.randn(1, 3, 1, 1), torch.tensor([0]))]
        with pytest.raises(DsaError, match="larger batches"):
            solve(problem_of(network, name, val=one, options={"statistics": "batch"}), name)
    bad = [(torch.randn(2, 3, 8, 8), torch.tensor([0, 9]))]
    with pytest.raises(DsaError, match="classes"):
        solve(problem_of(network, name, val=bad), name)


@every
def test_baseline_is_registered_after_dsa(network: Network, name: str) -> None:
    assert available_methods()[0] == "dsa"
    assert (solve(problem_of(network, name, 1.0), name).alpha == 1.0).all()
