"""Budget models on other people's measurements: Raspberry Pi 3 (whole networks) and Jetson TX2 (single convolutions).

    python benchmarks/budget_tables.py --data DIRECTORY [--out results/budget_tables.json]

The tables are not part of this project (no licence): DIRECTORY, or the environment variable DSA_HW_DATA, says where
they are; without them the benchmark says so and stops.

* **Raspberry Pi 3B**: seconds of every (c_in, c_out) of the layer kinds of WideResNet-40-2 at CIFAR size. A network's
  latency is the sum over its layers, which its authors found within 1.35 % of end-to-end measurements. Random widths,
  hold-out drawn first, three ways of drawing: every group on its own, a common scale with jitter, and multiples of 8.
* **Jetson TX2**: latency and energy of 5,000 convolutions on GPU and CPU. Hold-out: whole (size, c_in, c_out)
  combinations with all their kernel sizes, a fifth of the table, so that no neighbour differs in the kernel only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from budget_baselines import baselines, contenders
from sklearn.linear_model import LinearRegression
from torch import nn

import budgets
from budgets.regression import MonotoneBoosting, PhysicsNNLS, ResidualBoosting
from dsa_hw.channels import ChannelGroups, find_groups

HOLDOUT, TRAIN, REPEATS = 500, (10, 20, 40, 80), 5


class Block(nn.Module):
    """Pre-activation residual block of a wide residual network."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(c_in), nn.BatchNorm2d(c_out)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.shortcut = None if c_in == c_out else nn.Conv2d(c_in, c_out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, c_in, H, W) -> (N, c_out, H / stride, W / stride)."""
        activated = torch.relu(self.bn1(x))
        out = self.conv2(torch.relu(self.bn2(self.conv1(activated))))
        return out + (x if self.shortcut is None else self.shortcut(activated))


class WideResNet(nn.Module):
    """WideResNet-40-2 for CIFAR (Zagoruyko and Komodakis 2016): 6 blocks in each of 3 stages, twice the width."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        blocks, width = [], 16
        for stage, channels in enumerate((32, 64, 128)):
            for block in range(6):
                blocks.append(Block(width, channels, 2 if stage > 0 and block == 0 else 1))
                width = channels
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, 32, 32) -> (N, 10)."""
        x = torch.relu(self.bn(self.blocks(self.conv1(x))))
        return self.fc(x.mean((2, 3)))


class RaspberryPi:
    """Sums layers of the table; the kind of each convolution follows from its input size, kernel, stride and width."""

    def __init__(self, path: Path) -> None:
        frame = pd.read_csv(path)
        self.tables = {
            kind: rows.pivot(index="c_in", columns="c_out", values="latency_s").to_numpy()
            for kind, rows in frame.groupby("table")
        }
        self.model = WideResNet().eval()
        self.groups: ChannelGroups = find_groups(self.model, (torch.zeros(1, 3, 32, 32),))
        self.layers = [self._layer(operation) for operation in self.groups.operations if operation.flops]

    def _layer(self, operation: Any) -> tuple[str, Any, Any, float, float]:
        """Kind, and how to get channels from elements: input and output counts with their pixels."""
        if operation.kind == "linear":
            return "FC", operation.inputs[0], operation.output, 1.0, float(operation.output.dense)
        convolution = self.model.get_submodule(operation.module)
        assert isinstance(convolution, nn.Conv2d)
        pixels_in = operation.inputs[0].dense / convolution.in_channels
        pixels_out = operation.output.dense / convolution.out_channels
        stage = {32: 1, 64: 2, 128: 3}.get(convolution.out_channels, 0)
        if stage == 0:
            kind = "Conv_0"
        elif convolution.kernel_size == (1, 1):
            kind = f"Skip_{stage}"
        else:
            kind = f"{'No_' if convolution.in_channels == convolution.out_channels else ''}Stride_{stage}"
        return kind, operation.inputs[0], operation.output, pixels_in, pixels_out

    def seconds(self, alpha: np.ndarray) -> np.ndarray:
        """Latency of configurations (n, K), shape (n,)."""
        total = np.zeros(len(alpha))
        for kind, inputs, output, pixels_in, pixels_out in self.layers:
            c_in = np.rint(inputs(alpha) / pixels_in).astype(int)
            c_out = np.rint(output(alpha) / pixels_out).astype(int)
            total += self.tables[kind][c_in - 1, c_out - 1]
        return total


