"""Budgets: classes, costs of counted budgets, and reading them from untrusted files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import budgets
from budgets import (
    Budget,
    CountedBudget,
    EnergyBudget,
    EstimatedEnergyBudget,
    FlopsBudget,
    LatencyBudget,
    MeasuredBudget,
    MemoryBudget,
    ParamsBudget,
)
from budgets.budget import BUDGETS
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


def test_counted_budgets_return_the_counted_cost(groups: ChannelGroups) -> None:
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


@pytest.mark.parametrize("abstract", [Budget, CountedBudget, MeasuredBudget])
def test_abstract_budgets_cannot_be_made(abstract: type[Budget]) -> None:
    with pytest.raises(BudgetError, match=r"abstract.*LatencyBudget"):
        abstract("50%")


def test_each_budget_is_either_counted_or_measured() -> None:
    assert all(issubclass(cls, CountedBudget) != issubclass(cls, MeasuredBudget) for cls in BUDGETS.values())


def counter() -> float:
    """An energy meter of the user's own."""
    return 0.0


@pytest.mark.parametrize(
    "budget",
    [
        LatencyBudget("5.123456789012345ms", target="torch/cpu", confidence=0.9, quantile=0.95),
        LatencyBudget("33.333333333333336%"),
        EnergyBudget("40mJ", target="torch/cuda"),
        EstimatedEnergyBudget("60%", technology="7nm-int8"),
        FlopsBudget("1.2G", convention="paper"),
        ParamsBudget("2M"),
        MemoryBudget("64MiB"),
    ],
)
def test_a_budget_read_from_its_dict_is_equal(budget: Budget) -> None:
    content = json.loads(json.dumps(budget.to_dict()))
    again = Budget.from_dict(content, counter=None, technology=None)
    assert type(again) is type(budget)
    assert again.quantity == budget.quantity
    assert str(again) == str(budget)
    assert again.to_dict() == content


def test_code_and_paths_are_not_written_and_must_be_given_again(tmp_path: Path) -> None:
    chip = {"mac": 1.0, "byte": {"dram": 1.0, "large": 1.0, "small": 1.0}}
    path = tmp_path / "chip.json"
    path.write_text(json.dumps(chip))
    for budget, name, value in (
        (EnergyBudget("60%", counter=counter), "counter", counter),
        (EnergyBudget("60%", counter="os:getpid"), "counter", counter),
        (EstimatedEnergyBudget("60%", technology=path), "technology", path),
        (EstimatedEnergyBudget("60%", technology=chip), "technology", chip),
    ):
        content = budget.to_dict()
        assert content == {"kind": type(budget).__name__, "amount": "60.0%", "own": [name]}
        with pytest.raises(BudgetError, match=f"--{name}"):
            Budget.from_dict(content)
        assert getattr(Budget.from_dict(content, **{name: value}), name) is value


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"kind": "fit", "amount": "50%"}, "Unknown kind of budget 'fit'"),
        ({"kind": "Budget", "amount": "50%"}, "Unknown kind"),
        ({"kind": ["FlopsBudget"], "amount": "50%"}, "Unknown kind"),
        ({"kind": "LatencyBudget"}, "not a quantity"),
        ({"kind": "LatencyBudget", "amount": "50%", "profile": "/etc/passwd"}, "cannot set the option 'profile'"),
        ({"kind": "EnergyBudget", "amount": "50%", "counter": "os:getpid"}, "cannot set the option 'counter'"),
        ({"kind": "EnergyBudget", "amount": "50%", "own": ["profile"]}, "'own' may list counter"),
        ({"kind": "EstimatedEnergyBudget", "amount": "50%", "technology": "chip.json"}, "got 'chip.json'"),
        ({"kind": "FlopsBudget", "amount": "50%", "convention": "other"}, "counted, paper; got 'other'"),
        ({"kind": "LatencyBudget", "amount": "50%", "target": {"a": 1}}, "must be text or a number"),
        ({"kind": "LatencyBudget", "amount": "50%", "quantile": True}, "must be text or a number"),
    ],
)
def test_a_file_chooses_neither_code_nor_a_path(content: dict[str, Any], words: str) -> None:
    with pytest.raises(BudgetError, match=words):
        Budget.from_dict(content)
