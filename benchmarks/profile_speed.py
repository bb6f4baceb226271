"""How fast is a profile?

Two parts. *Preparing*: configurations ready to run per minute, by narrowing a graph that was exported once, against the
naive way (shrink, ``torch.onnx.export``, new session), alternating in one run. *Profile*: a whole profile with a
breakdown of where the time goes.

    python benchmarks/profile_speed.py --out profile_speed.json

Run it on a machine that is otherwise quiet.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import profilers
from dsa_hw.channels import find_groups, shrink
from dsa_hw.zoo import models
from profilers.networks.builder import ConfigurationBuilder
from profilers.networks.onnx_export import export, generic
from profilers.profiling.design import Space, spread
from profilers.profiling.grid import fixed_grid
from profilers.targets import resolve

_GOAL_RATIO, _GOAL_SECONDS = 5.0, 180.0


def preparing(name: str, side: int, repeats: int) -> dict[str, Any]:
    """Seconds per configuration of both ways, alternating; each ends with a session that has run once."""
    model, inputs = models.load_model(name, (1, 3, side, side))
    model = generic(model)
    groups = find_groups(model, inputs)
    target = resolve("onnxruntime/cpu")
    begin = time.perf_counter()
    builder = ConfigurationBuilder(model, groups, inputs, target)
    once = time.perf_counter() - begin
    rows = spread(Space.of(groups.names, groups.sizes, fixed_grid(groups, 8)), repeats, 0)
    ours, naive = [], []
    for row in rows:
        begin = time.perf_counter()
        builder.load(row.tolist()).once()
        ours.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        small = shrink(model, groups, builder.kept(row.tolist()))
        target.load(export(small, inputs).SerializeToString(), inputs).once()
        naive.append(time.perf_counter() - begin)
    return {
        "network": name,
        "prepared": builder.how,
        "export once, s": once,
        "narrowed, s": float(np.median(ours)),
        "naive, s": float(np.median(naive)),
        "narrowed per minute": 60 / float(np.median(ours)),
        "naive per minute": 60 / float(np.median(naive)),
        "ratio": float(np.median(naive) / np.median(ours)),
        "ratio for 50, export included": float(50 * np.median(naive) / (once + 50 * np.median(ours))),
    }


def whole_profile(name: str, side: int, samples: int, holdout: int, limit: float) -> dict[str, Any]:
    """A profile into a fresh store; wall seconds and the breakdown."""
    model, inputs = models.load_model(name, (1, 3, side, side))
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        found = profilers.profile(
            model,
            inputs,
            "onnxruntime/cpu",
            samples=samples,
            holdout=holdout,
            out=Path(folder) / "profile.sqlite",
            time_limit=limit,
            name=name,
        )
        seconds = time.perf_counter() - begin
    table = found.table
    halfwidth = (table["high"] - table["low"]) / 2 / table["seconds"]
    return {
        "network": name,
        "configurations": len(table),
        "untrusted": found.untrusted,
        "seconds": seconds,
        "breakdown": found.breakdown,
        "grid": sorted(set(found.grid.values())),
        "runs": int(table["runs"].sum()),
        "interval": found.interval,
        "median halfwidth": float(halfwidth.median()),
        "largest halfwidth": float(halfwidth.max()),
    }


def main() -> int:
    """Run both parts, print what was found and whether the goals were met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["resnet18", "mobilenet_v2"], help="networks to prepare")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--profile", default="resnet18", help="network to profile; '' for none")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--holdout", type=int, default=10)
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    torch.set_num_threads(1)
    report: dict[str, Any] = {"preparing": [], "profile": None}
    good = True
    for name in options.models:
        found = preparing(name, options.side, options.repeats)
        report["preparing"].append(found)
        good &= found["ratio"] >= _GOAL_RATIO
        sys.stdout.write(
            f"{name}: {found['narrowed per minute']:.0f} configurations per minute narrowed, "
            f"{found['naive per minute']:.1f} the naive way: {found['ratio']:.1f} times as many "
            f"({found['ratio for 50, export included']:.1f} times for 50, the one export included)\n"
        )
    if options.profile:
        found = whole_profile(options.profile, options.side, options.samples, options.holdout, options.limit)
        report["profile"] = found
        good &= found["seconds"] <= _GOAL_SECONDS
        parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in found["breakdown"].items())
        sys.stdout.write(
            f"profile of {found['network']}: {found['configurations']} configurations and grid in "
            f"{found['seconds']:.0f} s ({parts}); {found['runs']} runs, intervals +/-{100 * found['interval']:.1f} %, "
            f"interval +-{100 * found['median halfwidth']:.2f} % (median)\n"
        )
    sys.stdout.write(f"goals (5 times as many; 180 s): {'met' if good else 'MISSED'}\n")
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
