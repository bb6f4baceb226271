"""Is the promise kept? Networks x latency budgets x runtimes, allocated, measured, corrected, certified; and rivals.

    python benchmarks/promise.py --out promise.jsonl
    python benchmarks/promise.py --models resnet18 --budgets 60% --runtimes onnxruntime/cpu
    python benchmarks/promise.py --out promise.jsonl --again     # half an hour later: verify every certificate
    python benchmarks/promise.py --out promise.jsonl --again --neighbour 0.3
    python benchmarks/promise.py --out promise.jsonl --summary

One JSON line for each case; a case that is in the file is not measured again, one that failed is tried again. A network
is profiled once for each runtime (kept in ``--cache``; tables of ``benchmarks/results/profiles`` are used where they
are) and guided once, at its first budget of this call; for the others the same keep ratios are projected (``--fresh``:
guided again).

``--again`` runs ``dsa_hw.verify`` on the plan of every case, in a process that had no part in choosing it, and appends
to ``OUT.again``; with ``--neighbour DUTY`` beside a process that uses a core for that share of every 100 ms.

Beside our network, in one interleaved run with the dense one:

    open loop      our first network, before any correction (it aims at 1 % below the limit)
    flops          the same keep ratio everywhere, so that the FLOPs are the wanted share: time as if it were FLOPs
    torch-pruning  its pruner as its README shows it (group magnitude, round_to=8), at the ratio 1 - sqrt(share) with
                   which a network whose work is quadratic in its width has that share left
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

import budgets
import profilers
import profilers.machine
from dsa_hw.channels import ChannelGroups, find_groups, select_channels, shrink
from dsa_hw.errors import DsaError
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.problem import Problem, Proposal, realise
from dsa_hw.methods.registry import solve
from dsa_hw.pipeline.allocate import allocate
from dsa_hw.pipeline.meters import DENSE, DeviceMeter, rules_for
from dsa_hw.pipeline.options import ProfileOptions
from dsa_hw.profiles import Profile
from dsa_hw.zoo import models
from profilers.targets import resolve

MODELS = ("resnet18", "resnet50", "mobilenet_v2", "efficientnet_b0", "densenet121", "regnet_y_400mf")
BUDGETS, RUNTIMES = ("80%", "60%", "40%"), ("onnxruntime/cpu", "openvino/cpu")
GOAL_MET, GOAL_OVER, GOAL_MEASUREMENTS, GOAL_SECONDS = 1.0, 0.02, 6, 120.0
GOAL_USE = {"above 10 ms": 0.97, "others": 0.95}
RIVALS = ("open loop", "flops", "torch-pruning")
_BURN = """
import sys, time
duty = float(sys.argv[1])
while True:
    end = time.perf_counter() + 0.1 * duty
    while time.perf_counter() < end:
        pass
    time.sleep(0.1 * (1 - duty))
