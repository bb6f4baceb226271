"""Do the intervals contain what repetitions show, alone and beside a neighbour?

Every sitting is a process of its own. It measures a few configurations of a network under each condition in turn, in
random order: idle; beside a process that uses a core for 30 or 50 % of the time, in periods of 10, 100 and 1000 ms;
beside one that streams memory; and with every core busy. From the runs of a sitting follow our ratio to the dense
network with its interval, and what others would say: the ratio of medians, of minima, and of the medians that
``torch.utils.benchmark`` reports.

    python benchmarks/repeatability.py --out repeatability.jsonl
    python benchmarks/repeatability.py --models resnet18@64 --runtimes onnxruntime/cpu --conditions idle memory
    python benchmarks/repeatability.py --out repeatability.jsonl --summary

One JSON line for each sitting, condition and configuration; what is in the file is not measured again. A line has the
error within the sitting. The summary adds the scatter between sittings as the product does: from its prior, and from
the sittings of the same network, runtime and condition up to this one. Coverage is the share of pairs of sittings of
the same condition whose difference is within the interval of the difference. Run it on a machine that is otherwise
idle, each sitting at least ten minutes after the one before (--sittings 1, later --sittings 2, ...).

    python benchmarks/repeatability.py --out repeatability.jsonl --prior

shows how likely the differences between sittings are under several priors.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

MODELS = ("resnet18@224", "resnet18@64", "mobilenet_v2@128", "resnet20@32")
RUNTIMES = ("onnxruntime/cpu", "openvino/cpu", "torch/cpu")
NEIGHBOURS: dict[str, tuple[str, ...]] = {
    "idle": (),
    "30% of 10 ms": ("burn", "0.01", "0.3"),
    "30% of 100 ms": ("burn", "0.1", "0.3"),
    "50% of 100 ms": ("burn", "0.1", "0.5"),
    "50% of 1 s": ("burn", "1.0", "0.5"),
    "memory": ("stream",),
    "all cores": ("burn", "1.0", "1.0"),
}
_SCRIPT = """
import sys, time
import numpy as np
if sys.argv[1] == "stream":
    block = np.ones(2**25)
    while True:
        block += 1.0
period, duty = float(sys.argv[2]), float(sys.argv[3])
while True:
    end = time.perf_counter() + period * duty
    while time.perf_counter() < end:
        pass
    time.sleep(period * (1 - duty))
