"""What a network computes on a fixed input: a few numbers that tell it from other weights and other architectures.

Names and shapes of tensors do not tell a ReLU from a GELU, nor trained from random weights. A plan therefore stores
some outputs of its pruned network, and whoever loads the network again compares them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Final

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dsa_hw.errors import ModelError
from dsa_hw.utils.documents import Document
from dsa_hw.utils.modules import device_of, evaluating

__all__ = ["ReferenceOutput", "Sha256", "reference_output", "tolerance"]

_VALUES: Final = 64
# Between processors and versions of torch, outputs of trained networks in 32 bits differ by less than 1e-4 of the
# largest one, in 16 bits by about 1e-2.
_TOLERANCE: Final = 1e-3
_TOLERANCE_16_BITS: Final = 0.05

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ReferenceOutput(Document):
    """Outputs of a network in evaluation mode on a fixed input.

    Attributes:
        input: SHA-256 of the input.
        size: Number of values in all outputs.
        values: Up to 64 of them, evenly spaced.
    """

    input: Sha256
    size: int = Field(ge=1)
    values: tuple[float, ...] = Field(min_length=1, max_length=_VALUES)

    def difference(self, other: ReferenceOutput) -> float:
        """Return the largest difference over the largest value; infinity where input or number of values differ."""
        if (self.input, self.size, len(self.values)) != (other.input, other.size, len(other.values)):
            return float("inf")
        here, there = np.array(self.values), np.array(other.values)
        largest = float(np.abs(here).max())
        gap = float(np.abs(here - there).max())
        return gap / largest if largest > 0 else (0.0 if gap == 0 else float("inf"))


def reference_output(model: nn.Module, shapes: Sequence[Sequence[int]], like: Sequence[Any]) -> ReferenceOutput:
    """Run a network on the fixed input.

    Args:
        model: The network; not changed.
        shapes: Shape of each input.
        like: Tensors whose types the inputs have. Floating-point inputs are noise; all others are zeros, which are
            valid as indices.

    Returns:
        Some of its outputs.

    Raises:
        ModelError: The network has no output, or one that is not finite.
    """
    inputs = [_fixed_input(tuple(shape), example) for shape, example in zip(shapes, like, strict=True)]
    digest = hashlib.sha256()
    for tensor in inputs:
        digest.update(repr((str(tensor.dtype), tuple(tensor.shape))).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    device = device_of(model)
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), evaluating(model), torch.random.fork_rng(devices):
        torch.manual_seed(0)  # for networks that draw random numbers in evaluation mode too
        outputs = model(*(tensor.to(device) for tensor in inputs))
    parts = [leaf.detach().cpu().double().reshape(-1) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    values = torch.cat(parts).numpy() if parts else np.empty(0)
    if not values.size:
        raise ModelError("The network has no output that could be compared.")
    chosen = values[np.linspace(0, values.size - 1, min(values.size, _VALUES)).round().astype(np.int64)]
    if not np.isfinite(chosen).all():
        raise ModelError("The outputs of the pruned network have NaN or infinity. Check its weights.")
    return ReferenceOutput(input=digest.hexdigest(), size=int(values.size), values=tuple(map(float, chosen)))


def tolerance(model: nn.Module) -> float:
    """Return the largest accepted `ReferenceOutput.difference` of a network from itself on another computer."""
    kinds = {parameter.dtype for parameter in model.parameters()}
    return _TOLERANCE_16_BITS if kinds & {torch.float16, torch.bfloat16} else _TOLERANCE


def _fixed_input(shape: tuple[int, ...], like: Any) -> Tensor:
    """Return uniform noise with mean 0 and variance 1, equal with every version of torch and NumPy (splitmix64)."""
    dtype = like.dtype if isinstance(like, Tensor) else torch.float32
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    with np.errstate(over="ignore"):
        z = np.arange(1, int(np.prod(shape, dtype=np.int64)) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    noise = ((z >> np.uint64(40)).astype(np.float64) / 2**23 - 1) * np.sqrt(3)
    return torch.from_numpy(noise.astype(np.float32)).reshape(shape).to(dtype)
