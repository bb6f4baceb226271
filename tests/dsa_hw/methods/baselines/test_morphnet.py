"""MorphNet: the weighted penalty and the width multiplier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsa_hw.methods.baselines import allocate_morphnet, train_morphnet
from dsa_hw.methods.baselines._units import Gammas, gamma_scores
from tests.fakes.problems import Network, problem_of, used


def test_penalty_is_larger_where_a_unit_costs_more(network: Network) -> None:
    class OneGroup:
        """Only group k costs anything."""

        def __init__(self, k: int) -> None:
            self.weights = np.eye(len(network[1]))[k]

        def value(self, alpha: Tensor) -> Tensor:
            return 1e-3 + alpha @ torch.from_numpy(self.weights)

        def gradient(self, alpha: Any) -> Any:
            return np.broadcast_to(self.weights, np.shape(alpha)).copy()

    groups = network[1]
    k = next(k for k, m in enumerate(groups.members) if "first.0" in m)
    means = []
    for chosen in (k, (k + 1) % len(groups)):
        problem = problem_of(network, "morphnet", costs=[OneGroup(chosen)], limits=[0.5], epochs=2)
        gamma = Gammas(train_morphnet(problem), groups).reduced("amax").detach().numpy()
        means.append(np.split(gamma, groups.offsets[1:-1])[k].mean())
    assert means[0] < 0.8 * means[1]


def test_width_multiplier_meets_the_budget_after_a_given_threshold(network: Network) -> None:
    problem = problem_of(network, "morphnet", 0.5, options={"threshold": 0.5})
    proposal = allocate_morphnet(problem, problem.model)
    assert used(problem, proposal.alpha)[0] == pytest.approx(1.0, abs=1e-9)
    omega = float(proposal.history["omega"].iloc[0])
    alive = np.array([(s > 0.5).mean() for s in gamma_scores(problem.model, problem.groups, "amax")])
    free = proposal.alpha < 1.0
    np.testing.assert_allclose(proposal.alpha[free], omega * alive[free], rtol=1e-9)
