"""Your own training loop: weights and keep ratios learned together by `Allocator`, then cut, measured and certified.

    python examples/own_loop.py latency=60%

A latency budget needs a cost model of the device: the network is profiled first. FLOPs and parameters are counted.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from typing import Any

import dsa_hw
import torch
from dsa_hw.zoo.data import load_data
from torch import nn


def main(budget: str = "latency=60%", *, epochs: int = 4, samples: int = 24, width: int = 32) -> dsa_hw.Allocation:
    """Train, allocate inside the loop, cut, and train the small network in the same loop."""
    torch.manual_seed(0)
    data = load_data("digits")
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, 1, 1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10),
    )  # fmt: skip
    example = torch.zeros(1, 3, 32, 32)
    train(model, data.train, epochs)
    dense = copy.deepcopy(model)  # what the pruned network is compared with

    groups = dsa_hw.find_groups(model, example)
    wanted: str | dsa_hw.LatencyBudget = budget
    if budget.startswith("latency="):
        profile = dsa_hw.profile(model, example, "onnxruntime/cpu", samples=samples, holdout=6)
        wanted = dsa_hw.LatencyBudget(budget.partition("=")[2], profile=dsa_hw.fit(profile, groups))
    allocator = dsa_hw.Allocator(model, groups, wanted, steps=20 * epochs)
    train(model, data.train, epochs, allocator, data.val)

    result = dsa_hw.allocate(
        dense, wanted, example_inputs=example, val=data.val, method=allocator.proposal(), progress=False
    )
    train(result.model, data.train, epochs)
    result = result.assess(dense, data.test, source="test data")
    print(result)
    return result


def train(
    model: nn.Module, loader: Iterable[Any], epochs: int, allocator: dsa_hw.Allocator | None = None, val: Any = ()
) -> None:
    """Train as usual; with an allocator, mask the network in every step, and step the keep ratios after it."""
    optimiser = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    model.train()
    for _ in range(epochs):
        batches = list(val)
        for number, (images, labels) in enumerate(loader):
            optimiser.zero_grad()
            if allocator is None:
                loss = nn.functional.cross_entropy(model(images), labels)
            else:
                with allocator.masks():  # the weights adapt to the channels that are left
                    loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimiser.step()
            if allocator is not None and not allocator.finished:
                allocator.step(batches[number % len(batches)])
    model.eval()


if __name__ == "__main__":
    main(*sys.argv[1:])
