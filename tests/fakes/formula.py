"""A small network, and a device that is a formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from profilers.targets import Loaded, Target


class Net(nn.Module):
    """Four convolutions and a classifier for 3 x 16 x 16 images."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.two = nn.Conv2d(32, 48, 3, padding=1, stride=2)
        self.three = nn.Conv2d(48, 64, 3, padding=1)
        self.four = nn.Conv2d(64, 64, 3, padding=1)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, 16, 16) -> (N, 10)."""
        x = torch.relu(self.norm(self.one(x)))
        x = torch.relu(self.four(torch.relu(self.three(torch.relu(self.two(x))))))
        return self.head(x.mean(dim=(2, 3)))


class Formula(Target):
    """A device on which a convolution costs its weights, channels rounded up to 8; no time really passes.

    ``factor`` is how fast the device is today. The device is not called cpu, so this host's own waits do not count.
    """

    runtime = "formula"
    cache = 0  # one copy of each network is enough
    factor = 1.0

    def __init__(self, noise: float = 0.002) -> None:
        super().__init__("device")
        self.rng, self.noise = np.random.default_rng(0), noise

    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        convolutions = [m for m in artefact.modules() if isinstance(m, nn.Conv2d)]
        work = sum(8 * -(-m.out_channels // 8) * m.weight.shape[1] * m.kernel_size[0] ** 2 for m in convolutions)
        seconds = 2e-4 + 3e-8 * work

        def clock(n: int) -> Any:
            return self.factor * seconds * (1 + self.noise * self.rng.exponential(size=n))

        return Loaded(lambda: None, clock=clock)

    def describe(self) -> dict[str, str]:
        return {"formula": "1"}
