"""Checked losses and precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dsa_hw.errors import TrainingError
from dsa_hw.training.losses import autocast, checked_loss

X, Y = torch.randn(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])


def test_loss_is_that_of_the_function_and_has_a_gradient() -> None:
    model = nn.Linear(5, 3)
    value = checked_loss(model, (X, Y), nn.functional.cross_entropy)
    assert torch.equal(value, nn.functional.cross_entropy(model(X), Y))
    value.backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize(
    ("batch", "loss", "words"),
    [
        ((X, Y + 1), nn.functional.cross_entropy, "Labels run from 1 to 3, but the network has 3 classes"),
        ((X, Y[:4]), nn.functional.cross_entropy, "cannot be computed"),
        ((X * float("nan"), Y), nn.functional.cross_entropy, "loss is nan"),
        ((X, Y), lambda outputs, targets: outputs, "scalar"),
    ],
    ids=["labels", "shapes", "nan", "not a scalar"],
)
def test_unusable_losses_are_refused_with_the_reason(batch: Any, loss: Any, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        checked_loss(nn.Linear(5, 3), batch, loss)


def test_precision_sets_autocast_and_fp32_leaves_it_alone() -> None:
    cpu, model = torch.device("cpu"), nn.Linear(5, 3)
    with autocast("bf16", cpu):
        assert model(X).dtype == torch.bfloat16
        with autocast("fp32", cpu):
            assert model(X).dtype == torch.bfloat16
    with autocast("fp32", cpu):
        assert model(X).dtype == torch.float32
    with pytest.raises(TrainingError, match="'fp8'"):
        autocast("fp8", cpu)
