"""How long one update's relaxation takes: solve beta1(alpha), sample a mask, backward to alpha; 50 groups of 512.

    python benchmarks/relaxation_speed.py [--groups 50] [--channels 512] [--repeats 200]
    python benchmarks/relaxation_speed.py --steps [NETWORK ...]   # a whole step of the keep ratios

``--steps``: the time of `Allocator.step` over that of a forward and backward pass of the dense network on the same
batch of 16, in turns, median of the ratios of adjacent pairs. The loss is the mean square of all outputs.

One thread. A table of milliseconds, median and 90th percentile, over sharpnesses and kinds of importances, and as a
ratio to what cannot be avoided: one sigmoid and one sum over the same numbers, timed in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dsa_hw import Allocator, FlopsBudget, find_groups
from dsa_hw.methods.dsa.estimators import sample_masks
from dsa_hw.methods.dsa.relaxation import Layout, keep_probabilities

BETA2 = (0.05, 0.5, 5.0, 100.0)
GOAL_MS = 2.0


def importances(kind: str, shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    """Importances (K, C): evenly spread, evenly spaced in their logarithms, or over many decades."""
    values = torch.rand(shape, generator=rng, dtype=torch.float64)
    if kind == "ranks":  # softness in ranks: log b are the ranks, evenly spaced
        return torch.exp(values.argsort(1).argsort(1) / shape[1])
    return values if kind == "even" else torch.exp(6.0 * torch.randn(shape, generator=rng, dtype=torch.float64))


def milliseconds(run: Callable[[], object], floor: Callable[[], object], repeats: int) -> NDArray[np.float64]:
    """Times (n, 2) of two functions, in turns; the first tenth warms up."""
    times = np.empty((repeats, 2))
    for row in times:
        for place, function in enumerate((run, floor)):
            begin = time.perf_counter()
            function()
            row[place] = 1e3 * (time.perf_counter() - begin)
    return times[repeats // 10 :]


STEPS = ("resnet18", "segmentation/lraspp_mobilenet_v3_large", "ultralytics/yolov8n", "vit_b_16")
GOAL_RATIO = 1.15


def step_ratio(name: str, repeats: int) -> tuple[float, float]:
    """Median milliseconds of a dense forward and backward pass, and median ratio of a step of the allocator to it."""
    from zoo_networks import build

    model, inputs = build(name)
    image: Any = torch.randn(1, 3, 224, 224) if name == "vit_b_16" else next(iter(inputs))
    groups = find_groups(model, image)
    side = min(image.shape[-1], 96) if name != "vit_b_16" else 224
    batch = torch.randn(16 if side < 224 else 4, 3, side, side), torch.zeros(1)

    def loss(outputs: object, _: Tensor) -> Tensor:
        return torch.stack([x.square().mean() for x in tree_leaves(outputs) if isinstance(x, Tensor)]).sum()

    allocator = Allocator(model, groups, FlopsBudget("50%"), steps=10 * repeats, loss=loss)
    model.train()

    def dense() -> None:
        model.zero_grad()
        loss(model(batch[0]), batch[1]).backward()

    times = milliseconds(lambda: allocator.step(batch), dense, repeats)
    return float(np.median(times[:, 1])), float(np.median(times[:, 0] / times[:, 1]))


def measure_steps(names: Sequence[str], repeats: int) -> None:
    for name in names:
        dense, ratio = step_ratio(name, repeats)
        verdict = "reached" if ratio <= GOAL_RATIO else "MISSED"
        print(f"{name}: dense {dense:.0f} ms, step {ratio:.2f} times that, goal {GOAL_RATIO:g}: {verdict}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=50)
    parser.add_argument("--channels", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--steps", nargs="*", metavar="NETWORK", help=f"default: {' '.join(STEPS)}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.steps is not None:
        measure_steps(args.steps or STEPS, min(args.repeats, 30))
        return
    rng = torch.Generator().manual_seed(0)
    layout = Layout((args.channels,) * args.groups)
    rows = []
    for kind in ("even", "ranks", "wide"):
        importance = importances(kind, layout.shape, rng)
        for beta2 in BETA2:
            alpha = (0.1 + 0.8 * torch.rand(args.groups, generator=rng, dtype=torch.float64)).requires_grad_()
            upstream = torch.randn(layout.shape, generator=rng)

            def run(a: Tensor = alpha, b: Tensor = importance, sharp: float = beta2, g: Tensor = upstream) -> None:
                a.grad = None
                sample = sample_masks(keep_probabilities(a, b, sharp, layout), "straight_through", generator=rng)
                sample.masks[0].backward(g)

            def floor(b: Tensor = importance) -> Tensor:
                return torch.sigmoid(b).sum(1)

            ours, least = milliseconds(run, floor, args.repeats).T
            row = {"importance": kind, "beta2": beta2, "median ms": np.median(ours)}
            row |= {"90th ms": np.quantile(ours, 0.9), "over the floor": np.median(ours / least)}
            rows.append(row)
    frame = pd.DataFrame(rows)
    print(frame.round(2).to_string(index=False))
    worst = frame["median ms"].max()
    print(f"worst median {worst:.2f} ms, goal under {GOAL_MS:g}: {'reached' if worst < GOAL_MS else 'MISSED'}")


if __name__ == "__main__":
    main()
