"""The loss of a batch, with checks, and the precision in which it is computed.

Most networks need ``loss(outputs, targets)``. Networks that compute a loss of their own, such as detectors, need
``step(model, batch)``, which is kept as an `OwnLoss`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsa_hw.errors import TrainingError
from dsa_hw.training.loaders import whole_batch
from dsa_hw.utils.text import one_line

__all__ = [
    "Loss",
    "OwnLoss",
    "Step",
    "autocast",
    "batch_loss",
    "checked_loss",
    "checked_value",
    "chosen_loss",
    "logits_of",
    "outputs_of",
]

Loss = Callable[[Any, Any], Tensor]
"""``loss(outputs, targets)``, a scalar."""
Step = Callable[[nn.Module, Any], Tensor]
"""``step(model, batch)``: run the network on a batch as the loader yields it, and return the loss, a scalar."""
_LOGITS = ("logits", "out")  # what transformers and torchvision's segmentation call them


@dataclass(frozen=True)
class OwnLoss:
    """A loss that the user's function computes from the network and the whole batch."""

    step: Step

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """Refuse outputs: this loss needs the network.

        Raises:
            TrainingError: Always.
        """
        raise TrainingError("`step` computes the loss from the network and a batch; it cannot use outputs alone.")


def chosen_loss(loss: Loss | None, step: Step | None) -> Loss:
    """Return the loss of the arguments ``loss`` and ``step``: the cross entropy if both are None.

    Raises:
        TrainingError: Both are given, or one is not a function.
    """
    for name, value in (("loss", loss), ("step", step)):
        if value is not None and not callable(value):
            raise TrainingError(f"`{name}` must be a function; got {value!r}.")
    if loss is not None and step is not None:
        raise TrainingError("Give `loss` or `step`, not both: `step` computes the loss itself.")
    return OwnLoss(step) if step is not None else loss or nn.functional.cross_entropy


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
    """Compute the loss of one batch, a finite scalar; see `batch_loss`.

    Raises:
        TrainingError: The loss cannot be computed, is not a scalar or is not finite, or a label is not a class.
    """
    return _finite(batch_loss(model, batch, loss))


def batch_loss(model: nn.Module, batch: tuple[Any, Any], loss: Loss) -> Tensor:
    """Compute the loss of one batch, a scalar tensor that may be infinite or NaN.

    Args:
        model: The network.
        batch: What `dsa_hw.training.loaders.on_device` returned.
        loss: ``loss(outputs, targets)`` or an `OwnLoss`. For ``torch.nn.functional.cross_entropy`` labels are checked
            first, and logits are converted to float32; for a batch that is a dict it stands for the loss that the
            network returns.

    Raises:
        TrainingError: The loss cannot be computed or is not a scalar, or a label is not a class.
    """
    inputs, targets = batch
    if isinstance(loss, OwnLoss):
        return _scalar(loss.step(model, whole_batch(batch)), "step")
    if inputs is targets and not isinstance(inputs, Mapping):
        raise TrainingError(
            f"Loaders must yield (inputs, targets) or a dict of arguments; got a {type(inputs).__name__}. For batches "
            "of another form give step=, a function of the network and the batch that returns the loss."
        )
    return _value(outputs_of(model, inputs), targets, loss)


def outputs_of(model: nn.Module, inputs: Any) -> Any:
    """Run a network; a tuple or list is its positional arguments, a dict its keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def checked_value(outputs: Any, targets: Any, loss: Loss) -> Tensor:
    """Compute the loss of outputs, a finite scalar; see `checked_loss`."""
    return _finite(_value(outputs, targets, loss))


def _value(outputs: Any, targets: Any, loss: Loss) -> Tensor:
    if loss is nn.functional.cross_entropy:
        if isinstance(targets, Mapping):
            return _scalar(_returned_loss(outputs), "The network")
        outputs = _checked_logits(outputs, targets)
    try:
        value = loss(outputs, targets)
    except (IndexError, KeyError, AttributeError, RuntimeError, ValueError, TypeError) as error:
        advice = " Cross-entropy needs class numbers (int64); for other targets give `loss`."
        raise TrainingError(
            f"The loss cannot be computed from the outputs of the network and the targets: {one_line(error)}."
            f"{advice if loss is nn.functional.cross_entropy else ''}"
        ) from error
    return _scalar(value, "loss")


def logits_of(outputs: Any) -> Any:
    """Return the part of structured outputs that is named ``logits`` or ``out``; other outputs as they are."""
    for name in _LOGITS:
        found = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
        if not isinstance(outputs, Tensor) and isinstance(found, Tensor):
            return found
    return outputs


def _returned_loss(outputs: Any) -> Any:
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if found is None:
        raise TrainingError(
            "The network returns no loss for a batch that is a dict. Add the labels to the batch, or give loss= or "
            "step=."
        )
    return found


def _scalar(value: Any, source: str) -> Tensor:
    if not (isinstance(value, Tensor) and value.numel() == 1):
        name = source if source[0].isupper() else f"`{source}`"
        got = f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise TrainingError(f"{name} must return a scalar tensor; got {got}.")
    return value.reshape(())


def _finite(value: Tensor) -> Tensor:
    if not math.isfinite(float(value.detach())):
        raise TrainingError(
            f"The loss is {float(value.detach())}. Training has diverged, or the data contain NaN. Lower the learning "
            "rate, or check the inputs."
        )
    return value


def _checked_logits(outputs: Any, targets: Any) -> Tensor:
    """Refuse labels that are not classes here, because on a GPU the kernel of cross-entropy aborts the process."""
    outputs = logits_of(outputs)
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
