"""Losses with checks, and the precision in which they are computed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dsa_hw.errors import TrainingError
from dsa_hw.utils.text import one_line

__all__ = ["Loss", "autocast", "checked_loss", "checked_value", "outputs_of"]

Loss = Callable[[Any, Any], Tensor]
"""``loss(outputs, targets)``, a scalar."""


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a forward pass runs in ``precision``.

    Args:
        precision: "bf16" or "fp16" for autocast to that type; "fp32" leaves a surrounding autocast in force.
        device: The device of the network.

    Raises:
        TrainingError: The precision is unknown.
    """
    if precision == "fp32":
        return contextlib.nullcontext()
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in types:
        raise TrainingError(f"`precision` must be fp32, bf16 or fp16; got {precision!r}.")
    return torch.autocast(device.type, types[precision])


def checked_loss(model: nn.Module, batch: tuple[Any, Any], loss: Loss) -> Tensor:
    """Compute the loss of one batch, a scalar tensor.

    Args:
        model: The network; inputs that are a tuple or list are its positional arguments.
        batch: (inputs, targets) on the device of the network.
        loss: ``loss(outputs, targets)``. For ``torch.nn.functional.cross_entropy`` labels are checked first, and
            logits are converted to float32.

    Raises:
        TrainingError: The loss cannot be computed, is not a scalar or is not finite, or a label is not a class.
    """
    inputs, targets = batch
    return checked_value(outputs_of(model, inputs), targets, loss)


def outputs_of(model: nn.Module, inputs: Any) -> Any:
    """Run a network; inputs that are a tuple or list are its positional arguments."""
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def checked_value(outputs: Any, targets: Any, loss: Loss) -> Tensor:
    """Compute the loss of outputs, a scalar tensor; see `checked_loss`."""
    if loss is nn.functional.cross_entropy:
        outputs = _checked_logits(outputs, targets)
    try:
        value = loss(outputs, targets)
    except (IndexError, RuntimeError, ValueError, TypeError) as error:
        raise TrainingError(
            f"The loss cannot be computed from the outputs of the network and the targets: {one_line(error)}."
        ) from error
    if not (isinstance(value, Tensor) and value.numel() == 1):
        raise TrainingError(f"`loss` must return a scalar tensor; got {type(value).__name__}.")
    if not math.isfinite(float(value.detach())):
        raise TrainingError(
            f"The loss is {float(value.detach())}. Training has diverged, or the data contain NaN. Lower the learning "
            "rate, or check the inputs."
        )
    return value


def _checked_logits(outputs: Any, targets: Any) -> Tensor:
    """Refuse labels that are not classes here, because on a GPU the kernel of cross-entropy aborts the process."""
    if not isinstance(outputs, Tensor):
        raise TrainingError(
            f"Cross-entropy needs logits, but the network returns a {type(outputs).__name__}. Give `loss`."
        )
    if isinstance(targets, Tensor) and not targets.is_floating_point() and targets.numel() and outputs.ndim >= 2:
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= outputs.shape[1]:
            raise TrainingError(
                f"Labels run from {low} to {high}, but the network has {outputs.shape[1]} classes (0 to "
                f"{outputs.shape[1] - 1}). Map the labels, or change the last layer."
            )
    return outputs.float()