"""


@contextlib.contextmanager
def neighbour(condition: str) -> Iterator[None]:
    """Run beside what the condition names."""
    arguments = NEIGHBOURS[condition]
    count = (os.cpu_count() or 1) if condition == "all cores" else min(len(arguments), 1)
    processes = [subprocess.Popen([sys.executable, "-c", _SCRIPT, *arguments]) for _ in range(count)]
    try:
        if processes:
            time.sleep(1.0)  # numpy is imported, the memory is there
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _past(stop: float, _: Any) -> bool:
    return time.perf_counter() > stop


def sit(args: argparse.Namespace) -> None:
    """Make one sitting under each condition and append its lines."""
    import torch

    from dsa_hw.channels import find_groups
    from dsa_hw.zoo.models import load_model
    from profilers.measuring.bench import DENSE, Bench
    from profilers.measuring.sittings import Scatter, anchor_widths
    from profilers.networks.builder import ConfigurationBuilder
    from profilers.profiling.design import Space, spread
    from profilers.profiling.grid import fixed_grid
    from profilers.targets import resolve

    torch.manual_seed(0)
    (model,), (runtime,) = args.models, args.runtimes
    name, _, side = model.partition("@")
    network, inputs = load_model(name, (1, 3, int(side), int(side)))
    groups = find_groups(network, inputs)
    target = resolve(runtime)
    builder = ConfigurationBuilder(network, groups, inputs, target)
    space = Space.of(groups.names, groups.sizes, fixed_grid(groups, 8))
    wide = space.nearest(np.full(len(groups), 0.75))
    rows = [anchor_widths(groups.sizes), tuple(wide.tolist()), *map(tuple, spread(space, 2, 0).tolist())]
    configurations = {f"c{i}": builder.loadable(row) for i, row in enumerate(rows)}
    dense = builder.loadable(groups.sizes.tolist())
    for condition in np.random.default_rng(args.sitting).permutation(args.conditions):
        bench = Bench(target, seed=args.sitting)
        with neighbour(str(condition)):
            begin = time.perf_counter()
            stop = begin + args.seconds
            found = bench.measure(configurations, dense, limit=args.seconds, enough=functools.partial(_past, stop))
            seconds = time.perf_counter() - begin
        lines = []
        for label in configurations:
            m, whole = found[label], found[DENSE]
            alone = replace(m, scatter=Scatter(ratio=0.0, scale=0.0))
            lines.append({
                "model": model, "runtime": runtime, "condition": str(condition), "sitting": args.sitting,
                "configuration": label, "log": alone.ratio.log, "own": alone.ratio.variance,
                "own_freedom": alone.ratio.freedom, "within": math.sqrt(m.within.variance), "scale": alone.scale.log,
                "scale_own": alone.scale.variance, "scale_own_freedom": alone.scale.freedom, "runs": m.runs,
                "seconds": seconds, "median": math.log(m.median / whole.median),
                "minimum": math.log(m.samples.values.min() / whole.samples.values.min()),
                "mean": math.log(_mean(m.samples.values) / _mean(whole.samples.values)),
                "torch": math.log(_torch(m.samples.values) / _torch(whole.samples.values)),
                "date": time.strftime("%Y-%m-%d %H:%M"),
            })  # fmt: skip
        with args.out.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))


def _mean(values: Any) -> float:
    """Return the mean of runs, none of which counts as more than three medians."""
    return float(np.minimum(values, 3 * np.median(values)).mean())


def _torch(values: Any) -> float:
    """Return what ``torch.utils.benchmark`` reports of these runs."""
    from torch.utils.benchmark import Measurement, TaskSpec

    return float(Measurement(1, values.tolist(), TaskSpec("network()", "", "")).median)


def read(path: Path) -> pd.DataFrame:
    """Return the lines of a file as a table."""
    lines = path.read_text().splitlines() if path.exists() else []
    return pd.DataFrame([json.loads(line) for line in lines])


def with_scatter(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with what the product adds to the error of each sitting, and the complete variances."""
    from profilers.measuring.sittings import Scatter, Sitting
    from profilers.measuring.statistics import Estimate

    parts = []
    for _, cell in table.groupby(["model", "runtime", "condition"]):
        known: list[Sitting] = []
        for _, part in cell.groupby("sitting"):
            anchor = part[part["configuration"] == "c0"].iloc[0]
            when = time.mktime(time.strptime(anchor["date"], "%Y-%m-%d %H:%M"))
            scale = Estimate(anchor["scale"], anchor["scale_own"])
            known.append(Sitting(Estimate(anchor["log"], anchor["within"] ** 2), scale, when))
            scatter = Scatter.of(known)
            new = {"scatter": scatter.ratio, "scatter_freedom": scatter.ratio_freedom}
            new |= {"scale_scatter": scatter.scale, "scale_scatter_freedom": scatter.scale_freedom}
            parts.append(part.assign(**new))
    table = pd.concat(parts)
    for kind in ("", "scale_"):
        own, between = table[f"{kind}own"], table[f"{kind}scatter"]
        table[f"{kind}variance"] = own + between
        rest = own**2 / table[f"{kind}own_freedom"] + between**2 / table[f"{kind}scatter_freedom"]
        table[f"{kind}freedom"] = (own + between) ** 2 / rest
    return table


def differences(table: pd.DataFrame) -> pd.DataFrame:
    """Return every pair of sittings of the same configuration and condition, and whether the interval covers it.

    The errors within two sittings are independent. The scatter is one unknown number for both: the degrees of freedom
    of its two estimates do not add up.
    """
    from scipy import stats

    keys, rows = ["model", "runtime", "condition", "configuration"], []
    for key, group in table.groupby(keys):
        for (_, a), (_, b) in itertools.combinations(group.sort_values("sitting").iterrows(), 2):
            row: dict[str, Any] = dict(zip(keys, key, strict=True)) | {"later": b["sitting"]}
            for what, kind in (("log", ""), ("scale", "scale_")):
                total = a[f"{kind}variance"] + b[f"{kind}variance"]
                own = sum(x[f"{kind}own"] ** 2 / x[f"{kind}own_freedom"] for x in (a, b))
                common = sum(x[f"{kind}scatter"] / math.sqrt(x[f"{kind}scatter_freedom"]) for x in (a, b)) ** 2
                reach = stats.t.ppf(0.975, total**2 / (own + common)) * math.sqrt(total)
                row[f"{what} covered"] = abs(a[what] - b[what]) <= reach
            rows.append(row)
    return pd.DataFrame(rows)


def priors(table: pd.DataFrame) -> str:
    """Return how likely the differences between sittings are, for standard deviations and weights of the prior.

    The variance between sittings of a network and runtime is drawn from the prior, a scaled inverse chi-squared
    distribution. The likelihood is that of the means over the conditions that disturb little.
    """
    from scipy import stats

    mild = table[~table["condition"].isin(["memory", "all cores"])]
    data = []
    for _, part in mild.groupby(["model", "runtime", "configuration"]):
        logs = part.pivot(index="sitting", columns="condition", values="log").dropna(axis=1)
        means = (logs - logs.mean()).mean(axis=1)
        data.append((len(means) - 1, float((means**2).sum()), part["own"].median() / logs.shape[1]))
    out = {}
    for weight in (1.0, 2.0, 4.0, 10.0):
        spread = stats.chi2.ppf((np.arange(200) + 0.5) / 200, weight)
        for sd in np.arange(0.004, 0.0161, 0.001):
            variance = weight * sd**2 / spread
            each = [
                np.log(np.mean(np.exp(-0.5 * (n * np.log(variance + own) + squares / (variance + own)))))
                for n, squares, own in data
            ]
            # The four configurations of a network shift together: they count as one.
            out[weight, round(100 * sd, 1)] = sum(each) / 4
    found = pd.Series(out).rename_axis(["counts as sittings", "sd %"]).unstack()
    return (found - found.max().max()).to_string(float_format="{:.1f}".format)


