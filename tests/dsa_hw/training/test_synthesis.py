"""Synthetic inputs reproduce the statistics that batch norms stored."""

from __future__ import annotations

import torch
from torch import nn

from dsa_hw.training.synthesis import _statistics, can_match_statistics, match_statistics


def trained_on(data: torch.Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Conv2d(12, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    with torch.no_grad():
        for _ in range(60):
            model(data)
    return model


def distance(model: nn.Module, inputs: torch.Tensor) -> float:
    with _statistics(model.eval()) as found, torch.no_grad():
        model(inputs)
    return float(torch.stack(found).sum())


def test_inputs_reproduce_the_statistics_of_the_data() -> None:
    torch.manual_seed(1)
    data = 0.5 + 2 * torch.randn(64, 3, 12, 12).cumsum(3) / 4
    model = trained_on(data)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    needed = [p.requires_grad for p in model.parameters()]
    noise = [torch.randn(32, 3, 12, 12) for _ in range(2)]
    kept = [x.clone() for x in noise]
    found = match_statistics(model, noise, steps=60)
    assert [x.shape for x in found] == [x.shape for x in noise]
    assert all(distance(model, new) < 0.1 * distance(model, old) for new, old in zip(found, noise, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(noise, kept, strict=True)), "the start is not changed"
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "nor is the network"
    assert [p.requires_grad for p in model.parameters()] == needed
    assert all(p.grad is None for p in model.parameters())


def test_networks_without_stored_statistics_are_recognised() -> None:
    assert can_match_statistics(trained_on(torch.randn(8, 3, 8, 8)))
    assert not can_match_statistics(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)))
    assert not can_match_statistics(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))), "never trained"
    assert not can_match_statistics(nn.BatchNorm2d(4, track_running_stats=False))