def draw(groups: ChannelGroups, how: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """Keep ratios (n, K) of random configurations, distinct from each other with overwhelming probability."""
    k = len(groups)
    if how == "common scale":
        ratios = rng.uniform(0.15, 1, (n, 1)) * rng.uniform(0.6, 1, (n, k))
    else:
        ratios = rng.uniform(0.1, 1, (n, k))
    step = 8 if how == "multiples of 8" else 1
    widths = np.clip(step * np.rint(ratios * groups.sizes / step), step, groups.sizes)
    return widths / groups.sizes


def raspberry_pi(path: Path) -> dict[str, Any]:
    """Errors by method, way of drawing and number of training configurations; coverage and width of our bound."""
    device = RaspberryPi(path)
    groups = device.groups
    methods = {**contenders(groups), **baselines(groups)}
    dense = float(device.seconds(np.ones((1, len(groups))))[0])
    result: dict[str, Any] = {"groups": len(groups), "dense_seconds": dense}
    for how in ("independent", "common scale", "multiples of 8"):
        errors: dict[str, dict[int, list[float]]] = {name: {n: [] for n in TRAIN} for name in methods}
        within: dict[str, dict[int, list[float]]] = {name: {n: [] for n in TRAIN} for name in methods}
        chosen, covered, widths = [], [], []
        for repeat in range(REPEATS):
            rng = np.random.default_rng(repeat)
            held = draw(groups, how, HOLDOUT, rng)  # before anything is fitted
            train = draw(groups, how, max(TRAIN), rng)
            truth, y = device.seconds(held), device.seconds(train)
            for n in TRAIN:
                for name, make in methods.items():
                    error = np.abs(make().fit(train[:n], y[:n]).predict(held) / truth - 1)
                    errors[name][n].append(float(error.mean()))
                    within[name][n].append(float((error <= 0.1).mean()))
            model = budgets.fit(_table(groups, train[:40], y[:40]), groups, target="tflite/raspberry-pi-3")
            chosen.append(float(np.abs(model(held) / truth - 1).mean()))
            upper = model.upper(held, 0.9)
            covered.append(float((truth <= upper).mean()))
            widths.append(float(np.median(upper / model(held) - 1)))
        result[how] = {
            "mape": {name: {n: float(np.mean(v)) for n, v in by.items()} for name, by in errors.items()},
            "within_10": {name: {n: float(np.mean(v)) for n, v in by.items()} for name, by in within.items()},
            "chosen_mape_40": float(np.mean(chosen)),
            "coverage_90": float(np.mean(covered)),
            "half_width_90": float(np.mean(widths)),
        }
    return result


def _table(groups: ChannelGroups, alpha: np.ndarray, seconds: np.ndarray) -> pd.DataFrame:
    frame = pd.DataFrame(np.rint(alpha * groups.sizes).astype(int), columns=list(groups.names))
    frame["seconds"], frame["split"] = seconds, "train"
    return frame


def jetson(path: Path) -> dict[str, Any]:
    """Errors of single convolutions, by method; the output size is that of a convolution without padding."""
    frame = pd.read_csv(path)
    size, c_in, kernel, c_out = (frame[name].to_numpy(float) for name in ("hw_in", "c_in", "k", "c_out"))
    out = size - kernel + 1
    macs = out**2 * kernel**2 * c_in * c_out
    physics = np.c_[macs, size**2 * c_in, out**2 * c_out, kernel**2 * c_in * c_out, out**2 * kernel**2 * c_in]
    everything = np.c_[size, c_in, kernel, c_out, physics]
    combination = frame.groupby(["hw_in", "c_in", "c_out"]).ngroup().to_numpy()
    held = np.isin(combination, np.random.default_rng(0).permutation(combination.max() + 1)[: combination.max() // 5])
    methods: dict[str, tuple[Any, np.ndarray]] = {
        "FLOPs-linear, least squares": (LinearRegression(), macs[:, None]),
        "FLOPs-linear, relative least squares": (PhysicsNNLS(), macs[:, None]),
        "ours: physics": (PhysicsNNLS(), physics),
        "ours: monotone boosting": (MonotoneBoosting(trees=200, max_depth=5, min_samples_leaf=5), everything),
        "ours: residual boosting": (ResidualBoosting(trees=200, max_depth=5, min_samples_leaf=5), everything),
    }
    result: dict[str, Any] = {"train": int((~held).sum()), "holdout": int(held.sum())}
    for quantity, column in (("latency", "latency_ms"), ("energy", "energy_J")):
        y = frame[column].to_numpy()
        result[quantity] = {}
        for name, (estimator, inputs) in methods.items():
            error = np.abs(estimator.fit(inputs[~held], y[~held]).predict(inputs[held]) / y[held] - 1)
            result[quantity][name] = {
                "mape": float(error.mean()),
                "median": float(np.median(error)),
                "within_10": float((error <= 0.1).mean()),
            }
    return result


def _show(results: dict[str, Any]) -> None:
    pi = results.get("raspberry_pi_3")
    if pi:
        for how in ("independent", "common scale", "multiples of 8"):
            table = pd.DataFrame(pi[how]["mape"]).T.map(lambda v: f"{100 * v:.2f} %")
            print(f"\nRaspberry Pi 3, WideResNet-40-2, {how}: mean error by number of training configurations")
            print(table.to_string())
            print(
                f"budgets.fit at 40: {100 * pi[how]['chosen_mape_40']:.2f} % (goal 3 %), 90 % bound covers "
                f"{100 * pi[how]['coverage_90']:.1f} %, "
                f"{100 * pi[how]['half_width_90']:.1f} % above the prediction"
            )
    for name in ("jetson_tx2_gpu", "jetson_tx2_cpu"):
        for quantity in ("latency", "energy"):
            table = pd.DataFrame(results[name][quantity]).T.map(lambda v: f"{100 * v:.1f} %")
            print(f"\n{name}, {quantity}, {results[name]['holdout']} shapes held out")
            print(table.to_string())
            best = min(row["mape"] for method, row in results[name][quantity].items() if method.startswith("ours"))
            flops = min(row["mape"] for method, row in results[name][quantity].items() if method.startswith("FLOPs"))
            print(f"best of ours / better FLOPs-linear = {best / flops:.2f} (goal 0.50)")


def main() -> int:
    """Run what there is data for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("DSA_HW_DATA"), help="directory of the tables")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    args = parser.parse_args()
    needed = (
        "rpi3_wrn40_2/rpi3_wrn40_2_table.csv.gz",
        "jetson_tx2/datasetMultivariateGPU.csv",
        "jetson_tx2/datasetMultivariateCPU.csv",
    )
    missing = [name for name in needed if args.data is None or not (Path(args.data) / name).exists()]
    if missing:
        print(f"skipped: {', '.join(missing)} not found; say where with --data or DSA_HW_DATA", file=sys.stderr)
        return 0
    torch.set_num_threads(1)
    started = time.perf_counter()
    data = Path(args.data)
    results = {
        "raspberry_pi_3": raspberry_pi(data / needed[0]),
        "jetson_tx2_gpu": jetson(data / needed[1]),
        "jetson_tx2_cpu": jetson(data / needed[2]),
    }
    _show(results)
    print(f"\n{time.perf_counter() - started:.0f} s")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