def summary(table: pd.DataFrame, since: int = 0) -> str:
    """Return the tables of the documentation; coverage is of pairs whose later sitting is at least ``since``."""
    table = with_scatter(table)
    pairs = differences(table)
    pairs = pairs[pairs["later"] >= since]
    keys = ["model", "runtime", "condition", "configuration"]
    idle = table[table["condition"] == "idle"].groupby(["model", "runtime", "configuration"])
    estimators = ("log", "median", "minimum", "mean", "torch")
    quiet = {name: idle[name].mean() for name in estimators}
    out = []
    for condition, part in table.groupby("condition"):
        row: dict[str, Any] = {"condition": condition}
        own = pairs[pairs["condition"] == condition]
        row["pairs"] = len(own)
        row["coverage %"] = 100 * own["log covered"].mean()
        row["of the time %"] = 100 * own["scale covered"].mean()
        row["half-width %"] = 100 * half_widths(part).median()
        row["within a sitting %"] = 100 * part["within"].median()
        for name in estimators:
            sd = part.groupby(keys)[name].std()
            label = {"log": "ours"}.get(name, name)
            row[f"sd {label} %"] = 100 * sd.median()
            mean = part.groupby(["model", "runtime", "configuration"])[name].mean()
            row[f"bias {label} %"] = 100 * (mean - quiet[name].reindex(mean.index)).abs().median()
        out.append(row)
    by_condition = (
        pd.DataFrame(out).set_index("condition").reindex([c for c in NEIGHBOURS if c in set(table.condition)])
    )
    rows = []
    for (model, runtime), part in table[table["condition"] == "idle"].groupby(["model", "runtime"]):
        own = pairs[(pairs["model"] == model) & (pairs["runtime"] == runtime)]
        last = part[part["sitting"] == part["sitting"].max()]
        sd = part.groupby("configuration")["log"].std()
        rows.append({
            "network": model, "runtime": runtime, "coverage, all conditions %": 100 * own["log covered"].mean(),
            "idle: half-width, last sitting %": 100 * half_widths(last).median(),
            "idle: sd between sittings %": 100 * sd.median(), "worst %": 100 * sd.max(),
            "within a sitting, median %": 100 * part["within"].median(), "within, worst %": 100 * part["within"].max(),
        })  # fmt: skip
    form = "{:.1f}".format
    return (
        f"{by_condition.to_string(float_format=form)}\n\n{pd.DataFrame(rows).to_string(float_format=form, index=False)}"
    )


def half_widths(table: pd.DataFrame) -> pd.Series:
    """Return the half-widths of the 95% intervals of ratios."""
    from scipy import stats

    return np.expm1(stats.t.ppf(0.975, table["freedom"]) * np.sqrt(table["variance"]))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="NAME@SIDE")
    parser.add_argument("--runtimes", nargs="+", default=list(RUNTIMES))
    parser.add_argument("--conditions", nargs="+", default=list(NEIGHBOURS), choices=list(NEIGHBOURS))
    parser.add_argument("--sittings", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a sitting under one condition")
    parser.add_argument("--out", type=Path, default=Path("repeatability.jsonl"))
    parser.add_argument("--summary", action="store_true", help="print the tables of what is in the file")
    parser.add_argument("--since", type=int, default=0, help="count only pairs whose later sitting is at least this")
    parser.add_argument("--prior", action="store_true", help="print how likely what is in the file is, by prior")
    parser.add_argument("--sitting", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.summary:
        print(summary(read(args.out), args.since))
        return
    if args.prior:
        print(priors(read(args.out)))
        return
    if args.sitting is not None:
        sit(args)
        return
    for sitting, model, runtime in itertools.product(range(args.sittings), args.models, args.runtimes):
        done = read(args.out)
        missing = [
            c
            for c in args.conditions
            if done.empty
            or not (
                (done["model"] == model)
                & (done["runtime"] == runtime)
                & (done["condition"] == c)
                & (done["sitting"] == sitting)
            ).any()
        ]
        if not missing:
            continue
        print(f"{time.strftime('%H:%M:%S')}  sitting {sitting + 1} of {model} on {runtime}", flush=True)
        command = [sys.executable, __file__, "--models", model, "--runtimes", runtime, "--conditions", *missing]
        options = ["--seconds", str(args.seconds), "--out", str(args.out), "--sitting", str(sitting)]
        subprocess.run([*command, *options], check=True)
    print(summary(read(args.out)))


if __name__ == "__main__":
    main()
