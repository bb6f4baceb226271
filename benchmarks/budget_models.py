"""Accuracy of budget models on real runtimes, beside what other tools use: learning curves, goals, coverage of bounds.

    python benchmarks/budget_models.py measure --tables DIRECTORY [--only resnet18@onnxruntime/cpu ...]
    python benchmarks/budget_models.py fit --tables DIRECTORY --out results.json --plot learning.png
    python benchmarks/budget_models.py coverage --tables DIRECTORY --out results.json

``measure`` profiles each network once (80 training configurations and 40 held out, drawn before) and writes one CSV and
one JSON of attributes for each; it resumes where it stopped, and a network that is finished is not measured again.
``fit`` needs only those files, so that fits can be repeated without measuring. ``coverage`` computes only the coverage
of the bounds. Both write results.json after each case and keep the cases that they do not compute.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from budget_baselines import baselines, contenders

import budgets
from dsa_hw.channels import ChannelGroups, find_groups
from dsa_hw.errors import DsaError
from dsa_hw.profiles import Profile
from dsa_hw.utils.progress import tracked
from dsa_hw.zoo.torchvision_compat import torchvision

CASES = (
    "resnet18@onnxruntime/cpu",
    "resnet50@onnxruntime/cpu",
    "mobilenet_v2@onnxruntime/cpu",
    "densenet121@onnxruntime/cpu",
    "efficientnet_b0@onnxruntime/cpu",
    "shufflenet_v2_x1_0@onnxruntime/cpu",
    "resnet18@torch/cpu",
)
TRAIN, HOLDOUT, SIZES, REPEATS, SPLITS = 80, 40, (10, 20, 40, 80), 5, 120
CHOSEN = "ours: budgets.fit"
# Mean hold-out error at 40 configurations, by network, and coverage of the 90% bound in each third of the cost.
GOAL_MAPE = {
    "resnet18": 0.02,
    "resnet50": 0.02,
    "densenet121": 0.02,
    "mobilenet_v2": 0.025,
    "efficientnet_b0": 0.025,
    "shufflenet_v2_x1_0": 0.03,
}
GOAL_WITHIN, GOAL_COVERAGE = 0.99, (0.85, 0.95)


def network(case: str) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    """The network of a case with random weights and its example input: latency does not depend on either's values."""
    torch.manual_seed(0)
    model = getattr(torchvision.models, case.partition("@")[0])(weights=None).eval()
    return model, (torch.randn(1, 3, 224, 224),)


def files(directory: Path, case: str) -> tuple[Path, Path, Path]:
    """Store, table and attributes of a case."""
    stem = case.replace("/", "-").replace("@", "_")
    return directory / f"{stem}.sqlite", directory / f"{stem}.csv", directory / f"{stem}.json"


def measure(directory: Path, cases: list[str], limit: float) -> int:
    """Profile every case that has no table yet; returns the number of cases that could not be measured."""
    import profilers

    directory.mkdir(parents=True, exist_ok=True)
    failed = 0
    for case in cases:
        store, table, attributes = files(directory, case)
        if table.exists() and attributes.exists():
            print(f"{case}: measured already")
            continue
        model, inputs = network(case)
        started = time.perf_counter()
        try:
            profile = profilers.profile(
                model,
                inputs,
                case.partition("@")[2],
                samples=TRAIN,
                holdout=HOLDOUT,
                out=store,
                time_limit=limit,
                name=case.partition("@")[0],
            )
        except DsaError as error:
            # What was measured stays in the store; the next call continues it.
            print(f"{case}: {error}", file=sys.stderr)
            failed += 1
            continue
        profile.table.to_csv(table, index=False)
        attributes.write_text(json.dumps(profile.metadata(), indent=2, default=str) + "\n")
        print(f"{case}: {len(profile)} configurations in {time.perf_counter() - started:.0f} s")
    return failed


