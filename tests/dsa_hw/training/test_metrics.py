"""Accuracy and correct predictions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsa_hw.errors import TrainingError
from dsa_hw.training.metrics import accuracy, correct_predictions


def test_correct_predictions_are_in_order_and_modes_are_kept() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Identity()).train()
    model[1].eval()
    logits = torch.eye(4)
    loader = [(logits[:3], torch.tensor([0, 2, 2])), (logits[3:], torch.tensor([3]))]
    assert correct_predictions(model, loader).tolist() == [True, False, True, True]
    assert accuracy(model, loader) == 0.75
    assert [module.training for module in model] == [True, False]


def test_empty_loader_is_refused() -> None:
    with pytest.raises(TrainingError, match="no batch"):
        accuracy(nn.Identity(), [])
