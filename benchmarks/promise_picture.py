"""Draw asked against got: the latency of pruned networks over the limit that was asked for.

    python benchmarks/promise_picture.py --out docs/images/asked-got.png

The numbers are those of `benchmarks/promise.py` in benchmarks/results/promise_rivals.csv: 36 cases, every network of a
case measured in one interleaved session that had no part in choosing it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

ROWS = {
    "flops_proportional": ("keep that share\nof the FLOPs", "#d55e00"),
    "torch_pruning": ("Torch-Pruning at the\nratio for that share", "#7b8794"),
    "dsa_hw": ("dsa_hw", "#0072b2"),
}


def draw(table: pd.DataFrame) -> Figure:
    rng = np.random.default_rng(0)
    with mpl.rc_context(
        {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False}
    ):
        figure = Figure(figsize=(8.2, 3.1), layout="constrained")
        axes = figure.add_subplot()
        axes.axvspan(0, 1, color="#0072b2", alpha=0.06, lw=0)
        axes.axvline(1, color="#1f2933", lw=1.2)
        for place, (column, (label, colour)) in enumerate(reversed(ROWS.items())):
            values = table[column].dropna().to_numpy(float)
            axes.scatter(values, place + rng.uniform(-0.2, 0.2, len(values)), s=26, color=colour, alpha=0.8, lw=0)
            missed = int((values > 1.01).sum())
            axes.text(2.95, place, f"{missed} of {len(values)} too slow", ha="right", va="center", color=colour)
            axes.text(0.79, place, label, ha="right", va="center")
        axes.text(1.01, 2.62, "the limit that was asked for", ha="left", va="center", fontsize=9)
        axes.set(xlim=(0.8, 2.95), ylim=(-0.5, 2.75), yticks=[], xlabel="measured latency / limit")
        axes.set_xticks([1, 1.5, 2, 2.5], ["1.0", "1.5", "2.0", "2.5"])
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "results" / "promise_rivals.csv")
    parser.add_argument("--out", type=Path, default=Path("asked-got.png"))
    args = parser.parse_args()
    draw(pd.read_csv(args.data)).savefig(args.out, dpi=150, facecolor="white")


if __name__ == "__main__":
    main()