def read(directory: Path, case: str) -> Profile | None:
    """The cached profile of a case, or None where it has not been measured."""
    _, table, attributes = files(directory, case)
    if not (table.exists() and attributes.exists()):
        return None
    return Profile.from_metadata(pd.read_csv(table), json.loads(attributes.read_text()))


def _ratios(table: pd.DataFrame, groups: ChannelGroups) -> tuple[np.ndarray, np.ndarray]:
    return table[list(groups.names)].to_numpy(np.float64) / groups.sizes, table["seconds"].to_numpy(np.float64)


def evaluate(profile: Profile, groups: ChannelGroups, splits: int = SPLITS) -> dict[str, Any]:
    """Hold-out errors of all methods and of ``budgets.fit`` at each training size, and the coverage of its bound.

    Everyone is given the dense network besides the n training configurations.
    """
    table = profile.table
    held, truth = _ratios(table[table["split"] == "holdout"], groups)
    alpha, y = _ratios(table[table["split"] == "train"], groups)
    dense, dense_y = _ratios(table[table["split"] == "dense"], groups)
    methods: dict[str, Callable[[], Any]] = {**contenders(groups), **baselines(groups)}
    orders = [np.random.default_rng(seed).permutation(len(y)) for seed in range(REPEATS)]
    mape: dict[str, dict[int, float]] = {name: {} for name in (CHOSEN, *methods)}
    within: dict[str, dict[int, float]] = {name: {} for name in (CHOSEN, *methods)}
    ours: dict[int, list[dict[str, Any]]] = {}
    for n in SIZES:
        rows = [order[:n] for order in orders[: 1 if n >= len(y) else REPEATS]]
        for name, make in methods.items():
            errors = [
                np.abs(make().fit(np.vstack([alpha[r], dense]), np.r_[y[r], dense_y]).predict(held) / truth - 1)
                for r in rows
            ]
            mape[name][n], within[name][n] = float(np.mean(errors)), float(np.mean(np.array(errors) <= 0.1))
        ours[n] = [_ours(profile, groups, r) for r in rows]
        mape[CHOSEN][n], within[CHOSEN][n] = (
            float(np.mean([o[key] for o in ours[n]])) for key in ("mape", "within_10")
        )
    return {
        "groups": len(groups),
        "configurations": len(y),
        "holdout": len(truth),
        "noise": profile.noise,
        "mape": mape,
        "within_10": within,
        "fit_at_40": {key: float(np.mean([o[key] for o in ours[40]])) for key in ours[40][0] if key != "name"},
        "chosen": [o["name"] for o in ours[40]],
        **coverage(profile, groups, splits),
    }


def _ours(profile: Profile, groups: ChannelGroups, rows: np.ndarray) -> dict[str, Any]:
    """``budgets.fit`` on some of the training rows, the dense network and the hold-out."""
    table = profile.table
    train = table[table["split"] == "train"].iloc[rows]
    some = pd.concat([train, table[table["split"].isin(["dense", "holdout"])]], ignore_index=True)
    started = time.perf_counter()
    model = budgets.fit(replace(profile, table=some), groups)
    errors = model.provenance.errors
    return {
        "name": model.name,
        "mape": errors["holdout_mape"],
        "within_10": errors["holdout_within_10"],
        "cv_mape": errors["cv_mape"],
        "half_width_90": model.half_width(0.9),
        "seconds": time.perf_counter() - started,
    }


