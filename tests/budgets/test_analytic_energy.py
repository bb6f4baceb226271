"""Estimated energy: a sum by hand, gradients, and the budget that uses it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from budgets import EstimatedEnergyBudget, estimated_energy
from budgets.technologies import TECHNOLOGIES
from dsa_hw.channels import ChannelGroups, find_groups, shrink

MINE = {"mac": 2.0, "byte": {"dram": 100.0, "large": 10.0, "small": 1.0}, "width": 2}


class Small(nn.Module):
    """Convolution, normalisation, activation, a residual convolution, a mean and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.head((x + self.second(x)).mean((2, 3)))


@pytest.fixture(scope="module")
def groups() -> ChannelGroups:
    torch.manual_seed(0)
    return find_groups(Small().eval(), (torch.randn(1, 3, 4, 4),))


def by_hand(c: int) -> float:
    """Joules of the small network at width c, on 16 pixels, with the figures of ``MINE``."""
    macs = 16 * (27 * c + c * c) + 5 * c
    weights = 27 * c + 4 * c + (c * c + c) + (5 * c + 5)  # a normalisation reads scale, shift, mean and variance
    activations = 16 * (3 + c)  # first: reads the image, writes c channels; norm and activation on the way
    activations += 16 * (c + c)  # second
    activations += 16 * 3 * c  # the addition reads two and writes one
    activations += 16 * c + c  # mean
    activations += c + 5  # head
    return 1e-12 * (2.0 * macs + 2 * 111.0 * weights + 2 * 11.0 * activations)


def test_energy_of_a_small_network_equals_the_sum_by_hand(groups: ChannelGroups) -> None:
    cost = estimated_energy(groups, MINE)
    assert cost.name == "estimated energy"
    assert cost.unit == "J"
    table = pd.DataFrame([[c] * len(groups) for c in range(1, 9)], columns=list(groups.names))
    assert len(groups) == 1
    assert cost.predict(table).tolist() == pytest.approx([by_hand(c) for c in range(1, 9)], rel=1e-12)
    assert cost.dense == pytest.approx(by_hand(8), rel=1e-12)
    assert cost(np.array([0.5])) == pytest.approx(by_hand(4), rel=1e-12)
    assert float(cost.upper(np.array([0.5]))) == pytest.approx(by_hand(4), rel=1e-12)
    assert "estimated by the analytic model" in cost.estimated


@pytest.mark.parametrize("name", TECHNOLOGIES)
@settings(max_examples=10)
@given(data=st.data())
def test_gradient_equals_finite_differences(name: str, data: st.DataObject) -> None:
    from tests.budgets.conftest import make_groups

    fake = make_groups(size=5, operations=12, seed=data.draw(st.integers(0, 50)))
    cost = estimated_energy(fake, name)
    alpha = np.array(data.draw(st.lists(st.floats(0.05, 1.0), min_size=5, max_size=5)))
    gradient = cost.gradient(alpha)
    step = 1e-4
    for k in range(5):
        d = step * np.eye(5)[k]
        assert gradient[k] == pytest.approx(float(cost(alpha + d) - cost(alpha - d)) / (2 * step), rel=1e-6, abs=1e-18)
    leaf = torch.tensor(alpha, requires_grad=True)
    cost.value(leaf).backward()
    assert leaf.grad is not None
    assert leaf.grad.numpy() == pytest.approx(gradient, rel=1e-9)
    assert (gradient >= 0).all(), "fewer channels never cost more"


def test_a_shrunk_network_costs_what_was_predicted(groups: ChannelGroups) -> None:
    small = shrink(Small().eval(), groups, [np.arange(3)])
    again = estimated_energy(find_groups(small, (torch.randn(1, 3, 4, 4),)), "7nm").dense
    predicted = estimated_energy(groups, "7nm").predict(pd.DataFrame([[3]], columns=list(groups.names)))
    assert again == pytest.approx(float(predicted.iloc[0]), rel=1e-12)


def test_the_budget_uses_its_technology(groups: ChannelGroups, tmp_path: Path) -> None:
    budget = EstimatedEnergyBudget("60%", technology="7nm-int8")
    assert str(budget) == "estimated energy <= 60% of the dense network"
    cost = budget.cost(groups)
    assert cost.technology is TECHNOLOGIES["7nm-int8"]
    assert budget.limit(cost.dense) == pytest.approx(0.6 * cost.dense)
    assert EstimatedEnergyBudget("1uJ").cost(groups).technology is TECHNOLOGIES["45nm"]
    path = tmp_path / "chip.json"
    path.write_text(json.dumps({**MINE, "name": "chip", "paths": {"weights": ["dram"], "activations": ["small"]}}))
    own = EstimatedEnergyBudget("60%", technology=path)
    assert own.cost(groups).dense < EstimatedEnergyBudget("60%", technology=MINE).cost(groups).dense
    assert "chip" in own.cost(groups).estimated
    assert hash(own) is not None
