"""How well F predicts devices that we do not own: GPUs, a Raspberry Pi, a Jetson, phones.

    python benchmarks/gpu_cost_models.py ~/data --plot docs/images/other-devices.png

The data folder holds ``gpu_convolutions`` (A100 and T4, from the NeuSight project), ``rpi3_wrn40_2`` and
``jetson_tx2``; the latencies of phones are in benchmarks/data. Every part draws its held-out rows first, from fixed
seeds. Writes benchmarks/results/gpu_cost_models.json. Some minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from budget_tables import RaspberryPi, draw, jetson
from phone_networks import phones
from sklearn.ensemble import HistGradientBoostingRegressor

import budgets
from budgets.features import FeatureMap
from budgets.kernels import ALGORITHMS, ANY, SHAPE, THREE_BY_THREE, kernel_shapes
from budgets.regression import CostRegressor, FastestKernel, MonotoneBoosting, PhysicsNNLS
from budgets.selection import candidates
from dsa_hw.channels import ChannelGroups, find_groups
from dsa_hw.channels.counts import Count, Term
from dsa_hw.profiles import Profile
from dsa_hw.zoo.models import load_model
from profilers.profiling.grid import finest_free_grid, swept_widths

GPUS = ("a100", "t4")
TRAIN, HELD = (40, 200, 2000), 1500
REPEATS = {40: 10, 200: 10, 2000: 3}
GOALS = {200: 0.15, 2000: 0.10}
COLUMNS = ("images", "side", "inputs", "outputs", "positions", "recorded")
RESULTS = Path(__file__).parent / "results" / "gpu_cost_models.json"
# The 3x3 convolutions of the two networks: number, output channels, output side; at 224 x 224.
RESNETS = {"resnet18": ((4, 64, 56), (4, 128, 28), (4, 256, 14), (4, 512, 7)),
           "resnet50": ((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7))}  # fmt: skip


def read(folder: Path, gpu: str) -> tuple[np.ndarray, np.ndarray, pd.Series[str]]:
    """Columns (n, 6), milliseconds (n,) and kernel names; the last column counts the recordings in thousands."""
    frame = pd.read_csv(folder / "gpu_convolutions" / f"{gpu}.csv.gz")
    images, side, inputs, outputs = (frame[c].to_numpy(float) for c in ("batch", "size", "c_in", "c_out"))
    columns = np.c_[images, side, inputs, outputs, images * side**2, np.arange(len(frame)) / 1000]
    return columns, frame["ms"].to_numpy(), frame["kernel_name"]


def column(name: str, scale: float = 1.0) -> Count:
    """One of the columns, as a size."""
    return Count(0.0, scale * np.eye(len(COLUMNS))[COLUMNS.index(name)])


def features(names: tuple[str, ...]) -> FeatureMap:
    """Some of the physics features of a convolution."""
    products = {
        "constant": (),
        "recorded": (column("recorded"),),
        "recorded twice": (column("recorded"), column("recorded")),
        "input bytes": (column("positions"), column("inputs")),
        "output bytes": (column("positions"), column("outputs")),
        "weight bytes": (column("inputs"), column("outputs")),
    }
    return FeatureMap.from_terms({name: [Term(1.0, products[name])] for name in names}, len(COLUMNS))


BYTES = ("constant", "input bytes", "output bytes", "weight bytes")
# The overhead of the recordings: a quadratic of the position in the file.
OVERHEAD = ("constant", "recorded", "recorded twice")
ALL = (*OVERHEAD, *BYTES[1:])
SHAPES = FeatureMap.from_terms(
    {
        name: [Term(1.0, (column(source, 9.0 if name == "reads" else 1.0),))]
        for name, source in zip(SHAPE, ("images", "side", "inputs", "outputs"), strict=True)
    },
    len(COLUMNS),
    dict.fromkeys(SHAPE, THREE_BY_THREE),
)
Method = tuple[Callable[[], CostRegressor], Callable[[np.ndarray], np.ndarray]]


def methods() -> dict[str, Method]:
    """Estimators, and the columns of each: cubic products (multiply-adds) are columns of their own."""

    def work(x: np.ndarray) -> np.ndarray:
        return (x[:, 4] * x[:, 2] * x[:, 3])[:, None]

    def physics(x: np.ndarray) -> np.ndarray:
        return np.c_[work(x), features(BYTES)(x)[:, 1:]]

    def both(x: np.ndarray) -> np.ndarray:
        return np.c_[physics(x), x[:, 5], x[:, 5] ** 2]

    def everything(x: np.ndarray) -> np.ndarray:
        return np.c_[both(x), x[:, :4]]

    def same(x: np.ndarray) -> np.ndarray:
        return x

    return {
        "FLOPs": (PhysicsNNLS, work),
        "physics": (PhysicsNNLS, physics),
        "fastest kernel": (lambda: FastestKernel(features(BYTES), shapes=SHAPES), same),
        "FLOPs, overhead": (PhysicsNNLS, lambda x: np.c_[work(x), x[:, 5], x[:, 5] ** 2]),
        "physics, overhead": (PhysicsNNLS, both),
        "monotone boosting, overhead": (lambda: MonotoneBoosting(trees=200, max_depth=5), everything),
        "fastest kernel, overhead": (lambda: FastestKernel(features(ALL), shapes=SHAPES), same),
    }


OURS = "fastest kernel, overhead"


def convolutions(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Held-out errors by method and number of rows; processors found; what the model without overhead leaves."""
    order = np.random.default_rng(0).permutation(len(y))
    held, pool = order[:HELD], order[HELD:]
    errors: dict[str, dict[int, float]] = {}
    for name, (make, view) in methods().items():
        errors[name] = {}
        for n in TRAIN:
            found = []
            for repeat in range(REPEATS[n]):
                rows = np.random.default_rng(repeat).choice(pool, n, replace=False)
                model = make().fit(view(x[rows]), y[rows])
                found.append(float(np.abs(model.predict(view(x[held])) / y[held] - 1).mean()))
            errors[name][n] = float(np.mean(found))
        say(f"  {name}: " + ", ".join(f"{n} rows {100 * e:.1f}%" for n, e in errors[name].items()))
    processors = {}
    for n in TRAIN:
        draws = [np.random.default_rng(r).choice(pool, n, replace=False) for r in range(REPEATS[n])]
        processors[n] = [int(fitted(x[rows], y[rows]).processors_) for rows in draws]
    model = fitted(x[pool], y[pool])
    difference = np.abs(model.predict(x[held]) - y[held])
    relative, own = difference / y[held], y[held] - overhead_of(model, x[held])
    some = own > 0.1
    return {
        "rows": len(y),
        "mape": errors,
        "processors": processors,
        "all rows": {
            "mape": float(relative.mean()),
            "median": float(np.median(relative)),
            "within_10": float((relative <= 0.1).mean()),
            "value_mape": float(np.abs(model.smooth(x[held]) / y[held] - 1).mean()),
            "without overhead": {
                "median": float(np.median(difference / np.maximum(own, 1e-3))),
                "mape above 0.1 ms": float((difference / own)[some].mean()),
                "share above 0.1 ms": float(some.mean()),
            },
            "overhead_ms": overhead_of(model, np.c_[np.zeros((2, 5)), [0.0, len(y) / 1000]]).tolist(),
        },
    }


