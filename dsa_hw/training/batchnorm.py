"""Batch-norm statistics: those of each batch, and new ones after weights or widths have changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from dsa_hw.training.loaders import on_device
from dsa_hw.training.losses import Loss, OwnLoss, autocast, checked_loss, outputs_of
from dsa_hw.utils.modules import device_of, evaluating, modes_kept

__all__ = ["batch_statistics", "recalibrate"]


def _norms(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    kind = nn.modules.batchnorm._BatchNorm
    return [m for m in model.modules() if isinstance(m, kind) and m.track_running_stats]


@contextlib.contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Normalise each batch by its own statistics, with all other modules in evaluation mode.

    Modes and running statistics are the same afterwards as before.
    """
    norms = _norms(model)
    with evaluating(model):
        for norm in norms:
            norm.train()
            norm.track_running_stats = False  # a momentum of 0 would let NaN through: 0 * NaN is NaN
        try:
            yield
        finally:
            for norm in norms:
                norm.track_running_stats = True


@torch.no_grad()
def recalibrate(
    model: nn.Module, loader: Iterable[Any], batches: int = 20, precision: str = "fp32", loss: Loss | None = None
) -> None:
    """Measure the batch-norm statistics again, in place; needed after weights or widths have changed.

    Args:
        model: The network. Its modes stay as they are.
        loader: Loader of (inputs, targets).
        batches: How many batches to average over, at most.
        precision: "fp32", "bf16" or "fp16".
        loss: The loss of the training; an `OwnLoss` runs the network itself.
    """
    norms = _norms(model)
    if not norms:
        return
    device, momenta = device_of(model), [norm.momentum for norm in norms]
    with modes_kept(model):
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain average over all batches
            norm.train()
        try:
            for batch, _ in zip(loader, range(batches), strict=False):
                moved = on_device(batch, device)
                with autocast(precision, device):
                    if isinstance(loss, OwnLoss):
                        checked_loss(model, moved, loss)
                    else:
                        outputs_of(model, moved[0])
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
