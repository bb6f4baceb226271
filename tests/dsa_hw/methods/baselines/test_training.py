"""Baselines that train: penalties, precision, and one training for several budgets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from dsa_hw.errors import DsaError
from dsa_hw.methods import baselines
from dsa_hw.methods.baselines._units import Gammas, Norms
from dsa_hw.methods.registry import solve
from tests.fakes.problems import TRAINED, Network, loader, problem_of, used

each = pytest.mark.parametrize("name", TRAINED)
penalised = pytest.mark.parametrize("name", ["ssl", "morphnet"])
TRAIN = {"ssl": baselines.train_ssl, "morphnet": baselines.train_morphnet}
ALLOCATE = {"ssl": baselines.allocate_ssl, "morphnet": baselines.allocate_morphnet}


@each
def test_missing_training_data_is_refused(network: Network, name: str) -> None:
    with pytest.raises(DsaError, match="`train` loader"):
        solve(problem_of(network, name, train=None), name)


@penalised
def test_one_training_serves_several_budgets(network: Network, name: str) -> None:
    problem = problem_of(network, name, 0.7)
    trained = TRAIN[name](problem)
    assert trained is not problem.model
    shares = (0.7, 0.4)
    alphas = [ALLOCATE[name](problem_of(network, name, share), trained).alpha for share in shares]
    assert (alphas[0] >= alphas[1] - 1e-12).all()
    assert (alphas[0] > alphas[1]).any()
    np.testing.assert_array_equal(solve(problem_of(network, name, 0.4), name).alpha, alphas[1])


@penalised
def test_penalty_shrinks_what_it_penalises(network: Network, name: str) -> None:
    model, groups, _ = network

    def size(module: nn.Module) -> float:
        values = Norms(module, groups).rms() if name == "ssl" else Gammas(module, groups).reduced("amax")
        return float(values.detach().mean())

    without, with_penalty = (
        size(TRAIN[name](problem_of(network, name, epochs=2, options={"pull": pull}, train=loader(shuffle=False))))
        for pull in (0.0, 0.5)
    )
    # The penalty alone would remove half. The loss counteracts it in part.
    assert with_penalty < 0.85 * without
    assert with_penalty > 0.3 * size(model)


@each
def test_bf16_and_channels_last_meet_the_budget_and_keep_float32_weights(network: Network, name: str) -> None:
    options = {"precision": "bf16", "channels_last": True, "lr": 0.005}
    problem = problem_of(network, name, epochs=0.5, options=options)
    proposal = solve(problem, name)
    assert used(problem, proposal.alpha).max() <= 1.0
    assert all(p.dtype == torch.float32 for p in proposal.model.parameters())
    with pytest.raises(DsaError, match="precision"):
        solve(problem_of(network, name, options={"precision": "fp8"}), name)


def test_exploding_loss_is_refused(network: Network) -> None:
    with pytest.raises(DsaError, match="learning rate"):
        baselines.ssl(problem_of(network, "ssl", options={"lr": 1e12}, epochs=3))