def coverage(profile: Profile, groups: ChannelGroups, splits: int = SPLITS) -> dict[str, Any]:
    """Coverage of the 90 % bound of ``budgets.fit``, as a user calls it, over random splits of the measured table.

    40 of all drawn configurations (and the dense network) are fitted, the others test. Given the table, the 40 and each
    of the others are exchangeable, as the theory asks. The coverage of a single split has a standard deviation of about
    5 points (40 calibration ratios, 79 tests), so its mean over 20 splits would be uncertain by more than a point;
    ``coverage_90_se`` is the standard error over the splits. ``coverage_90_by_cost``: the cheapest, middle and dearest
    third of the configurations on their own, which no theorem promises. ``constant_by_cost``: the same for a bound from
    the same models without mean and spread by cost, i.e. jackknife+ or CV+ on plain ratios.
    """
    table = profile.table
    drawn, dense = table[table["split"].isin(["train", "holdout"])], table[table["split"] == "dense"]
    alpha, y = _ratios(drawn, groups)
    third = np.argsort(np.argsort(y)) * 3 // len(y)
    covered, widths, methods = [], [], Counter[str]()
    tests, kept, constant = np.zeros(3), np.zeros(3), np.zeros(3)
    for seed in tracked(range(splits), "coverage"):
        order = np.random.default_rng(1000 + seed).permutation(len(y))
        some = pd.concat([drawn.iloc[order[:40]].assign(split="train"), dense], ignore_index=True)
        model = budgets.fit(replace(profile, table=some), groups)
        left = order[40:]
        upper = model.upper(alpha[left], 0.9)
        hit = y[left] <= upper
        covered.append(float(hit.mean()))
        widths.append(float(np.median(upper / model(alpha[left]) - 1)))
        methods[model.calibration.method] += 1
        tests += np.bincount(third[left], minlength=3)
        kept += np.bincount(third[left], weights=hit, minlength=3)
        shape = model.calibration.shape
        assert shape is not None
        plain = replace(model.calibration, scores=shape.residuals, shape=None)
        constant += np.bincount(third[left], weights=y[left] <= plain.upper(alpha[left], 0.9)[0], minlength=3)
    return {
        "coverage_90": float(np.mean(covered)),
        "coverage_90_se": float(np.std(covered, ddof=1) / np.sqrt(splits)),
        "coverage_90_sd": float(np.std(covered, ddof=1)),
        "coverage_90_by_cost": (kept / tests).tolist(),
        "constant_by_cost": (constant / tests).tolist(),
        "half_width_90": float(np.mean(widths)),
        "splits": splits,
        "calibrations": dict(methods),
    }


