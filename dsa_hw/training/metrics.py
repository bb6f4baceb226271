"""How good a classifier is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dsa_hw.errors import TrainingError
from dsa_hw.training.loaders import on_device
from dsa_hw.training.losses import autocast, logits_of, outputs_of
from dsa_hw.utils.arrays import Bools
from dsa_hw.utils.modules import device_of, evaluating

__all__ = ["accuracy", "correct_predictions"]


@torch.no_grad()
def correct_predictions(model: nn.Module, loader: Iterable[Any], precision: str = "fp32") -> Bools:
    """Return which examples of the loader the network classifies correctly, in order, shape (N,).

    Args:
        model: The network, run in evaluation mode; its modes stay as they are.
        loader: Loader of (inputs, labels).
        precision: "fp32", "bf16" or "fp16".

    Raises:
        TrainingError: The loader gave no batch.
    """
    device = device_of(model)
    found: list[Tensor] = []
    with evaluating(model):
        for batch in loader:
            inputs, targets = on_device(batch, device)
            with autocast(precision, device):
                found.append((logits_of(outputs_of(model, inputs)).argmax(1) == targets).cpu())
    if not found:
        raise TrainingError("The loader gave no batch to evaluate on. Give one with at least one batch.")
    return torch.cat(found).numpy()


def accuracy(model: nn.Module, loader: Iterable[Any], precision: str = "fp32") -> float:
    """Return the share of correct predictions, in [0, 1]; see `correct_predictions`."""
    return float(correct_predictions(model, loader, precision).mean())
