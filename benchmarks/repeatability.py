"""How repeatable are measurements, alone and next to a noisy neighbour?

Configurations of a network are measured in a quiet machine twice, and then with a neighbour process that burns one core
at 50 % duty, with several periods. On the same runs, four estimators: ours (the lower quartile of accepted runs, or a
refusal), the plain median, the plain minimum, and what ``torch.utils.benchmark`` says (its median, and whether it
warns). In each condition also ``torch.utils.benchmark.Timer`` by itself. Differences are to the first quiet round.

    python benchmarks/repeatability.py --model resnet18 --out repeatability.json

Run it on a machine that is otherwise quiet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsa_hw.channels import find_groups
from dsa_hw.zoo import models
from profilers.measuring.bench import Bench
from profilers.measuring.measurement import Measurement
from profilers.measuring.rules import MeasuringRules
from profilers.networks.builder import ConfigurationBuilder
from profilers.profiling.design import Space, corners, spread
from profilers.profiling.grid import fixed_grid
from profilers.targets import Loaded, resolve

_BURN = """
import sys, time
period = float(sys.argv[1])
while True:
    end = time.perf_counter() + period / 2
    while time.perf_counter() < end:
        pass
    time.sleep(period / 2)
"""


@contextlib.contextmanager
def neighbour(period: float | None) -> Iterator[None]:
    """A process that burns one core for half of every ``period`` seconds; None: nobody."""
    if period is None:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", _BURN, str(period)])
    try:
        time.sleep(0.5)
        yield
    finally:
        process.kill()
        process.wait()


def torch_benchmark(seconds: list[float]) -> Any:
    """The same runs as ``torch.utils.benchmark`` would report them."""
    from torch.utils.benchmark import Measurement as TorchMeasurement
    from torch.utils.benchmark.utils.common import TaskSpec

    return TorchMeasurement(1, seconds, TaskSpec("run()", "pass"))


def timer(loaded: Loaded, seconds: float) -> float:
    """``torch.utils.benchmark.Timer`` by itself: the median it reports, in seconds."""
    from torch.utils.benchmark import Timer

    return float(Timer("run()", globals={"run": loaded.once}).blocked_autorange(min_run_time=seconds).median)


def one_condition(
    builder: ConfigurationBuilder, rows: list[list[int]], period: float | None, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure all configurations with fresh sessions; every estimator on the same runs."""
    with neighbour(period):
        bench = Bench(builder.target, rules=MeasuringRules(), seed=seed)
        networks = {str(i): builder.load(row) for i, row in enumerate(rows)}
        begin = time.perf_counter()
        found: dict[str, Measurement] = bench.measure(networks, limit=options.limit)
        spent = time.perf_counter() - begin
        with builder.target.active():
            timed = [timer(networks[name], options.timer) for name in networks]
    theirs = [torch_benchmark(m.samples.values.tolist()) for m in found.values()]
    return {
        "period": period,
        "seconds": spent,
        "load": os.getloadavg()[0],
        "ours": [m.seconds if m.trusted else None for m in found.values()],
        "doubts": [m.doubt for m in found.values()],
        "halfwidth": [m.halfwidth for m in found.values()],
        "rejected": [m.rejected for m in found.values()],
        "hidden": [m.hidden for m in found.values()],
        "median": [float(np.median(m.samples.values)) for m in found.values()],
        "minimum": [float(m.samples.values.min()) for m in found.values()],
        "torch.utils.benchmark": [m.median for m in theirs],
        "torch.utils.benchmark warns": [bool(m.has_warnings) for m in theirs],
        "Timer alone": timed,
    }


ESTIMATORS = ("ours", "median", "minimum", "torch.utils.benchmark", "Timer alone")


def differences(first: dict[str, Any], other: dict[str, Any], estimator: str) -> list[float]:
    """Relative differences per configuration, where both conditions give a number."""
    pairs = zip(first[estimator], other[estimator], strict=True)
    return [abs(b / a - 1) for a, b in pairs if a is not None and b is not None]


def table(conditions: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row per condition and estimator."""
    lines = [
        "| condition | estimator | median difference | largest | refused | rejected runs | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    first = next(iter(conditions.values()))
    for name, condition in list(conditions.items())[1:]:
        for estimator in ESTIMATORS:
            found = differences(first, condition, estimator)
            middle = f"{100 * np.median(found):.2f} %" if found else "-"
            largest = f"{100 * max(found):.2f} %" if found else "-"
            ours = estimator == "ours"
            refused = sum(v is None for v in condition["ours"]) if ours else "-"
            rejected = f"{100 * np.mean(condition['rejected']):.0f} %" if ours else "-"
            spent = f"{condition['seconds']:.0f}" if ours else "-"
            lines.append(f"| {name} | {estimator} | {middle} | {largest} | {refused} | {rejected} | {spent} |")
    return "\n".join(lines)


def kept(conditions: dict[str, dict[str, Any]], promise: float = 0.02) -> bool:
    """The promise: next to a neighbour, the median difference is at most 2 %, or the profiler refuses."""
    first = next(iter(conditions.values()))
    medians = [differences(first, c, "ours") for c in list(conditions.values())[1:]]
    return all(not found or float(np.median(found)) <= promise for found in medians)


def main() -> int:
    """Run all conditions, print the table, say whether the promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--input", default="1x3x224x224")
    parser.add_argument("--target", default="onnxruntime/cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--configurations", type=int, default=8)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per condition")
    parser.add_argument("--timer", type=float, default=1.0, help="seconds of torch's Timer per configuration")
    parser.add_argument("--periods", type=float, nargs="*", default=[0.01, 0.1, 1.0], help="seconds; half is burnt")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    torch.set_num_threads(1)
    model, inputs = models.load_model(options.model, models.parse_shape(options.input))
    groups = find_groups(model, inputs)
    space = Space.of(groups.names, groups.sizes, fixed_grid(groups, 8))
    rows = np.vstack([corners(space), spread(space, options.configurations, 0)])[: options.configurations].tolist()
    builder = ConfigurationBuilder(model, groups, inputs, resolve(options.target, threads=options.threads))
    plan: list[tuple[str, float | None]] = [("quiet", None), ("quiet again", None)]
    plan += [(f"neighbour, {1e3 * period:g} ms period", period) for period in options.periods]
    conditions = {name: one_condition(builder, rows, period, seed, options) for seed, (name, period) in enumerate(plan)}
    sys.stdout.write(f"{options.model} on {builder.target.title}, {len(rows)} configurations\n\n{table(conditions)}\n")
    for name, condition in conditions.items():
        for doubt in sorted({d for d in condition["doubts"] if d}):
            sys.stdout.write(f"refused ({name}): {doubt}\n")
    quiet = [v for name in ("quiet", "quiet again") for v in conditions[name]["ours"]]
    if sum(v is None for v in quiet) > len(quiet) / 4:
        sys.stdout.write("inconclusive: even the quiet rounds were refused; this machine is not quiet\n")
        return 2
    result = kept(conditions)
    sys.stdout.write(f"promise (at most 2 %, or a refusal): {'kept' if result else 'BROKEN'}\n")
    if options.out:
        options.out.write_text(json.dumps({"configurations": rows, "conditions": conditions}, indent=1))
    return 0 if result else 1


if __name__ == "__main__":
    sys.exit(main())
