"""Inputs for networks without data: random, with the outputs of the dense network as targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dsa_hw.errors import TrainingError
from dsa_hw.training.batchnorm import batch_statistics
from dsa_hw.utils.modules import device_of

__all__ = ["output_distance", "synthetic_batch_size", "synthetic_batches", "synthetic_inputs"]


def synthetic_batches(model: nn.Module, example_inputs: Any, size: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """Yield batches of `synthetic_inputs` without end, with the outputs of the dense network as targets.

    Args:
        model: The dense network.
        example_inputs: See `synthetic_inputs`.
        size: Examples per batch.
        seed: Seed of the random inputs.
    """
    for inputs in synthetic_inputs(example_inputs, size, seed, device_of(model)):
        with torch.no_grad(), batch_statistics(model):
            outputs = model(*inputs)
        yield (inputs[0] if len(inputs) == 1 else inputs), outputs


def synthetic_inputs(
    example_inputs: Any, size: int, seed: int, device: torch.device | None = None
) -> Iterator[tuple[Tensor, ...]]:
    """Yield random arguments like ``example_inputs`` without end.

    Images (4 axes) are noise with a 1/f spectrum, as natural images have, of random contrast. Other floating-point
    inputs are normal with the mean and the standard deviation of the example.

    Args:
        example_inputs: A tensor, or a tuple or list of tensors, of floating-point numbers.
        size: Examples per batch.
        seed: Seed of the random inputs.
        device: Where to put them.

    Raises:
        TrainingError: An input is not a tensor of floating-point numbers.
    """
    inputs = example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    if not inputs or not all(isinstance(x, Tensor) and x.is_floating_point() for x in inputs):
        raise TrainingError(
            "Inputs of this network cannot be generated, because they are not all floating-point tensors. Give a "
            "`val` or `train` loader."
        )
    rng = torch.Generator().manual_seed(seed)
    while True:
        yield tuple(_random_like(x, size, rng).to(device) for x in inputs)


def synthetic_batch_size(inputs: tuple[Any, ...]) -> int:
    """Return 32, or less for large images: a batch norm takes its statistics over examples and pixels alike."""
    pixels = max((x.shape[2:].numel() for x in inputs if isinstance(x, Tensor) and x.ndim == 4), default=1)
    return max(8, min(32, 400_000 // pixels))


def _random_like(example: Tensor, size: int, rng: torch.Generator) -> Tensor:
    shape = (size, *example.shape[1:])
    white = torch.randn(shape, generator=rng)
    if example.ndim != 4:
        deviation, mean = torch.std_mean(example.float()) if example.numel() > 1 else (torch.ones(()), torch.zeros(()))
        return (white * deviation.clamp(min=1e-3).cpu() + mean.cpu()).to(example.dtype)
    rows, columns = torch.fft.fftfreq(shape[2]), torch.fft.rfftfreq(shape[3])
    distance = (rows[:, None] ** 2 + columns**2).sqrt().clamp(min=1.0 / max(shape[2:]))
    image = torch.fft.irfft2(torch.fft.rfft2(white) / distance, s=shape[2:])
    image = image / image.std((1, 2, 3), keepdim=True)
    contrast = torch.empty(size, 1, 1, 1).uniform_(0.5, 1.5, generator=rng)
    return (image * contrast).to(example.dtype)


def output_distance(outputs: Any, targets: Any) -> Tensor:
    """Return the mean squared distance of the outputs from the targets, over the variance of the targets.

    It is 0 for equal outputs and about 1 to 2 for unrelated ones.

    Raises:
        TrainingError: There is no floating-point output.
    """
    total, count = torch.zeros(()), 0
    for found, wanted in zip(tree_leaves(outputs), tree_leaves(targets), strict=True):
        if isinstance(found, Tensor) and found.is_floating_point():
            wanted = wanted.detach().float()
            spread = (wanted - wanted.mean(0)).square().mean().clamp(min=1e-12)
            total = total.to(found.device) + (found.float() - wanted).square().mean() / spread
            count += 1
    if count == 0:
        raise TrainingError("The network has no floating-point output to compare. Give `val` and `loss`.")
    return total / count
