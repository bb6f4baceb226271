"""From a proposal to a network."""

from __future__ import annotations

import numpy as np
import torch

from dsa_hw.channels import masked, select_channels
from dsa_hw.methods.problem import Proposal, realise
from tests.fakes.problems import Network, problem_of


def test_realised_network_equals_the_masked_one_at_the_given_widths(network: Network) -> None:
    problem = problem_of(network)
    widths = np.maximum(problem.groups.sizes // 2, 1)
    found = realise(problem, Proposal(np.ones(len(widths)), problem.model), widths)
    assert [len(units) for units in found.kept] == widths.tolist()
    x = torch.randn(4, 3, 8, 8)
    with torch.no_grad(), masked(problem.model, problem.groups, found.kept):
        expected = problem.model(x)
    torch.testing.assert_close(found.model(x), expected, rtol=1e-4, atol=1e-5)


def test_scores_of_the_proposal_come_before_the_importance_of_the_problem(network: Network) -> None:
    problem = problem_of(network, importance="l1")
    sizes = problem.groups.sizes
    widths = np.maximum(sizes // 2, 1)
    ascending = [np.arange(float(size)) for size in sizes]
    by_scores = realise(problem, Proposal(np.ones(len(sizes)), problem.model, ascending), widths)
    assert [units.tolist() for units in by_scores.kept] == [
        list(range(size - width, size)) for size, width in zip(sizes, widths, strict=True)
    ]
    by_problem = realise(problem, Proposal(np.ones(len(sizes)), problem.model), widths)
    expected = select_channels(problem.model, problem.groups, widths, "l1")
    assert all(np.array_equal(a, b) for a, b in zip(by_problem.kept, expected, strict=True))


def test_without_widths_keep_ratios_are_rounded_within_the_budget(network: Network) -> None:
    problem = problem_of(network, share=0.4, grid=np.full(len(network[1]), 4))
    found = realise(problem, Proposal(np.full(len(network[1]), 0.9), problem.model))
    assert problem.costs.keeps(found.widths / problem.groups.sizes)
    assert all(w % 4 == 0 or w == c for w, c in zip(found.widths, problem.groups.sizes, strict=True))
