"""Inputs without labels, or random ones, with the outputs of the dense network as targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dsa_hw.errors import TrainingError
from dsa_hw.training.batchnorm import batch_statistics
from dsa_hw.training.losses import Loss
from dsa_hw.utils.modules import device_of, evaluating

__all__ = [
    "output_distance",
    "own_targets",
    "perturbed",
    "synthetic_batch_size",
    "synthetic_batches",
    "synthetic_inputs",
]


@torch.no_grad()
def own_targets(model: nn.Module, inputs: tuple[Tensor, ...], size: int) -> tuple[list[tuple[Any, Any]], Loss]:
    """Return batches of inputs with what the dense network says of them as targets, and the loss for these.

    For outputs (N, classes) the targets are its classes and the loss is the cross entropy, which has a gradient at the
    dense network, so that Fisher information can be computed. For other outputs they are the outputs themselves and the
    loss is `output_distance`.

    Args:
        model: The dense network.
        inputs: Its positional inputs, each (N, ...).
        size: Inputs per batch.
    """
    batches: list[tuple[Any, Any]] = []
    classes = True
    with evaluating(model):
        for start in range(0, len(inputs[0]), size):
            part = tuple(x[start : start + size] for x in inputs)
            outputs = model(*part)
            classes &= isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] > 1
            batches.append((part[0] if len(part) == 1 else part, outputs))
    if not classes:
        return batches, output_distance
    return [(part, outputs.argmax(1)) for part, outputs in batches], nn.functional.cross_entropy


def perturbed(batches: Iterable[tuple[Any, Any]], seed: int) -> Iterator[tuple[Any, Any]]:
    """Yield batches whose targets are drawn about the dense network's outputs, for the Fisher information.

    `output_distance` is the negative log-likelihood of normal targets. At the dense network's own outputs its gradient
    is zero; at targets that are drawn from that distribution its mean square is the Fisher information.
    """
    rng = torch.Generator().manual_seed(seed)

    def drawn(target: Any) -> Any:
        if not (isinstance(target, Tensor) and target.is_floating_point()):
            return target
        noise = torch.randn(target.shape, generator=rng).to(target)
        return target + noise * (target - target.mean(0)).square().mean().sqrt()

    for inputs, targets in batches:
        yield inputs, tree_map(drawn, targets)


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


def synthetic_batch_size(inputs: tuple[Any, ...], most: int = 32) -> int:
    """Return ``most``, or less for large images: a batch norm takes its statistics over examples and pixels alike."""
    pixels = max((x.shape[2:].numel() for x in inputs if isinstance(x, Tensor) and x.ndim == 4), default=1)
    return max(8, min(most, 400_000 // pixels))


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
