"""Where a FLOPs budget and a latency budget remove channels for an Arm Ethos-U, and what Vela says of both.

    dsa-hw setup ethos-u
    python benchmarks/ethos_u.py --plot docs/images/ethos_u.png

MobileNetV2 at 96x96 with random weights: there is no accuracy here. The same method divides both kinds of budget;
every row is a network whose cycles Vela estimated. "flops, equal latency" is the FLOPs budget that was lowered until
the network took no longer than the latency budget allows. One thread; the profile is kept in the store and continued.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import budgets
from budgets import FlopsBudget, ParamsBudget
from dsa_hw.channels import find_groups
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.problem import Problem, realise
from dsa_hw.methods.registry import solve
from dsa_hw.utils.progress import tracked
from dsa_hw.zoo.models import load_model
from profilers import profile
from profilers.networks.builder import ConfigurationBuilder
from profilers.targets import resolve
from profilers.targets.ethos_u import EthosU

RESULTS = Path(__file__).parent / "results" / "ethos_u.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--device", default="ethos-u55-128")
    option("--model", default="mobilenet_v2")
    option("--side", type=int, default=96)
    option("--samples", type=int, default=15)
    option("--holdout", type=int, default=5)
    option(
        "--method", default="knapsack", help="any method of dsa_hw.methods.registry that needs no data (%(default)s)"
    )
    option("--shares", type=float, nargs="+", default=[0.7, 0.5, 0.35])
    option("--store", type=Path, default=Path("ethos_u.sqlite"))
    option("--out", type=Path, default=RESULTS)
    option("--plot", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs = load_model(args.model, (1, 3, args.side, args.side))
    begin = time.monotonic()
    found = profile(
        model, inputs, args.device, samples=args.samples, holdout=args.holdout, out=args.store, name=args.model
    )
    took = time.monotonic() - begin
    groups = find_groups(model, inputs)
    latency = budgets.fit(found, groups)
    table = found.table
    flops, params = FlopsBudget("50%").cost(groups), ParamsBudget("50%").cost(groups)
    target = resolve(args.device)
    assert isinstance(target, EthosU), f"--device must be an Ethos-U, got {args.device}"
    builder = ConfigurationBuilder(model, groups, inputs, target)
    grid = np.asarray([found.grid[name] for name in groups.names])
    one = np.ones(len(groups))
    held = table[table["split"] == "holdout"]
    errors = (latency.predict(held) / held["seconds"] - 1).abs()

    def seconds(widths: Any) -> float:
        return float(builder.load(widths).run(1)[0])

    def divide(cost: Any, limit: float) -> Any:
        problem = Problem(model, groups, CostSet([cost], groups.sizes, [limit]), inputs, grid=grid)
        return realise(problem, solve(problem, args.method)).widths

    dense = seconds(groups.sizes)
    rows: list[dict[str, Any]] = []

    def note(budget: str, share: float, widths: Any) -> None:
        alpha = widths / groups.sizes
        rows.append(
            {
                "budget": budget,
                "share": share,
                "flops": float(flops.value(torch.tensor(alpha)) / flops.value(torch.tensor(one))),
                "params": float(params.value(torch.tensor(alpha)) / params.value(torch.tensor(one))),
                "latency": seconds(widths) / dense,
                "widths": [int(w) for w in widths],
            }
        )

    def within(cost: Any, whole: float, share: float) -> Any:
        """The largest budget of ``cost`` whose network takes at most ``share`` of the dense latency, by bisection."""
        low, high, best = 0.0, 1.0, None
        for _ in range(7):
            middle = (low + high) / 2
            widths = divide(cost, middle * whole)
            if seconds(widths) <= share * dense:
                low, best = middle, widths
            else:
                high = middle
        return best

    for share in tracked(args.shares, "budgets"):
        note("flops", share, divide(flops, share * float(flops.value(torch.tensor(one)))))
        note("flops, equal latency", share, within(flops, float(flops.value(torch.tensor(one))), share))
        note("latency", share, within(latency, dense, share))
    estimate = target.estimate(builder.artefact(builder.kept(groups.sizes.tolist())), inputs)
    flash = sum(o["cycles"] for o in estimate["operations"] if _memory_bound(o)) / estimate["cycles"]
    about = {
        "target": found.target,
        "estimated": found.estimated,
        "method": args.method,
        "dense_ms": 1e3 * dense,
        "profile_seconds": took,
        "configurations": len(table),
        "holdout_error": [float(errors.median()), float(errors.max())],
        "memory_bound_share_of_cycles": flash,
        "memory": estimate["memory"],
        "sizes": groups.sizes.tolist(),
        "names": list(groups.names),
        "rows": rows,
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(about, indent=1) + "\n")
    shown = pd.DataFrame(rows).drop(columns="widths")
    shown[["share", "flops", "params", "latency"]] *= 100
    print({k: v for k, v in about.items() if k not in ("rows", "sizes", "names")})
    print(shown.round(1).to_string(index=False))
    if args.plot:
        draw(about, estimate, args.plot)


def _memory_bound(operation: dict[str, Any]) -> bool:
    return max(operation["busy"], key=operation["busy"].get, default="npu") not in ("npu", "sram")


def draw(about: dict[str, Any], estimate: dict[str, Any], path: Path) -> None:
    """Left: cycles against multiply-adds of every operation. Right: what half a budget keeps of every group."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.7))
    for bound, colour, label in (
        (False, "#1f618d", "multipliers or SRAM"),
        (True, "#b03a2e", "weights from flash or DRAM"),
    ):
        part = [o for o in estimate["operations"] if _memory_bound(o) is bound and o["macs"]]
        x, y = [1e-6 * o["macs"] for o in part], [1e-3 * o["cycles"] for o in part]
        left.scatter(x, y, s=16, color=colour, label=label)
    left.set(
        xscale="log", yscale="log", xlabel="million multiply-adds", ylabel="thousand cycles", title="operations, dense"
    )
    left.legend(frameon=False, fontsize=8, title="bound by")
    share = sorted({r["share"] for r in about["rows"]}, key=lambda s: abs(s - 0.5))[0]
    place, sizes = np.arange(len(about["names"])), np.asarray(about["sizes"])
    for shift, budget, colour in ((-0.2, "flops, equal latency", "0.6"), (0.2, "latency", "#1f618d")):
        row = next(r for r in about["rows"] if r["budget"] == budget and r["share"] == share)
        label = f"{budget}: {100 * row['latency']:.0f} % of the time, {100 * row['flops']:.0f} % of the FLOPs"
        right.bar(place + shift, np.asarray(row["widths"]) / sizes, 0.4, color=colour, label=label)
    right.set_xticks(place, about["names"], rotation=90, fontsize=6)
    right.set(ylabel="kept", ylim=(0, 1.25), title=f"{about['target']}, {about['estimated']}")
    right.title.set_fontsize(9)
    right.legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
