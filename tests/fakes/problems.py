"""Problems for the tests of methods: networks with residual, depthwise and plain layers, data, and a FLOPs budget."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import budgets
from dsa_hw.channels import ChannelGroups, find_groups
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.problem import Problem
from dsa_hw.utils.arrays import Floats

Network = tuple[nn.Module, ChannelGroups, Tensor]
# Options that make a baseline fast.
QUICK: dict[str, dict[str, Any]] = {
    "annealing": {"steps": 20},
    "cem": {"steps": 16, "population": 8},
    "legr": {"steps": 16, "population": 8, "tournament": 4},
    "netadapt": {"iterations": 6, "batches": 1},
}
# Baselines that train.
TRAINED = ("ssl", "morphnet", "dmcp")


def block(c_in: int, c_out: int, size: int = 3, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(c_in, c_out, size, padding=size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(c_out), nn.ReLU())


class Mixed(nn.Module):
    """A stem, a residual block, an inverted bottleneck with a depthwise convolution, and a layer without batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 24)
        self.first, self.second = block(24, 40), block(40, 24)
        self.expand, self.depthwise = block(24, 48, 1), block(48, 48, 3, groups=48)
        self.project = block(48, 32, 1)
        self.plain = nn.Conv2d(32, 20, 1)
        self.head = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.second(self.first(x))
        x = self.project(self.depthwise(self.expand(x)))
        return self.head(torch.relu(self.plain(x)).mean((2, 3)))


def mixed_network() -> Network:
    """`Mixed` with random batch norms, its groups and an input."""
    torch.manual_seed(0)
    model = Mixed().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.2, 1.5)
                module.bias.normal_(0.0, 0.2)
    x = torch.randn(1, 3, 8, 8)
    return model, find_groups(model, (x,)), x


class DeadBranch(nn.Module):
    """Two branches of the same shape; the layer after the ``dead`` one has weights near 0."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.dead = block(3, 32), block(3, 32)
        self.join_live, self.join_dead = nn.Conv2d(32, 16, 3, padding=1), nn.Conv2d(32, 16, 3, padding=1)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.join_live(self.live(x)) + self.join_dead(self.dead(x))
        return self.head(torch.relu(y).mean((2, 3)))


def dead_branch_network() -> Network:
    """`DeadBranch`, its groups and an input."""
    torch.manual_seed(0)
    model = DeadBranch().eval()
    with torch.no_grad():
        model.join_dead.weight.mul_(1e-4)
    x = torch.randn(1, 3, 8, 8)
    return model, find_groups(model, (x,)), x


def loader(count: int = 48, batch: int = 16, seed: int = 0, shuffle: bool = True) -> DataLoader[Any]:
    """Images of four classes; the class is the quadrant that is bright."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 4
    x = torch.randn(count, 3, 8, 8, generator=generator)
    for i in range(count):
        a, b = divmod(int(y[i]), 2)
        x[i, :, 4 * a : 4 * a + 4, 4 * b : 4 * b + 4] += 1.5
    return DataLoader(TensorDataset(x, y), batch, shuffle=shuffle)


def problem_of(network: Network, name: str = "", share: float = 0.5, **more: Any) -> Problem:
    """A FLOPs budget of ``share`` and what the baseline ``name`` needs; or give ``costs`` and ``limits``."""
    model, groups, x = network
    cost = budgets.flops(groups)
    costs = CostSet(more.pop("costs", [cost]), groups.sizes, more.pop("limits", [share * cost.dense]))
    settings = {"costs": costs, "example_inputs": (x,), **more}
    settings.setdefault("options", QUICK.get(name, {}))
    if name in TRAINED:
        settings.setdefault("train", loader())
    return Problem(model, groups, **settings)


def used(problem: Problem, alpha: Any) -> Floats:
    """Costs over limits (J,) at keep ratios (K,)."""
    return problem.costs.at_ratios(torch.as_tensor(alpha).double().numpy()) / problem.costs.limits
