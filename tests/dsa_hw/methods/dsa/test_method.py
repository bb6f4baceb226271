"""The method dsa with training data, validation data, and without data."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dsa_hw.errors import DsaError, TrainingError
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.problem import Problem, realise
from dsa_hw.methods.registry import solve
from tests.fakes.loaders import Interrupting
from tests.fakes.networks import batches, trained, with_flops


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return trained()


def problem(model: nn.Module, share: float = 0.5, **changes: Any) -> Problem:
    groups, flops, dense = with_flops(model)
    return Problem(
        model, groups, CostSet([flops], groups.sizes, [share * dense]), (torch.randn(1, 3, 8, 8),), **changes
    )


@pytest.mark.parametrize("data", ["train", "val"])
def test_keep_ratios_are_at_least_those_of_the_narrowest_width(model: nn.Module, data: str) -> None:
    """Under a tight budget groups go to their smallest width on the grid, below which no network exists."""
    steps = np.full(len(problem(model).groups), 6)
    given = problem(model, 0.45, grid=steps, options={"steps": 12}, **{data: batches(12)})
    assert given.least.tolist() == pytest.approx([min(6, c) / c for c in given.groups.sizes])
    alpha = solve(given, "dsa").alpha
    assert (alpha >= given.least).all()
    assert alpha.min() < 0.5
    free = solve(problem(model, 0.1, options={"steps": 12}, **{data: batches(12)}), "dsa").alpha
    assert (free < given.least).any(), "otherwise the assertion above cannot fail"


@pytest.mark.parametrize("data", ["train and val", "train", "val", "none"])
def test_useful_group_keeps_more_within_the_budget_with_any_data(model: nn.Module, data: str) -> None:
    """In the mean over four draws of the data, because 256 noisy images are too few."""
    useful, useless = [], []
    for seed in range(4):
        loaders: dict[str, Any] = {"train": batches(24)} if "train" in data else {}
        if "val" in data:
            loaders["val"] = batches(8, seed=5 + seed)
        before = copy.deepcopy(model.state_dict())
        given = problem(model, **loaders, options={"steps": 24, "batch_size": 16}, seed=seed)
        proposal = solve(given, "dsa")
        network = realise(given, proposal)
        assert given.costs.keeps(network.widths / given.groups.sizes)
        ratio = dict(zip(given.groups.names, proposal.alpha, strict=True))
        useful.append(ratio["useful"])
        useless.append(ratio["useless"])
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        assert network.model(torch.randn(2, 3, 8, 8)).shape == (2, 4)
        assert len(proposal.history) == 24
    assert np.mean(useful) > np.mean(useless)


def test_dense_network_within_the_budget_is_proposed_without_training(model: nn.Module) -> None:
    class Untouchable(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise AssertionError("nothing may be trained")

    proposal = solve(problem(model, 1.0, train=Untouchable(batches(1)), val=batches(1)), "dsa")
    assert (proposal.alpha == 1.0).all()
    assert proposal.model is model


def test_unknown_options_and_methods_and_wrong_epochs_are_refused(model: nn.Module) -> None:
    with pytest.raises(DsaError, match=r"Unknown option 'stesp'\. Did you mean 'steps'"):
        solve(problem(model, options={"stesp": 3}), "dsa")
    with pytest.raises(DsaError, match="Did you mean 'uniform'"):
        solve(problem(model), "unifrom")
    with pytest.raises(TrainingError, match="must be positive"):
        solve(problem(model, train=batches(1), val=batches(1), epochs=0), "dsa")


def test_interrupted_allocation_with_training_continues_to_the_same_proposal(model: nn.Module, tmp_path: Path) -> None:
    val = batches(2, seed=5)
    whole = solve(problem(model, train=batches(24), val=val, options={"steps": 24}))
    with pytest.raises(KeyboardInterrupt):
        solve(problem(model, train=Interrupting(batches(24), at=10), val=val, options={"steps": 24}, folder=tmp_path))
    fetched = Interrupting(batches(24), at=-1)
    again = solve(problem(model, train=fetched, val=val, options={"steps": 24}, folder=tmp_path))
    np.testing.assert_array_equal(again.alpha, whole.alpha)
    assert torch.equal(again.model.linear.weight, whole.model.linear.weight)
    assert len(again.history) == 24
