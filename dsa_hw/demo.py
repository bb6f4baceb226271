"""``make demo``: the main job on an embedded default: groups, counts, and a network that is really smaller."""

from __future__ import annotations

import time

import pandas as pd
import torch

import budgets
from dsa_hw import choose, find_groups, masked, shrink
from dsa_hw.channels.verify import difference
from dsa_hw.commands.inspect import table
from dsa_hw.models import load


def main() -> None:
    """ResNet-18 with half of every channel group."""
    model, inputs = load("resnet18")
    start = time.perf_counter()
    groups = find_groups(model, inputs)
    print(f"resnet18: {len(groups)} channel groups found and verified in {time.perf_counter() - start:.1f} s\n")
    print(table(groups.to_frame()))
    kept = choose(model, groups, groups.sizes // 2, importance="l1")
    start = time.perf_counter()
    small = shrink(model, groups, kept)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        with masked(model, groups, kept):
            expected = model(*inputs)
        gap = difference(expected, small(*inputs))
    widths = pd.DataFrame(
        [groups.sizes, groups.sizes // 2], columns=list(groups.names), index=["whole", "half of each group"]
    )
    costs = (budgets.flops(groups), budgets.params(groups), budgets.activation_memory(groups))
    frame = pd.DataFrame({f"{cost.name} [{cost.unit}]": cost.predict(widths).astype("int64") for cost in costs})
    counted = sum(p.numel() for p in small.parameters())
    print(f"\n{frame.to_string()}\n")
    print(
        f"shrunk in {seconds:.2f} s to {counted:,} parameters (counted); differs from the masked network by {gap:.1e}"
    )
    print("next: dsa-hw inspect --model mobilenet_v2 --plot groups.png")


if __name__ == "__main__":
    main()
