"""The picture of docs/guide/how-we-measure.md: disturbed runs, their ratios, and intervals of repeated sittings.

    python benchmarks/measuring_picture.py --out docs/images/how-we-measure.png

The runs of the first two panels are measured now, beside a process that uses a core for 30 % of every 100 ms. The
intervals are those of benchmarks/results/repeatability.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from repeatability import NEIGHBOURS, half_widths, neighbour, read, with_scatter

from dsa_hw.channels import find_groups
from dsa_hw.zoo.models import load_model
from profilers.measuring.bench import DENSE, Bench
from profilers.measuring.measurement import Samples
from profilers.measuring.rules import MeasuringRules
from profilers.measuring.sittings import anchor_widths
from profilers.networks.builder import ConfigurationBuilder
from profilers.targets import resolve

_RESULTS = Path(__file__).parent / "results" / "repeatability.jsonl"
_DENSE, _SMALL = "#4c72b0", "#dd8452"


def runs(name: str, side: int, rounds: int) -> tuple[Samples, Samples, float]:
    """Measure the dense network and its anchor beside a neighbour; their runs, and the ratio that follows."""
    network, inputs = load_model(name, (1, 3, side, side))
    groups = find_groups(network, inputs)
    builder = ConfigurationBuilder(network, groups, inputs, resolve("onnxruntime/cpu"))
    small, dense = (builder.loadable(w) for w in (anchor_widths(groups.sizes), groups.sizes.tolist()))
    bench = Bench(builder.target, rules=MeasuringRules(least_blocks=1, most_blocks=1, rounds=rounds))
    found: list[Mapping[str, Samples]] = []
    with neighbour("30% of 100 ms"):
        measured = bench.measure({"half": small}, dense, on_round=found.append)
    parts = (Samples.joined([round[name] for round in found]) for name in ("half", DENSE))
    return (*parts, measured["half"].ratio.value)  # type: ignore[return-value]


def main() -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18@64", help="NAME@SIDE")
    parser.add_argument("--rounds", type=int, default=250)
    parser.add_argument("--results", type=Path, default=_RESULTS)
    parser.add_argument("--out", type=Path, default=Path("how-we-measure.png"))
    args = parser.parse_args()
    name, _, side = args.model.partition("@")
    half, dense, ratio = runs(name, int(side), args.rounds)
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(8, 9), constrained_layout=True)
    top.plot(1e3 * dense.values[::2], ".", color=_DENSE, markersize=3, label="dense network")
    top.plot(1e3 * half.values, ".", color=_SMALL, markersize=3, label="half of the channels")
    top.set(ylabel="ms", ylim=(0, 1e3 * float(np.quantile(dense.values, 0.98)) * 1.3), xlabel="run")
    longer = 100 * (float(np.quantile(dense.values, 0.98) / np.quantile(dense.values, 0.25)) - 1)
    top.set_title(f"Beside another program, runs take up to {longer:.0f}% longer ...", loc="left")
    top.legend(loc="upper right", ncols=2, frameon=False)
    own = half.values / np.minimum(half.before, half.after)
    middle.plot(own, ".", color=_SMALL, markersize=3)
    middle.axhline(ratio, color="black", linewidth=1, label=f"measured ratio, all loads: {ratio:.3f}")
    spread = float(np.quantile(np.abs(own - np.median(own)), 0.9))
    middle.set(ylabel="ratio to the dense network", xlabel="run", ylim=(ratio - 4 * spread, ratio + 4 * spread))
    middle.set_title("... but so do the dense network's runs next to them: most ratios stay", loc="left")
    middle.legend(loc="upper right", frameon=False)
    table = with_scatter(read(args.results))
    part = table[
        (table["model"] == args.model) & (table["runtime"] == "onnxruntime/cpu") & (table["configuration"] == "c0")
    ]
    for i, condition in enumerate(NEIGHBOURS):
        rows = part[part["condition"] == condition].sort_values("sitting")
        reach = np.log1p(half_widths(rows))
        x = i + np.linspace(-0.25, 0.25, max(len(rows), 2))[: len(rows)]
        value = np.exp(rows["log"])
        bars = [value * (1 - np.exp(-reach)), value * (np.exp(reach) - 1)]
        bottom.errorbar(x, value, bars, fmt="o", color=_SMALL, markersize=4, capsize=2,
                        label="ratio with its 95% interval" if i == 0 else None)  # fmt: skip
        plain = np.exp(rows["median"])
        bottom.plot(x + 0.06, plain, "x", color="gray", markersize=5, label="ratio of the medians" if i == 0 else None)
    bottom.set_xticks(range(len(NEIGHBOURS)), [c.replace(" of ", "\nof ") for c in NEIGHBOURS], fontsize=8)
    bottom.set(ylabel="ratio to the dense network")
    bottom.set_title("Repeated sittings: where the ratio is known badly, the interval says so", loc="left")
    bottom.legend(loc="best", frameon=False, fontsize=8)
    figure.suptitle(f"{args.model}, ONNX Runtime, one thread", fontsize=10)
    figure.savefig(args.out, dpi=110)
    print(f"saved: {args.out}")


if __name__ == "__main__":
    main()
