"""A small network and data that it can learn, for the tests of allocation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import budgets
from dsa_hw.channels import ChannelGroups, find_groups


class Small(nn.Module):
    """Two branches from input to logits; the weights after the ``useless`` one are scaled by 0.01."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.useful = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.useful_norm = nn.BatchNorm2d(16)
        self.useless = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.useless_norm = nn.BatchNorm2d(16)
        self.useful_out = nn.Conv2d(16, 8, 1)
        self.useless_out = nn.Conv2d(16, 8, 1)
        self.norm = nn.BatchNorm2d(8)
        self.linear = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        useful = self.useful_out(torch.relu(self.useful_norm(self.useful(x))))
        useless = self.useless_out(torch.relu(self.useless_norm(self.useless(x))))
        y = torch.relu(self.norm(useful + 0.01 * useless))
        return self.linear(y.mean((2, 3)))


def batches(count: int = 6, size: int = 32, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Noisy images of four classes: one of three colours is strong, or the first one is weak."""
    rng = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        y = torch.randint(0, 4, (size,), generator=rng)
        x = torch.randn(size, 3, 8, 8, generator=rng)
        for i, label in enumerate(y.tolist()):
            x[i, label % 3] += 0.35 if label < 3 else -0.35
        result.append((x, y))
    return result


def trained(steps: int = 60) -> nn.Module:
    torch.manual_seed(0)
    model = Small()
    optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    data = batches()
    for step in range(steps):
        x, y = data[step % len(data)]
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval()


def with_flops(model: nn.Module) -> tuple[ChannelGroups, budgets.analytic.AnalyticCost, float]:
    groups = find_groups(model, torch.randn(1, 3, 8, 8))
    flops = budgets.flops(groups)
    return groups, flops, float(flops.value(torch.ones(len(groups), dtype=torch.float64)))
