"""Budgets as text in Python, as on the command line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dsa_hw
from budgets.notation import as_budgets
from dsa_hw import BudgetError, FlopsBudget, LatencyBudget

LATENCY, FLOPS = LatencyBudget("5ms"), FlopsBudget("50%")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("latency=5ms", [LATENCY]),
        ("latency=5ms, flops=50%", [LATENCY, FLOPS]),
        (["latency=5ms", FLOPS], [LATENCY, FLOPS]),
        (FLOPS, [FLOPS]),
    ],
)
def test_text_and_objects_stand_for_the_same_budgets(given: Any, wanted: list[Any]) -> None:
    assert as_budgets(given) == wanted


@pytest.mark.parametrize("given", ["5ms", "speed=5ms", [], 5, "latency=5ms,,", None])
def test_other_values_are_refused(given: Any) -> None:
    with pytest.raises(BudgetError, match=r"latency=5ms|Available costs"):
        as_budgets(given)


def test_allocate_and_allocator_accept_text() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
    example = torch.zeros(1, 3, 8, 8)
    found = dsa_hw.allocate(model, "flops=50%", example_inputs=example, method="uniform", progress=False)
    assert found.certificate.verdict == dsa_hw.Verdict.MET
    allocator = dsa_hw.Allocator(model, dsa_hw.find_groups(model, example), "params=50%", steps=3)
    assert allocator.costs.budgets == (dsa_hw.ParamsBudget("50%"),)
