"""Is the remaining time that `dsa_hw.allocate` shows right within a factor of two?

    python benchmarks/remaining_time.py

Runs allocations with the progress display switched on, notes what it says, and compares with the time that was then
really left. A statement counts as right if it is between half and twice the true remaining time, or within five
seconds of it. While channel groups are being found, nothing is said.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import dsa_hw
from dsa_hw.utils.progress import Bar
from dsa_hw.zoo.data import load_data
from dsa_hw.zoo.models import load_model

_SLACK = 5.0


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def recorded(run: Callable[[], Any]) -> list[tuple[str, float, float | None]]:
    """Run something; return the stage, the time and the remaining time that was shown, for each statement."""
    found: list[tuple[str, float, float | None]] = []
    draw = Bar._draw

    def note(bar: Bar) -> None:
        if bar._outer is None:
            found.append((bar._stage, time.monotonic(), bar.left()))
        draw(bar)

    Bar._draw, sys.stderr, kept = note, _Terminal(), sys.stderr  # type: ignore[assignment, method-assign]
    try:
        run()
    finally:
        Bar._draw, sys.stderr = draw, kept  # type: ignore[method-assign]
    found.append(("end", time.monotonic(), 0.0))
    return found


def share_right(found: list[tuple[str, float, float | None]]) -> tuple[float, float, dict[str, float], list[Any]]:
    """Return the duration, the share of right statements by time, the duration of each stage, and what was wrong."""
    end = found[-1][1]
    right = total = stated = 0.0
    stages: dict[str, float] = {}
    misses = []
    for (stage, at, said), (_, until, _) in itertools.pairwise(found):
        stages[stage] = stages.get(stage, 0.0) + until - at
        total += until - at
        true = end - at
        if said is None:
            continue
        stated += until - at
        if true / 2 <= said <= 2 * true or abs(said - true) <= _SLACK:
            right += until - at
        elif until - at > 0.3:
            misses.append((stage, round(true, 1), round(said, 1)))
    return total, right / max(stated, 1e-9), stages, misses


def cases() -> dict[str, Callable[[], Any]]:
    """Return allocations of different lengths and kinds."""
    quick = dsa_hw.ProfileOptions(samples=24, holdout=6)

    def digits(budget: str, name: str = "resnet20", **more: Any) -> Any:
        data = load_data("digits")
        torch.manual_seed(0)
        model, inputs = load_model(name, data.shape)
        return dsa_hw.allocate(model, budget, example_inputs=inputs, train=data.train, val=data.val, **more)

    def unlabelled(name: str, budget: str, **more: Any) -> Any:
        torch.manual_seed(0)
        model, inputs = load_model(name, None)
        return dsa_hw.allocate(model, budget, example_inputs=inputs, **more)

    return {
        "resnet20, digits, latency=60%": lambda: digits("latency=60%"),
        "resnet20, digits, latency=60%, 24 samples, 3 epochs": lambda: digits(
            "latency=60%", profiling=quick, options={"epochs": 3}
        ),
        "resnet20, digits, flops=50%": lambda: digits("flops=50%"),
        "resnet20, no data, latency=60%": lambda: unlabelled("resnet20", "latency=60%"),
        "resnet18, no data, latency=60%": lambda: unlabelled("resnet18", "latency=60%", profiling=quick),
        "mobilenet_v2, no data, flops=60%": lambda: unlabelled("mobilenet_v2", "flops=60%"),
    }


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", type=int, help="numbers of cases, from 1")
    parser.add_argument("--misses", action="store_true", help="also print statements that were wrong")
    args = parser.parse_args()
    for number, (name, run) in enumerate(cases().items(), 1):
        if args.only and number not in args.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.environ["DSA_HW_CACHE"] = folder  # synthesised inputs of an earlier run would shorten this one
            total, right, stages, misses = share_right(recorded(run))
        print(f"{name}: {total:.0f} s, the remaining time was right for {100 * right:.0f}% of it", flush=True)
        print("   " + json.dumps({stage: round(seconds, 1) for stage, seconds in stages.items()}), flush=True)
        if args.misses:
            print(f"   {misses}", flush=True)


if __name__ == "__main__":
    main()
