"""Inputs that look right to a network: noise, changed until batch-norm statistics are those of the training data.

Every batch norm stores the mean and the variance of its inputs over the training data. Inputs that reproduce them
(Cai et al. 2020, ZeroQ; Yin et al. 2020, DeepInversion) stand in for data that are not at hand. They minimise

    sum over batch norms of   |mean - mean_data|^2 / var_data + |sqrt(var / var_data) - 1|^2   (averages over channels)
    + 0.1 cross-entropy to random classes (for outputs (N, classes)) + 0.01 total variation (for images)

over the values of the inputs, by Adam with a learning rate that falls to zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from dsa_hw.utils.modules import device_of, evaluating

__all__ = ["can_match_statistics", "match_statistics", "statistics_distance"]

_LR = 0.1
_LABELS, _VARIATION = 0.1, 0.01  # weights of the terms besides the statistics


def _norms(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    kind = nn.modules.batchnorm._BatchNorm
    return [m for m in model.modules() if isinstance(m, kind) and m.running_mean is not None]


def can_match_statistics(model: nn.Module) -> bool:
    """Return whether the network stores statistics of its training data."""
    return any(bool((m.running_mean != 0).any()) for m in _norms(model) if m.running_mean is not None)


@contextlib.contextmanager
def _statistics(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect, during the body, how far each batch norm's input is from the stored statistics."""
    found: list[Tensor] = []

    def hook(norm: nn.modules.batchnorm._BatchNorm, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].float()
        variance, mean = torch.var_mean(x, dim=[d for d in range(x.ndim) if d != 1], unbiased=False)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = norm.running_var.float() + norm.eps
        distance = (mean - norm.running_mean.float()).square() / scale
        spread = ((variance + norm.eps) / scale).sqrt() - 1
        found.append(distance.mean() + spread.square().mean())

    handles = [norm.register_forward_pre_hook(hook) for norm in _norms(model)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def statistics_distance(model: nn.Module, inputs: Tensor) -> float:
    """Return how far the statistics of inputs are from those that a network stores, summed over its batch norms."""
    with evaluating(model), _statistics(model) as found:
        model(inputs)
    return float(torch.stack(found).sum())


def match_statistics(
    model: nn.Module,
    start: Sequence[Tensor],
    *,
    steps: int = 60,
    seed: int = 0,
    listener: Callable[[str, float], None] | None = None,
) -> list[Tensor]:
    """Return inputs that reproduce the stored batch-norm statistics of a network.

    Args:
        model: A network with one input; its weights and statistics do not change.
        start: Batches of floating-point inputs, changed separately. A batch should be large enough for statistics.
        steps: Steps of Adam for each batch.
        seed: Seed of the random classes.
        listener: Called with a text and the share that is done.

    Returns:
        Batches of the same shapes.
    """
    device = device_of(model)
    generator = torch.Generator().manual_seed(seed)
    needed = [(p, p.requires_grad) for p in model.parameters()]
    done = []
    with evaluating(model), _statistics(model) as distances:
        for parameter, _ in needed:
            parameter.requires_grad_(False)
        try:
            for number, batch in enumerate(start):
                x = batch.detach().to(device).clone().requires_grad_(True)
                labels: Tensor | None = None
                optimiser = torch.optim.Adam([x], lr=_LR)
                schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
                with torch.enable_grad():
                    for step in range(steps):
                        if listener is not None:
                            listener("synthesising inputs", (number + step / steps) / len(start))
                        distances.clear()
                        outputs = model(x)
                        loss = torch.stack(distances).sum()
                        if isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] > 1:
                            if labels is None:
                                labels = torch.randint(outputs.shape[1], (len(x),), generator=generator).to(device)
                            loss = loss + _LABELS * functional.cross_entropy(outputs.float(), labels)
                        if x.ndim == 4:
                            loss = loss + _VARIATION * _variation(x)
                        optimiser.zero_grad()
                        loss.backward()
                        optimiser.step()
                        schedule.step()
                done.append(x.detach())
        finally:
            for parameter, wanted in needed:
                parameter.requires_grad_(wanted)
    return done


def _variation(x: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels."""
    return x.diff(dim=2).abs().mean() + x.diff(dim=3).abs().mean()