"""
_log = logging.getLogger("promise")


class Network:
    """A network with random weights (time does not depend on them) and its channel groups."""

    def __init__(self, name: str, shape: tuple[int, ...] | None) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model, self.inputs = models.load_model(name, shape)
        self.groups: ChannelGroups = find_groups(self.model, self.inputs)


def profile(network: Network, runtime: str, args: argparse.Namespace) -> Profile:
    """The profile of a network: from the cache, or measured into it and continued there."""
    stem = f"{network.name}_{runtime.replace('/', '-')}"
    table, attributes = args.cache / f"{stem}.csv", args.cache / f"{stem}.json"
    if table.exists() and attributes.exists():
        found = Profile.from_metadata(pd.read_csv(table), json.loads(attributes.read_text()))
        if found.fingerprint == network.groups.fingerprint:
            return found
    args.cache.mkdir(parents=True, exist_ok=True)
    found = profilers.profile(
        network.model,
        network.inputs,
        runtime,
        samples=args.samples,
        holdout=args.holdout,
        grid=args.grid,
        out=args.cache / f"{stem}.sqlite",
        time_limit=args.profile_limit,
        rules=rules_for(budget("50%", args)),
        name=network.name,
        groups=network.groups,
    )
    found.table.to_csv(args.cache / f"{stem}.csv", index=False)
    (args.cache / f"{stem}.json").write_text(json.dumps(found.metadata(), indent=1, default=str) + "\n")
    return found


def budget(amount: str, args: argparse.Namespace) -> budgets.LatencyBudget:
    """The latency budget of a case."""
    return budgets.LatencyBudget(amount, quantile=args.quantile)


def flops_guess(network: Network, amount: str) -> nn.Module:
    """One keep ratio everywhere with the wanted share of FLOPs."""
    wanted = budgets.FlopsBudget(amount)
    cost = wanted.cost(network.groups)
    costs = CostSet([cost], network.groups.sizes, [wanted.limit(cost.dense)], [wanted])
    problem = Problem(network.model, network.groups, costs, network.inputs)
    return realise(problem, solve(problem, "uniform")).model


def torch_pruning(name: str, shape: tuple[int, ...] | None, share: float) -> nn.Module:
    """A new copy of the network, pruned by Torch-Pruning as its README does it."""
    import torch_pruning as tp

    network = Network(name, shape)
    outputs = [m for m in network.model.modules() if isinstance(m, nn.Linear)][-1:]
    pruner = tp.pruner.BasePruner(
        network.model,
        network.inputs,
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=1 - share**0.5,
        ignored_layers=outputs,
        round_to=8,
    )
    pruner.step()
    return network.model.eval()


def case(
    network: Network, shape: tuple[int, ...] | None, runtime: str, amount: str, model: Any, profiled: float,
    args: argparse.Namespace, proposal: Proposal | None,
) -> tuple[dict[str, Any], Proposal | None]:  # fmt: skip
    """One row, and the proposal for the next budget."""
    started = time.perf_counter()
    wanted = budget(amount, args)
    result = allocate(
        network.model,
        wanted,
        example_inputs=network.inputs,
        target=runtime,
        method=proposal or args.method,
        out=args.cache / f"{network.name}_{runtime.replace('/', '-')}_{amount.rstrip('%')}",
        progress=True,
        options={"steps": args.steps, "batch_size": args.batch_size} if args.method == "dsa" else {},
        profiling=ProfileOptions(source=model, time_limit=6 * args.limit, name=network.name),
    )
    allocated = time.perf_counter() - started
    row = about(network.name, runtime, amount, args) | {
        "guided": proposal is None,
        "verdict": str(result.certificate.verdict),
        "utilisation": result.certificate.utilisation,
        "measurements": result.certificate.measurements,
        "certificate": result.certificate.to_dict(),
        "rounds": json.loads(result.rounds.drop(columns="widths").to_json(orient="records")),
        "dense": result.certificate.entries[0].dense,
        "seconds": {"profile": profiled, "allocate": allocated},
        "load": profilers.machine.load_average(),
        "date": time.strftime("%Y-%m-%d"),
        "time": time.time(),
        "together": {},
        "missing": {},
    }
    assert result.proposal is not None
    if args.rivals:
        row |= rivals(network, shape, runtime, amount, result, args)
    return row, None if args.fresh else result.proposal


def rivals(
    network: Network, shape: tuple[int, ...] | None, runtime: str, amount: str, result: Any, args: argparse.Namespace
) -> dict[str, Any]:
    """Our network and what others give, measured together."""
    wanted = budget(amount, args)
    share = wanted.quantity.magnitude
    first = np.asarray(result.rounds["widths"].iloc[0])
    kept = select_channels(result.proposal.model, network.groups, first, "gamma")
    networks = {
        DENSE: network.model,
        "ours": result.model,
        "open loop": shrink(result.proposal.model, network.groups, kept),
        "flops": flops_guess(network, amount),
    }
    missing = {}
    try:
        networks["torch-pruning"] = torch_pruning(network.name, shape, share)
    except Exception as error:  # a rival that fails is a finding, not our failure
        missing["torch-pruning"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    meter = DeviceMeter(resolve(runtime), network.inputs, rules_for(wanted), seed=1)
    readings = meter.read(networks, args.limit * len(networks))
    limit = share * readings[DENSE].value
    return {
        "together": {
            name: {"seconds": r.value, "low": r.low, "high": r.high, "used": r.value / limit}
            for name, r in readings.items()
        },
        "missing": missing,
    }


def about(name: str, runtime: str, amount: str, args: argparse.Namespace) -> dict[str, Any]:
    """What was asked: two rows with the same answer the same question."""
    case = {"model": name, "runtime": runtime, "budget": amount, "method": args.method}
    return case | {"quantile": args.quantile, "fresh": args.fresh, "input": args.input}


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """The question of a row."""
    return tuple(row[name] for name in ("model", "runtime", "budget", "method", "quantile", "fresh", "input"))


def run(args: argparse.Namespace) -> int:
    """Every case that is not in the file yet; the number that failed."""
    done = {key(r) for r in rows(args.out) if "error" not in r}
    shape = models.parse_shape(args.input) if args.input else None
    failed = 0
    for name in args.models:
        for runtime in args.runtimes:
            left = [b for b in args.budgets if key(about(name, runtime, b, args)) not in done]
            if not left:
                continue
            try:
                network = Network(name, shape)
                measured = profile(network, runtime, args)
                model = budgets.fit(measured, network.groups)
                profiled = sum(measured.breakdown.values())
            except DsaError as error:
                failed += len(left)
                _log.error("%s on %s: %s", name, runtime, error)
                continue
            proposal: Proposal | None = None
            for amount in left:
                try:
                    row, proposal = case(network, shape, runtime, amount, model, profiled, args, proposal)
                except DsaError as error:
                    failed += 1
                    row = about(name, runtime, amount, args) | {"error": f"{type(error).__name__}: {error}"}
                with args.out.open("a") as file:  # a line at a time: an interruption loses one case
                    file.write(json.dumps(row) + "\n")
                print(line(row), flush=True)
    return failed


def rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a file; a line that was cut off by an interruption is left out."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(text))
        except ValueError:
            _log.warning("a line of %s is cut off and is left out", path)
    return found


def line(row: dict[str, Any]) -> str:
    """A row for a terminal."""
    head = f"{row['model']:16} {row['runtime']:16} {row['budget']:>4}"
    if "error" in row:
        return f"{head}  {row['error'][:160]}"
    together = "  ".join(f"{n} {v['used']:.3f}" for n, v in row["together"].items() if n != DENSE)
    return f"{head}  {row['verdict']:11} {row['utilisation']:.3f} in {row['measurements']}  |  {together}"


def again(args: argparse.Namespace) -> None:
    """Verify every certificate that was met and is not in the file of this condition yet."""
    import subprocess

    from dsa_hw.pipeline.verification import verify

    condition = f"neighbour {args.neighbour:g}" if args.neighbour else "idle"
    path = args.out.with_suffix(".again")
    done = {(*key(r), r["condition"]) for r in rows(path)}
    shape = models.parse_shape(args.input) if args.input else None
    for row in {key(r): r for r in rows(args.out)}.values():
        if "error" in row or (*key(row), condition) in done:
            continue
        if row["model"] not in args.models or row["runtime"] not in args.runtimes or row["budget"] not in args.budgets:
            continue
        network = Network(row["model"], shape)
        plan = (
            args.cache / f"{row['model']}_{row['runtime'].replace('/', '-')}_{row['budget'].rstrip('%')}" / "plan.json"
        )
        burn = [sys.executable, "-c", _BURN, str(args.neighbour)]
        beside = subprocess.Popen(burn) if args.neighbour else None
        try:
            begin = time.perf_counter()
            found = verify(plan, network.model, example_inputs=network.inputs, seed=2)
        finally:
            if beside is not None:
                beside.kill()
                beside.wait()
        (entry,) = found.now.entries
        new = {name: row[name] for name in ("model", "runtime", "budget", "method", "quantile", "fresh", "input")} | {
            "condition": condition, "then": row["verdict"], "verdict": str(entry.verdict), "used": entry.utilisation,
            "low": entry.least_used, "high": entry.most_used, "used then": row["utilisation"],
            "seconds": time.perf_counter() - begin, "minutes later": (time.time() - row["time"]) / 60,
        }  # fmt: skip
        with path.open("a") as file:
            file.write(json.dumps(new) + "\n")
        print(
            f"{row['model']:16} {row['runtime']:16} {row['budget']:>4}  {condition}: "
            f"{new['then']} {new['used then']:.3f} -> {new['verdict']} {new['used']:.3f} "
            f"[{new['low']:.3f}, {new['high']:.3f}] {new['seconds']:.0f} s",
            flush=True,
        )


def summary(found: list[dict[str, Any]], later: list[dict[str, Any]]) -> int:
    """The goals, and what the rivals would have given; 0 where all goals are met."""
    latest = {key(r): r for r in found}
    good = [r for r in latest.values() if "error" not in r]
    if not good:
        print("no case was measured")
        return 1
    met = sum(r["verdict"] == "MET" for r in good) / len(latest)
    most = max(r["measurements"] for r in good)
    took = float(np.median([r["seconds"]["profile"] + r["seconds"]["allocate"] for r in good]))
    print(f"{len(latest)} cases, {len(latest) - len(good)} could not be measured")
    goals = [("MET", met, ">=", GOAL_MET, met >= GOAL_MET)]
    for name, chosen in (
        ("above 10 ms", [r for r in good if r["dense"] > 0.01]),
        ("others", [r for r in good if r["dense"] <= 0.01]),
    ):
        if chosen:
            use, goal = float(np.mean([r["utilisation"] for r in chosen])), GOAL_USE[name]
            goals.append((f"mean use, {name} ({len(chosen)})", use, ">=", goal, use >= goal))
    goals += [
        ("measurements", most, "<=", GOAL_MEASUREMENTS, most <= GOAL_MEASUREMENTS),
        ("median seconds from nothing", took, "<=", GOAL_SECONDS, took <= GOAL_SECONDS),
    ]
    for condition in sorted({r["condition"] for r in later}):
        part = [r for r in later if r["condition"] == condition]
        used = np.array([r["used"] for r in part])
        agree = np.mean([r["verdict"] == r["then"] for r in part])
        unsure = sum(r["verdict"] == "INCONCLUSIVE" for r in part)
        over = max(float(used.max()) - 1, 0.0)
        minutes, within = np.median([r["minutes later"] for r in part]), (used <= 1).mean()
        print(f"verified again, {condition}: {len(part)} cases, {minutes:.0f} minutes later (median);")
        print(f"  agree {agree:.3f}, inconclusive {unsure}, within the limit {within:.3f}")
        goals.append((f"worst over-run, {condition}", over, "<=", GOAL_OVER, over <= GOAL_OVER))
    for name, value, sign, goal, reached in goals:
        print(f"  {name:32} {value:7.3f}  goal {sign} {goal:g}: {'reached' if reached else 'MISSED'}")
    print("measured together, time over budget (mean; share that keeps it within 1 %; worst):")
    for name in ("ours", *RIVALS):
        used = np.array([r["together"][name]["used"] for r in good if name in r["together"]])
        if used.size:
            within = f"{100 * (used <= 1.01).mean():5.1f} %"
            print(f"  {name:14} {used.mean():.3f}  {within}  {used.max():.3f}  (n {used.size})")
    return 0 if all(goal[-1] for goal in goals) and len(good) == len(latest) else 1


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=MODELS)
    add("--budgets", nargs="+", default=BUDGETS)
    add("--runtimes", nargs="+", default=RUNTIMES)
    add("--out", type=Path, default=Path("promise.jsonl"))
    add("--cache", type=Path, default=Path("promise_cache"), help="profiles, proposals and results")
    add("--method", default="dsa")
    add("--steps", type=int, default=20, help="of guidance")
    add("--batch-size", type=int, default=4, help="made-up images in a step")
    add("--fresh", action="store_true", help="guide again for each budget")
    add("--input", help="shape, for example 1x3x224x224 (the model's own)")
    add("--samples", type=int, default=40)
    add("--holdout", type=int, default=10)
    add("--grid", default="auto")
    add("--quantile", type=float, default=0.5, help="which run: 0.5 the median, 0.25 the quiet one")
    add("--limit", type=float, default=60.0, help="seconds for one measurement")
    add("--profile-limit", type=float, default=900.0)
    add("--no-rivals", dest="rivals", action="store_false", help="do not measure what others give")
    add("--again", action="store_true", help="verify the certificates of the file")
    add("--neighbour", type=float, default=0.0, metavar="DUTY", help="with --again: beside a process with this duty")
    add("--summary", action="store_true", help="only sum the file up")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    failed = 0
    if args.again:
        again(args)
    elif not args.summary:
        failed = run(args)
    return max(summary(rows(args.out), rows(args.out.with_suffix(".again"))), int(failed > 0))


if __name__ == "__main__":
    sys.exit(main())
