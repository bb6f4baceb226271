"""Budgets on a real network: analytic budgets give their cost, physics features agree with counted FLOPs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import budgets
from budgets import FlopsBudget, MemoryBudget, ParamsBudget, physics_features
from dsa_hw.channels import ChannelGroups, find_groups
from dsa_hw.errors import BudgetError


@pytest.fixture(scope="module")
def groups() -> ChannelGroups:
    """Dense, depthwise and pointwise convolutions, a residual sum and a classifier."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 16, 3, 2, 1, bias=False)
            self.expand, self.depth = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3, 1, 1, groups=32)
            self.project, self.head = nn.Conv2d(32, 16, 1), nn.Linear(16, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.stem(x))
            y = self.project(nn.functional.silu(self.depth(self.expand(x))))
            return self.head((x + y).mean((2, 3)))  # type: ignore[no-any-return]

    return find_groups(Net().eval(), (torch.zeros(1, 3, 32, 32),))


def test_features_agree_with_counted_flops(groups: ChannelGroups) -> None:
    phi = physics_features(groups)
    assert {"spatial work", "pointwise work", "depthwise work", "matrix work", "transcendental bytes"} <= set(phi.names)
    alpha = np.random.default_rng(0).uniform(0.1, 1, (10, len(groups)))
    work = [j for j, name in enumerate(phi.names) if name.endswith("work")]
    np.testing.assert_allclose(phi(alpha)[:, work] @ phi.dense[work], budgets.flops(groups)(alpha), rtol=1e-12)


def test_analytic_budgets_know_their_cost(groups: ChannelGroups) -> None:
    for budget, dense in (
        (FlopsBudget("50%"), budgets.flops(groups).dense),
        (ParamsBudget("50%"), budgets.params(groups).dense),
        (MemoryBudget("50%"), budgets.activation_memory(groups).dense),
    ):
        cost = budget.cost(groups)
        assert cost.dense == dense
        assert budget.limit(cost.dense) == pytest.approx(0.5 * dense)
    paper = FlopsBudget("50%", convention="paper").cost(groups).dense
    assert paper < budgets.flops(groups).dense
    with pytest.raises(BudgetError, match="above the dense network"):
        ParamsBudget("2M").limit(budgets.params(groups).dense)
