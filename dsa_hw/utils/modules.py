"""Training modes, devices, weights and digests of modules."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from dsa_hw.errors import ModelError
from dsa_hw.utils.text import one_line

__all__ = ["device_of", "evaluating", "load_weights", "modes_kept", "weights_digest"]


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the training mode of every module when the body ends."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode, and restore the mode of every module when the body ends."""
    with modes_kept(model):
        model.eval()
        yield


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter or buffer, or the CPU where there is none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def load_weights(model: nn.Module, weights: Mapping[str, Any], name: str) -> None:
    """Load a state dict in place.

    Args:
        model: The network.
        weights: Its state dict.
        name: The network in the error message.

    Raises:
        ModelError: The weights are those of another network.
    """
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ModelError(
            f"The weights do not fit {name}. Give the state dict that was saved from this network "
            f"({one_line(error, 200)})."
        ) from error


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers with their names, as hexadecimal digits."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        found.update(np.ascontiguousarray(tensor.detach().cpu().float().numpy()).tobytes())
    return found.hexdigest()