def fitted(x: np.ndarray, y: np.ndarray) -> FastestKernel:
    """Our model of a table."""
    return FastestKernel(features(ALL), shapes=SHAPES).fit(x, y)


def overhead_of(model: FastestKernel, x: np.ndarray) -> np.ndarray:
    """Milliseconds of the recordings' own overhead, by our model."""
    return (model.coef_ * features(ALL)(x))[:, : len(OVERHEAD)].sum(1)


def chosen_algorithms(x: np.ndarray, y: np.ndarray, names: pd.Series[str]) -> float:
    """Share of convolutions whose kernel name is of the algorithm that the model chose without seeing names."""
    choice = fitted(x, y).algorithms(x)[:, 0]
    truth = np.where(names.str.contains("winograd"), 1, np.where(names.str.contains(r"^\w+_sgemm_"), 0, 2))
    assert len(ALGORITHMS) == 3
    return float((choice == truth).mean())


def size_classes(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Errors on whole classes of image sizes that are not in the 2,000 rows fitted."""
    edges = [5, 7, 12, 25, 50, 1000]
    found = {}
    for low, high in pairwise(edges):
        out = (x[:, 1] >= low) & (x[:, 1] < high)
        rows = np.random.default_rng(0).permutation(np.flatnonzero(~out))[:2000]
        relative = np.abs(fitted(x[rows], y[rows]).predict(x[out]) / y[out] - 1)
        found[f"{low} to {int(x[out, 1].max())}"] = float(relative.mean())
    return found


def networks(x: np.ndarray, y: np.ndarray, count: int = 300) -> dict[str, dict[int, dict[str, float]]]:
    """Errors of sums of held-out convolutions like the layers of a pruned ResNet.

    A network has a batch size and a keep ratio for each layer; for each layer one of the ten held-out convolutions that
    are nearest in the logarithms of batch, size and channels is drawn. Its time is the sum of their recorded times.
    """
    order = np.random.default_rng(0).permutation(len(y))
    held, pool = order[:HELD], order[HELD:]
    logs = np.log(x[held][:, :4])
    found: dict[str, dict[int, dict[str, float]]] = {}
    for name, stages in RESNETS.items():
        rng = np.random.default_rng(1)
        drawn = []
        for _ in range(count):
            batch, rows = np.exp(rng.uniform(0, np.log(64))), []
            for layers, channels, side in stages:
                for _ in range(layers):
                    c_in, c_out = channels * rng.uniform(0.2, 1, 2)
                    distance = np.abs(logs - np.log([batch, side, c_in, c_out])).sum(1)
                    rows.append(held[rng.choice(np.argsort(distance)[:10])])
            drawn.append(rows)
        found[name] = {}
        for n in TRAIN[1:]:
            errors = []
            for repeat in range(3):
                taken = np.random.default_rng(repeat).choice(pool, n, replace=False)
                model = fitted(x[taken], y[taken])
                errors += [abs(float(model.predict(x[r]).sum() / y[r].sum()) - 1) for r in drawn]
            found[name][n] = {"mape": float(np.mean(errors)), "within_10": float(np.mean(np.array(errors) <= 0.1))}
    return found


def multiples(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Time by the largest power of two that divides the channels, and the grid that the profiler's code finds.

    Shapes are random, so there is no sweep. Each time is divided by the continuous part of the model, and the times of
    channel counts with the same divisor are averaged; the sweep has these averages. ``steps``: sweeps of the four
    shapes of a ResNet-18 at batch 32, with the model's own steps.
    """
    model = fitted(x, y)
    ratio = np.log(y / model.smooth(x))
    result: dict[str, Any] = {}
    sweep = np.arange(64.0, 129.0)
    for what, index in (("inputs", 2), ("outputs", 3)):
        wide = x[:, index] >= 64
        divisors = np.gcd(x[wide, index].astype(int), 32)
        rows = {int(d): ratio[wide][divisors == d] for d in (32, 16, 8, 4, 2, 1)}
        usual = ratio[wide].mean()
        result[what] = {
            d: {"ratio": float(np.exp(r.mean() - usual)), "se": float(r.std() / np.sqrt(len(r))), "rows": len(r)}
            for d, r in rows.items()
        }
        seconds = sweep * np.array([result[what][int(np.gcd(int(c), 32))]["ratio"] for c in sweep])
        for tolerated in (0.03, 0.015):
            result[what][f"grid at {100 * tolerated:g}%"] = finest_free_grid(sweep, seconds, tolerated)
    result["steps"] = {}
    for _, channels, side in RESNETS["resnet18"]:
        widths = np.array(swept_widths(channels), float)
        for what in ("inputs", "outputs"):
            shape = np.tile([32.0, side, channels, channels, 32.0 * side**2, 0.0], (len(widths), 1))
            shape[:, 2 if what == "inputs" else 3] = widths
            result["steps"][f"{channels} {what}, {side}x{side}"] = finest_free_grid(widths, model.predict(shape))
    return result


def profiles(x: np.ndarray, y: np.ndarray, gpu: str) -> dict[str, Any]:
    """``budgets.fit`` for whole pruned networks on a stand-in for the GPU.

    The stand-in adds up the network's 3x3 convolutions; each takes what boosted trees on the logarithms of batch, size
    and channels predict, fitted to all rows, without the growing overhead.
    """
    recorded = fitted(x, y)
    overhead = overhead_of(recorded, x) - recorded.coef_[0]
    trees = HistGradientBoostingRegressor(max_iter=400, learning_rate=0.05, min_samples_leaf=5, random_state=0)
    trees.fit(np.log(x[:, :4]), np.log(np.maximum(y - overhead, 0.01)))
    result: dict[str, dict[str, Any]] = {}
    for name in RESNETS:
        groups: ChannelGroups = find_groups(*load_model(name, (32, 3, 224, 224)))
        shapes, _ = kernel_shapes(groups)
        assert shapes is not None

        def seconds(alpha: np.ndarray, shapes: FeatureMap = shapes) -> np.ndarray:
            found = np.zeros(len(alpha))
            sizes = (shapes(alpha) * shapes.dense).reshape(len(alpha), -1, 4)
            for layer in np.flatnonzero(np.array(shapes.classes[::4]) == THREE_BY_THREE):
                images, side, reads, outputs = sizes[:, layer].T
                found += np.exp(trees.predict(np.log(np.c_[images, side, reads / 9, outputs])))
            return found / 1000

        rng = np.random.default_rng(0)
        widths = np.maximum(1, np.rint(rng.uniform(0.2, 1, (140, len(groups))) * groups.sizes)).astype(int)
        table = pd.DataFrame(widths, columns=list(groups.names))
        table["seconds"] = seconds(widths / groups.sizes)
        table["split"] = ["train"] * 40 + ["holdout"] * 100
        profile = Profile(table, tuple(groups.names), tuple(groups.sizes.tolist()), "torch/cuda fp32", "latency")
        some = {k: m for k, m in candidates(groups, gpu=True).items() if k not in ("physics + gp", "monotone boosting")}
        model = budgets.fit(profile, groups, candidates=some)
        result[name] = {
            "chosen": model.name,
            "holdout": {k: float(v) for k, v in model.report["holdout_mape"].items()},
            "bound covers": float((table.seconds[40:] <= model.upper(widths[40:] / groups.sizes, 0.9)).mean()),
        }
        say(f"  {gpu}, {name}: {model.name}, {100 * result[name]['holdout'][model.name]:.1f}%")
    return result


def jetson_kernels(path: Path) -> float:
    """Mean error of the fastest kernel for latency on the Jetson's GPU, one model for each kernel size, as `jetson`."""
    frame = pd.read_csv(path)
    side, inputs, kernel, outputs = (frame[name].to_numpy(float) for name in ("hw_in", "c_in", "k", "c_out"))
    out, y = side - kernel + 1, frame["latency_ms"].to_numpy()
    x = np.c_[np.ones(len(y)), out, inputs * kernel**2 / 9, outputs, out**2, np.zeros(len(y))]
    combination = frame.groupby(["hw_in", "c_in", "c_out"]).ngroup().to_numpy()
    held = np.isin(combination, np.random.default_rng(0).permutation(combination.max() + 1)[: combination.max() // 5])
    predicted = np.zeros(len(y))
    for size in np.unique(kernel):
        own, shapes = kernel == size, replace(SHAPES, classes=(THREE_BY_THREE if size == 3 else ANY,) * len(SHAPE))
        model = FastestKernel(features(BYTES), shapes=shapes).fit(x[own & ~held], y[own & ~held])
        predicted[own] = model.predict(x[own])
    return float(np.abs(predicted / y - 1)[held].mean())


def raspberry_pi(path: Path) -> dict[str, Any]:
    """Errors of ``budgets.fit`` and of its candidates on whole WideResNets, 40 configurations, three draws."""
    device = RaspberryPi(path)
    result: dict[str, Any] = {}
    some = ("physics", "flops", "per operation")
    for how in ("independent", "common scale", "multiples of 8"):
        found: dict[str, list[float]] = {name: [] for name in (*some, "budgets.fit", "bound covers")}
        for repeat in range(3):
            rng = np.random.default_rng(repeat)
            held, train = draw(device.groups, how, 500, rng), draw(device.groups, how, 40, rng)
            truth = device.seconds(held)
            table = pd.DataFrame(np.rint(train * device.groups.sizes).astype(int), columns=list(device.groups.names))
            table["seconds"] = device.seconds(train)
            usual = candidates(device.groups)
            for name in some:
                model = usual[name].fit(train, table["seconds"])
                found[name].append(float(np.abs(model.predict(held) / truth - 1).mean()))
            whole_model = budgets.fit(table, device.groups, target="tflite/raspberry-pi-3")
            found["budgets.fit"].append(float(np.abs(whole_model(held) / truth - 1).mean()))
            found["bound covers"].append(float((truth <= whole_model.upper(held, 0.9)).mean()))
        result[how] = {name: float(np.mean(values)) for name, values in found.items()}
        say(f"  {how}: " + ", ".join(f"{k} {100 * v:.2f}%" for k, v in result[how].items()))
    return result


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def plot(results: dict[str, Any], tables: dict[str, np.ndarray], path: Path) -> None:
    """Draw the overhead, the errors and the multiples."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.6), constrained_layout=True)
    colours = {"a100": "#4c72b0", "t4": "#dd8452"}
    titles = {"a100": "A100", "t4": "T4"}
    for gpu, y in tables.items():
        rows = len(y) // 200 * 200
        lowest = y[:rows].reshape(-1, 200).min(1)
        axes[0].plot(100 + 200 * np.arange(len(lowest)), lowest, "o-", ms=3, color=colours[gpu], label=titles[gpu])
        for name, style in (("physics", ":"), ("physics, overhead", "--"), (OURS, "-")):
            errors = results[gpu]["mape"][name]
            axes[1].plot(TRAIN, [100 * errors[n] for n in TRAIN], "o" + style, color=colours[gpu],
                         label=f"{titles[gpu]}: {name}")  # fmt: skip
        for offset, what in ((-0.2, "inputs"), (0.2, "outputs")):
            grid = results["multiples"][gpu][what]
            at = np.arange(6) + offset + (0.1 if gpu == "t4" else -0.1)
            ratios = [100 * (grid[d]["ratio"] - 1) for d in (1, 2, 4, 8, 16, 32)]
            spread = [100 * grid[d]["se"] for d in (1, 2, 4, 8, 16, 32)]
            alpha = 1.0 if what == "inputs" else 0.45
            axes[2].bar(at, ratios, 0.2, yerr=spread, color=colours[gpu], alpha=alpha, label=f"{titles[gpu]}: {what}")
    axes[0].set(title="The recordings' own overhead grows", xlabel="position in the recording",
                ylabel="shortest of 200 convolutions, ms", ylim=(0, None))  # fmt: skip
    for n, goal in GOALS.items():
        axes[1].plot([n / 1.3, n * 1.3], [100 * goal] * 2, color="black", lw=2)
        axes[1].annotate(f"goal {100 * goal:.0f}%", (n / 1.4, 100 * goal), ha="right", va="center")
    axes[1].set_xscale("log")
    axes[1].set_xticks(TRAIN, [f"{n:,}" for n in TRAIN], minor=False)
    axes[1].minorticks_off()
    axes[1].set(title="Error on 1,500 held-out convolutions", xlabel="measured convolutions",
                ylabel="mean error, %", ylim=(0, None))  # fmt: skip
    axes[2].axhline(0, color="black", lw=0.8)
    axes[2].set(title="Time by divisor of the channel count", xlabel="largest power of two that divides the channels",
                ylabel="time against the average, %")  # fmt: skip
    axes[2].set_xticks(range(6), ("1", "2", "4", "8", "16", "32"))
    for axis in axes:
        axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> int:
    """Run every part and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of gpu_convolutions, rpi3_wrn40_2 and jetson_tx2")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path, help="draw a figure to this file")
    args = parser.parse_args()
    pi = args.data / "rpi3_wrn40_2" / "rpi3_wrn40_2_table.csv.gz"
    tx2 = {kind: args.data / "jetson_tx2" / f"datasetMultivariate{kind.upper()}.csv" for kind in ("gpu", "cpu")}
    missing = [p for p in (pi, *tx2.values(), *(args.data / "gpu_convolutions" / f"{g}.csv.gz" for g in GPUS))
               if not p.exists()]  # fmt: skip
    if missing:
        parser.error(f"{missing[0]} does not exist; the folder needs gpu_convolutions, rpi3_wrn40_2 and jetson_tx2.")
    torch.set_num_threads(1)
    started = time.perf_counter()
    results: dict[str, Any] = {"multiples": {}, "networks": {}, "profiles": {}}
    tables = {}
    for gpu in GPUS:
        say(f"{gpu}: convolutions")
        x, y, names = read(args.data, gpu)
        tables[gpu] = y
        results[gpu] = convolutions(x, y)
        results[gpu]["size classes"] = size_classes(x, y)
        results[gpu]["algorithm as in the kernel name"] = chosen_algorithms(x, y, names)
        say(f"{gpu}: multiples of channels, sums of convolutions, profiles of networks")
        results["multiples"][gpu] = multiples(x, y)
        results["networks"][gpu] = networks(x, y)
        results["profiles"][gpu] = profiles(x, y, gpu)
    say("phones")
    results["phones"] = phones()
    say("Jetson TX2")
    results["jetson_tx2"] = {kind: jetson(path) for kind, path in tx2.items()}
    results["jetson_tx2"]["gpu"]["latency"]["ours: fastest kernel"] = {"mape": jetson_kernels(tx2["gpu"])}
    say("Raspberry Pi 3")
    results["raspberry_pi_3"] = raspberry_pi(pi)
    say(f"{time.perf_counter() - started:.0f} s")
    text = json.dumps(results, indent=2)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text + "\n")
    print(text)
    if args.plot is not None:
        plot(results, tables, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
