"""Distillation: a pruned network learns the dense network's outputs, from inputs without labels.

The loss compares outputs (Hinton et al. 2015): for logits (N, classes) the Kullback-Leibler divergence at a
temperature, for everything else the squared difference over the variance of the dense network's outputs. Images are
flipped, shifted and, in every second step, mixed in pairs at random, so that a few hundred of them last longer: the
dense network answers for a mixture too (Wang et al. 2020, active mixup).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from dsa_hw.errors import TrainingError
from dsa_hw.training.loaders import unlabelled
from dsa_hw.utils.modules import device_of, evaluating, modes_kept

__all__ = ["TEMPERATURE", "distil", "distillation_loss"]

TEMPERATURE = 4.0
_LR = 2e-3  # of Adam at its highest; ResNet-20 at 33% of the FLOPs: 1e-3 and 5e-3 end lower
_SHIFT = 8  # images are shifted by up to this part of their side


def distillation_loss(outputs: Any, wanted: Any, temperature: float = TEMPERATURE) -> Tensor:
    """Return how far outputs are from those of the dense network, averaged over all floating-point outputs.

    Args:
        outputs: Outputs of the pruned network: a tensor, or tensors in tuples, lists, dicts and dataclasses.
        wanted: Outputs of the dense network.
        temperature: Of the softmax; gradients are scaled by its square, so that it does not change their size.

    Raises:
        TrainingError: There is no floating-point output.
    """
    pairs = [
        (a.float(), b.detach().float())
        for a, b in zip(tree_leaves(outputs), tree_leaves(wanted), strict=True)
        if isinstance(a, Tensor) and a.is_floating_point()
    ]
    if not pairs:
        raise TrainingError("The network has no floating-point output to distil.")
    terms = []
    for a, b in pairs:
        if b.ndim == 2 and b.shape[1] > 1:
            ours, theirs = (functional.log_softmax(x / temperature, 1) for x in (a, b))
            terms.append(functional.kl_div(ours, theirs, log_target=True, reduction="batchmean") * temperature**2)
        else:
            spread = (b - b.mean(0)).square().mean().clamp(min=1e-12)
            terms.append((a - b).square().mean() / spread)
    return torch.stack(terms).mean()


def distil(
    small: nn.Module,
    dense: nn.Module,
    images: Iterable[Any],
    *,
    steps: int = 600,
    limit: int = 512,
    batch_size: int = 64,
    batch_statistics: bool = True,
    time_limit: float | None = None,
    seed: int = 0,
    listener: Callable[[str, float], None] | None = None,
) -> int:
    """Train a pruned network to give the dense network's outputs, in place.

    Args:
        small: The pruned network.
        dense: The teacher; not changed.
        images: Batches of inputs, or of (inputs, anything). Labels are not used.
        steps: Steps of Adam.
        limit: How many inputs are used, at most.
        batch_size: Inputs in a step.
        batch_statistics: Whether batch norms use and update the statistics of each batch, which suits real images.
            Otherwise their statistics stay as they are, which suits synthetic inputs.
        time_limit: Seconds after which to stop; the learning rate falls with the time used and with the steps.
        seed: Seed of the order of inputs.
        listener: Called with a text and the share that is done.

    Returns:
        The number of steps that were made.

    Raises:
        TrainingError: There are no usable inputs, or the loss is not finite.
    """
    inputs = unlabelled(images, limit, device_of(dense))
    count = len(inputs[0])
    size = min(batch_size, count)
    generator = torch.Generator().manual_seed(seed)
    parameters = [p for p in small.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(parameters, lr=_LR)
    begin, made = time.monotonic(), 0
    with modes_kept(small), evaluating(dense), torch.enable_grad():
        small.train(batch_statistics)
        for module in small.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        while made < steps:
            used = 0.0 if time_limit is None else (time.monotonic() - begin) / max(time_limit, 1e-9)
            share = max(made / steps, used)
            if share >= 1:
                break
            if listener is not None:
                listener("distilling", share)
            for group in optimiser.param_groups:
                group["lr"] = (
                    _LR * min((made + 1) / 20, 1.0) * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * share)).item())
                )
            chosen = torch.randperm(count, generator=generator)[:size]
            batch = _varied(tuple(x[chosen.to(x.device)] for x in inputs), generator, mixed=made % 2 == 1)
            with torch.no_grad():
                wanted = dense(*batch)
            loss = distillation_loss(small(*batch), wanted)
            if not bool(torch.isfinite(loss)):
                raise TrainingError(
                    "The loss of distillation is not finite. Check the inputs, or use recovery='refit'."
                )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            made += 1
    return made


def _varied(batch: tuple[Tensor, ...], generator: torch.Generator, mixed: bool) -> tuple[Tensor, ...]:
    """Flip, shift and, if ``mixed``, mix a batch of images at random; other inputs stay as they are."""
    if len(batch) != 1 or batch[0].ndim != 4 or not batch[0].is_floating_point():
        return batch
    (x,) = batch
    flip = (torch.rand(len(x), generator=generator) < 0.5).to(x.device)
    x = torch.where(flip[:, None, None, None], x.flip(3), x)
    reach = [min(side // _SHIFT, side - 1) for side in x.shape[2:]]
    padded = functional.pad(x, (reach[1], reach[1], reach[0], reach[0]), mode="reflect")
    row, column = (int(torch.randint(2 * r + 1, (1,), generator=generator)) for r in reach)
    x = padded[:, :, row : row + x.shape[2], column : column + x.shape[3]]
    if mixed:
        share = torch.rand((len(x), 1, 1, 1), generator=generator).to(x)
        x = share * x + (1 - share) * x[torch.randperm(len(x), generator=generator).to(x.device)]
    return (x,)
