"""How long the lowest layer takes, as ratios within one run.

    python benchmarks/channel_speed.py

find_groups (with its verification) over torch.export.export alone; shrink in seconds; F and its gradient in us.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch

import budgets
from dsa_hw import find_groups, select_channels, shrink
from dsa_hw.zoo.models import load_model


def best(function: Callable[[], object], repeats: int) -> float:
    """Shortest of several: whatever else the machine does only adds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="*", default=["resnet50", "densenet121", "mobilenet_v2", "convnext_tiny", "vit_b_16"]
    )
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for name in args.models:
        model, inputs = load_model(name)
        find_groups(model, inputs)  # warm up imports and caches
        export = best(lambda: torch.export.export(model, inputs, strict=False), args.repeats)  # noqa: B023
        find = best(lambda: find_groups(model, inputs), args.repeats)  # noqa: B023
        groups = find_groups(model, inputs)
        kept = select_channels(model, groups, np.maximum(1, groups.sizes // 2))
        cut = best(lambda: shrink(model, groups, kept), args.repeats)  # noqa: B023
        cost, alpha = budgets.flops(groups), np.full(len(groups), 0.5)
        evaluate = best(lambda: (cost(alpha), cost.gradient(alpha)), 1000)  # noqa: B023
        rows.append((name, len(groups), export, find, find / export, cut, 1e6 * evaluate))
        print(f"{name}: find_groups / export = {find / export:.2f}", flush=True)
    columns = ["model", "groups", "export s", "find_groups s", "ratio", "shrink s", "F + gradient us"]
    print(pd.DataFrame(rows, columns=columns).to_string(index=False, float_format=lambda v: f"{v:.3g}"))


if __name__ == "__main__":
    main()