def write(results: dict[str, Any], out: Path | None) -> None:
    """Write results, the cases in the order of ``CASES``."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        ordered = {case: results[case] for case in (*CASES, *results) if case in results}
        out.write_text(json.dumps(ordered, indent=2) + "\n")


def recompute(directory: Path, cases: list[str], splits: int, out: Path | None) -> int:
    """The coverage of every measured case; replaces these numbers in ``out``, after each case."""
    results = known(out)
    for case in cases:
        profile = read(directory, case)
        if profile is None:
            print(f"{case}: not measured yet; run the measure phase with --tables {directory}", file=sys.stderr)
            return 1
        model, inputs = network(case)
        found = coverage(profile, find_groups(model, inputs), splits)
        results.setdefault(case, {}).update(found)
        small, middle, large = (100 * share for share in found["coverage_90_by_cost"])
        print(
            f"{case}: coverage {100 * found['coverage_90']:.2f} +- {100 * found['coverage_90_se']:.2f} % in {splits} "
            f"splits (cheapest third {small:.1f} %, middle {middle:.1f} %, dearest {large:.1f} %), half-width "
            f"{100 * found['half_width_90']:.2f} %",
            flush=True,
        )
        write(results, out)
    return 0


def known(out: Path | None) -> dict[str, Any]:
    """The results that were written before."""
    found: dict[str, Any] = json.loads(out.read_text()) if out is not None and out.exists() else {}
    return found


def show(results: dict[str, Any]) -> None:
    """Print the learning curves and, last, which goals are met."""
    goals = []
    for case, result in results.items():
        print(f"\n{case}: {result['groups']} channel groups, mean hold-out error by number of training configurations")
        print(pd.DataFrame(result["mape"]).T.map(lambda v: f"{100 * v:.2f} %").to_string())
        fit, goal, thirds = result["fit_at_40"], GOAL_MAPE[case.partition("@")[0]], result["coverage_90_by_cost"]
        goals.append(
            {
                "case": case,
                "error": f"{100 * fit['mape']:.2f} %",
                "goal": f"{100 * goal:g} % {'met' if fit['mape'] <= goal else 'missed'}",
                "within 10 %": f"{100 * fit['within_10']:.1f} %",
                "goal 99 %": "met" if fit["within_10"] >= GOAL_WITHIN else "missed",
                "coverage": f"{100 * result['coverage_90']:.1f} +- {100 * result['coverage_90_se']:.1f} %",
                "by cost": " / ".join(f"{100 * share:.1f}" for share in thirds),
                "goal 85-95 %": "met" if all(GOAL_COVERAGE[0] <= s <= GOAL_COVERAGE[1] for s in thirds) else "missed",
                "with a constant spread": " / ".join(f"{100 * share:.1f}" for share in result["constant_by_cost"]),
                "half-width": f"{100 * result['half_width_90']:.1f} %",
                "chosen": "; ".join(sorted(set(result["chosen"]))),
            }
        )
    print("\nbudgets.fit with 40 training configurations")
    print(pd.DataFrame(goals).set_index("case").to_string())


def plot(results: dict[str, Any], path: Path) -> None:
    """Learning curves, a panel for each case."""
    from matplotlib.figure import Figure

    columns = min(4, len(results))
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.6 * rows + 0.8), layout="constrained")
    panels = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
    shown = (CHOSEN, "ours: physics", "ours: per operation")
    for axes, (case, result) in zip(panels, results.items(), strict=False):
        for name, curve in result["mape"].items():
            if name.startswith("ours") and name not in shown:
                continue
            sizes = [int(n) for n in curve]
            bold = name == CHOSEN
            axes.plot(
                sizes, [100 * curve[n] for n in curve], marker="o", ms=3.5, lw=2.2 if bold else 1.1,
                ls="-" if name.startswith("ours") else "--", label=name, zorder=3 if bold else 2,
            )  # fmt: skip
        axes.axhline(100 * GOAL_MAPE[case.partition("@")[0]], color="black", lw=0.7, ls=":")
        axes.set(title=case.replace("@", "\n"), xscale="log", yscale="log", xlabel="training configurations")
        axes.set_xticks(SIZES, [str(n) for n in SIZES])
        axes.minorticks_off()
        axes.set_yticks([1, 2, 3, 5, 10, 20, 50], ["1", "2", "3", "5", "10", "20", "50"])
        axes.set_ylim(0.5, 60)
    for axes in panels[len(results) :]:
        axes.set_axis_off()
    panels[0].set_ylabel("mean hold-out error [%]")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.savefig(path, dpi=130)


def main() -> int:
    """Measure or fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=("measure", "fit", "coverage"))
    parser.add_argument("--tables", type=Path, required=True, help="directory of cached profile tables")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NETWORK@TARGET")
    parser.add_argument("--time-limit", type=float, default=900.0, help="seconds of measuring for each case")
    parser.add_argument("--splits", type=int, default=SPLITS, help=f"random splits for the coverage ({SPLITS})")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--plot", type=Path, help="draw the learning curves")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)
    if args.phase == "measure":
        return 1 if measure(args.tables, args.only, args.time_limit) else 0
    if args.phase == "coverage":
        return recompute(args.tables, args.only, args.splits, args.out)
    results = known(args.out)
    for case in args.only:
        profile = read(args.tables, case)
        if profile is None:
            print(f"{case}: not measured yet; run the measure phase with --tables {args.tables}", file=sys.stderr)
            continue
        model, inputs = network(case)
        results[case] = evaluate(profile, find_groups(model, inputs), args.splits)
        # Keys as in the file, so that cases of this run and of an earlier one are alike.
        results[case] = json.loads(json.dumps(results[case]))
        print(f"{case}: fitted", file=sys.stderr)
        write(results, args.out)
    if not results:
        return 1
    show(results)
    if args.plot is not None:
        plot(results, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
