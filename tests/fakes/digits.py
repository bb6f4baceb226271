"""A network that trains in a second, and a target whose times are a known formula: everything can be checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.methods.registry import register_method, solve
from dsa_hw.zoo import data as datasets
from profilers.targets import Loaded, Target, register


class Net(nn.Module):
    """Three convolutions with batch norm and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False)
        self.na = nn.BatchNorm2d(16)
        self.b = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False)
        self.nb = nn.BatchNorm2d(32)
        self.c = nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False)
        self.nc = nn.BatchNorm2d(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, 32, 32) -> (N, 10)."""
        x = torch.relu(self.na(self.a(x)))
        x = torch.relu(self.nb(self.b(x)))
        return self.head(torch.relu(self.nc(self.c(x))).mean((2, 3)))


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@register("formula")
class Formula(Target):
    """Seconds = 20 us + 0.1 ns for each multiply-add, three times as much where images are small."""

    artefact = "module"
    estimated = "a formula"

    def known_grid(self) -> int | None:
        return 4

    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        return Loaded.exact(formula(artefact, inputs))


def formula(model: nn.Module, inputs: tuple[Any, ...]) -> float:
    total = [2e-5]

    def count(module: Any, _: Any, output: torch.Tensor) -> None:
        macs = output.numel() * module.weight[0].numel()
        total[0] += 1e-10 * macs * (3 if output.shape[-1] < 8 else 1)

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, nn.Conv2d)]
    with torch.no_grad():
        model(*inputs)
    for hook in hooks:
        hook.remove()
    return total[0]


def digits() -> datasets.Data:
    """A few of the digits."""
    whole = datasets.load_data("digits")
    parts = {
        name: replace(loader, images=loader.images[:count], labels=loader.labels[:count])
        for name, loader, count in (("train", whole.train, 192), ("val", whole.val, 64), ("test", whole.test, 120))
    }
    return replace(whole, **parts)


@register_method("tilted")
def tilted(problem: Problem) -> Proposal:
    """Not uniform: later groups keep more; with a history such as the allocator writes."""
    flat = solve(problem, "uniform")
    k = len(problem.groups)
    alpha = np.clip(flat.alpha * np.linspace(0.8, 1.0, k), problem.minimum, 1.0)
    history = pd.DataFrame(
        {"step": [1.0, 2.0], "used_0": [1.5, 1.0], "limit_0": [1.2 * problem.costs.limits[0], problem.costs.limits[0]]}
    )
    return Proposal(alpha, problem.model, None, history)
