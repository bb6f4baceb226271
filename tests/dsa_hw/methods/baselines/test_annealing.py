"""Annealing: seeds and statistics."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import torch

from dsa_hw.methods.baselines import annealing
from tests.fakes.problems import Network, loader, problem_of


def test_result_depends_on_the_seed(network: Network) -> None:
    found = [annealing(problem_of(network, "annealing", seed=s)).alpha for s in (0, 1)]
    assert not np.array_equal(*found)


def test_batch_statistics_differ_from_stored_ones_and_leave_the_model_unchanged(network: Network) -> None:
    problem = problem_of(network, options={"statistics": "batch", "steps": 3}, val=list(loader(32)))
    before = copy.deepcopy(problem.model.state_dict())
    stored = dataclasses.replace(problem, options={"statistics": "stored", "steps": 3})
    losses = [annealing(p).history["loss"].iloc[0] for p in (problem, stored)]
    assert losses[0] != losses[1]
    assert all(torch.equal(before[k], v) for k, v in problem.model.state_dict().items())
