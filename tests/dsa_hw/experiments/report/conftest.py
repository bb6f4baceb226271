"""A result that several pages show."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dsa_hw


def small_dense() -> nn.Module:
    """A small network with fixed weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.ReLU(), nn.Conv2d(24, 8, 3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    ).eval()  # fmt: skip


@pytest.fixture(scope="session")
def small_result() -> dsa_hw.Allocation:
    """A small network under two budgets, with an accuracy and a largest drop."""
    model = small_dense()
    images = torch.randn(200, 3, 12, 12)
    val = [(images, model(images).argmax(1))]
    budgets = [dsa_hw.FlopsBudget("50%"), dsa_hw.ParamsBudget("60%")]
    result = dsa_hw.allocate(model, budgets, example_inputs=images[:1], val=val, method="uniform", progress=False)
    return result.assess(model, val, max_drop=0.5)
