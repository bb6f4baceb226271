"""Is int8 worth it, and does F hold for it? Networks x runtimes x budgets, in fp32 and int8, dense and pruned.

    python benchmarks/int8.py schemes
    python benchmarks/int8.py profiles --models resnet18 --runtimes onnxruntime/cpu
    python benchmarks/int8.py cases --models resnet18 --runtimes onnxruntime/cpu
    python benchmarks/int8.py again                              # later: verify every certificate
    python benchmarks/int8.py accuracy --data ~/data --weights ~/data/weights
    python benchmarks/int8.py cifar --data ~/data --weights ~/data/weights
    python benchmarks/int8.py values
    python benchmarks/int8.py summary

``schemes``: the dense network in fp32 and in every int8 scheme, in one interleaved run. ``profiles``: 40 configurations
and 10 held out, in int8. ``cases``: pruned to a share of the dense int8 network's latency, with a certificate; the keep
ratios are uniform and the weights random, since only time is asked here. ``accuracy`` and ``cifar``: a trained
ResNet-20, dense and pruned, with its accuracy on the 10,000 test images. ``values``: the same network with other
weights and other calibration inputs.

One JSON line for each answer in ``--out``; what is in the file is not measured again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import budgets
import profilers
from dsa_hw.channels import ChannelGroups, find_groups
from dsa_hw.errors import MeasurementError
from dsa_hw.pipeline.allocate import allocate
from dsa_hw.pipeline.options import ProfileOptions
from dsa_hw.pipeline.quality import measure_quality
from dsa_hw.pipeline.result import Allocation
from dsa_hw.pipeline.verification import verify
from dsa_hw.profiles import Profile
from dsa_hw.training.loaders import unlabelled
from dsa_hw.zoo import models
from dsa_hw.zoo.data import Data, load_data
from profilers.measuring.bench import DENSE, Bench
from profilers.networks.builder import loadables
from profilers.networks.loaded import Loadable
from profilers.networks.onnx_export import export, generic
from profilers.networks.quantisation import SCHEMES, calibrate, quantise
from profilers.networks.quantised import quantise_network
from profilers.profiling.schemes import resolve_for
from profilers.targets import resolve

MODELS = ("resnet18", "mobilenet_v2", "efficientnet_b0")
RUNTIMES = ("onnxruntime/cpu", "openvino/cpu")
BUDGETS = ("70%", "50%")
GOAL_ERROR, GOAL_CONFIGURATIONS = 0.03, 40
RESULTS = Path(__file__).parent / "results" / "int8.jsonl"


class Network:
    """A network with random weights and its channel groups."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model, self.inputs = models.load_model(name)
        self.groups: ChannelGroups = find_groups(self.model, self.inputs)


# Questions ------------------------------------------------------------------------------------------------------------


def schemes(name: str, runtime: str, args: argparse.Namespace) -> dict[str, Any]:
    """The dense network in fp32 and in every scheme of the target."""
    network = Network(name)
    target = resolve(runtime)
    targets = {"fp32": target} | {s: target.at(f"int8-{s}") for s in target.schemes}
    ready = loadables(network.model, network.inputs, targets)
    refused = {s: why for s in target.schemes if (why := _refusal(ready[s]))}
    others = [s for s in target.schemes if s not in refused]
    found = Bench(target).measure({s: ready[s] for s in others}, ready["fp32"], limit=args.limit)
    return {
        s: {"seconds": found[key].value, "low": found[key].low, "high": found[key].high, "bytes": ready[s].size}
        for s, key in [("fp32", DENSE), *((s, s) for s in others)]
    } | {"refused": refused}


def _refusal(network: Loadable) -> str:
    """Why a runtime cannot load a network; "" where it can."""
    try:
        network.load()
    except MeasurementError as error:
        return str(error)
    return ""


def profile(name: str, runtime: str, args: argparse.Namespace) -> dict[str, Any]:
    """Profile in int8, fit, and say the error on the hold-out."""
    network = Network(name)
    begin = time.perf_counter()
    found = profilers.profile(
        network.model, network.inputs, runtime, precision="int8", samples=GOAL_CONFIGURATIONS, holdout=10,
        out=args.cache / f"{_stem(name, runtime)}.sqlite", time_limit=args.profile_limit, name=name,
        groups=network.groups,
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    found.table.to_csv(args.cache / f"{_stem(name, runtime)}.csv", index=False)
    (args.cache / f"{_stem(name, runtime)}.json").write_text(json.dumps(found.metadata(), default=str))
    model = budgets.fit(found, network.groups)
    grid = sorted(set(found.grid.values()))
    return {
        "target": found.target, "seconds": seconds, "configurations": model.provenance.configurations,
        "holdout": model.provenance.holdout, "estimator": type(model.estimator).__name__, "grid": grid,
        "errors": dict(model.provenance.errors), "dense": model.provenance.dense,
    }  # fmt: skip


def case(name: str, runtime: str, amount: str, args: argparse.Namespace) -> dict[str, Any]:
    """Prune to a share of the dense int8 network's latency."""
    network = Network(name)
    stem = args.cache / _stem(name, runtime)
    content = json.loads(stem.with_suffix(".json").read_text())
    measured = Profile.from_metadata(pd.read_csv(stem.with_suffix(".csv")), content)
    begin = time.perf_counter()
    result = allocate(
        network.model, budgets.LatencyBudget(amount), example_inputs=network.inputs, target=f"{runtime} int8",
        images=[torch.randn(8, *network.inputs[0].shape[1:])],  # no quality is asked here
        method="uniform", recovery="none", out=Path(f"{stem}_{amount.rstrip('%')}"), progress=False,
        profiling=ProfileOptions(source=budgets.fit(measured, network.groups), time_limit=6 * args.limit, name=name),
    )  # fmt: skip
    return answer(result) | {"seconds": time.perf_counter() - begin}


def again(name: str, runtime: str, amount: str, args: argparse.Namespace) -> dict[str, Any]:
    """Verify the certificate of a case in a process that had no part in choosing it."""
    network = Network(name)
    plan = Path(f"{args.cache / _stem(name, runtime)}_{amount.rstrip('%')}") / "plan.json"
    found = verify(plan, network.model, example_inputs=network.inputs, seed=2)
    return {"verdict": str(found.verdict), "utilisation": found.now.utilisation}


def accuracy(runtime: str, args: argparse.Namespace) -> dict[str, Any]:
    """The trained ResNet-20 in int8 on the test images, in the runtime itself."""
    model, inputs, found = trained(args)
    images = unlabelled(found.train, 128, torch.device("cpu"))
    network = quantise_network(model, inputs, resolve(f"{runtime} int8-u8"), batches=[images])
    quality = measure_quality(model, network, found.test, source="test data")
    assert quality.value is not None
    assert quality.dense is not None
    return {"accuracy": asdict(quality.value), "dense": asdict(quality.dense), "bytes": len(network.content)}


def trained(args: argparse.Namespace) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], Data]:
    """ResNet-20 with published weights, its inputs, and CIFAR-10."""
    found = load_data("cifar10", args.data / "cifar10.npz")
    model, inputs = models.load_model("resnet20_a", found.shape)
    state = torch.load(args.weights / "resnet20-12fca82f.th", map_location="cpu", weights_only=True)["state_dict"]
    model.load_state_dict({key.removeprefix("module."): value for key, value in state.items()})
    return model.eval(), inputs, found


def cifar(budget: str, precision: str, args: argparse.Namespace) -> dict[str, Any]:
    """Prune a trained ResNet-20 without labels (refit), and say its accuracy on the test images."""
    model, inputs, found = trained(args)
    runtime = "onnxruntime/cpu"
    target = resolve_for(model, inputs, runtime, precision=precision)
    begin = time.perf_counter()
    result = allocate(
        model, budgets.LatencyBudget(budget), example_inputs=inputs, val=found.val, target=target, progress=False,
        out=args.cache / f"cifar_{precision}_{budget.rstrip('%')}",
        profiling=ProfileOptions(time_limit=args.profile_limit, name="resnet20_a"),
    )  # fmt: skip
    result = result.assess(model, found.test, source="test data", calibration=found.train)
    return answer(result) | {"seconds": time.perf_counter() - begin}


def values(name: str, runtime: str, args: argparse.Namespace) -> dict[str, Any]:
    """The same architecture in int8 with other weights and other calibration inputs: times over those of the first."""
    target = resolve_for(Network(name).model, Network(name).inputs, f"{runtime} int8")
    ready: dict[str, Loadable] = {}
    for what, seed, scale in (("first", 0, 1.0), ("again", 0, 1.0), ("inputs x 100", 0, 100.0), ("weights", 1, 1.0)):
        torch.manual_seed(seed)
        model, inputs = models.load_model(name)
        proto = export(generic(model, seed), inputs)
        ranges = calibrate(proto, [(scale * torch.randn(inputs[0].shape),) for _ in range(4)])
        assert target.int8 is not None
        content = bytes(quantise(proto, ranges, target.int8).SerializeToString())
        ready[what] = Loadable(lambda content=content, inputs=inputs: target.load(content, inputs), len(content))  # type: ignore[misc]
    found = Bench(target).measure({w: ready[w] for w in [*ready][1:]}, ready["first"], limit=args.limit)
    ratios = {what: measured.ratio for what, measured in found.items() if what != DENSE}
    return {what: {"ratio": ratio.value, "interval": ratio.interval()} for what, ratio in ratios.items()}


def answer(result: Allocation) -> dict[str, Any]:
    """What a certificate says."""
    c = result.certificate
    (entry,) = c.entries
    quality = result.quality
    return {
        "target": entry.target, "verdict": str(c.verdict), "utilisation": entry.utilisation,
        "least_used": entry.least_used, "most_used": entry.most_used, "limit": entry.limit, "measured": entry.measured,
        "measurements": c.measurements, "kept": float(result.keep_ratios.mean()),
        "accuracy": quality.value.value if quality.value else None,
        "dense_accuracy": quality.dense.value if quality.dense else None,
        "variants": [
            {
                "network": v.network, "precision": v.precision, "seconds": v.measured, "low": v.low, "high": v.high,
                "bytes": v.file_bytes,
                "accuracy": v.quality.value.value if v.quality is not None and v.quality.value else None,
            }
            for calibration in c.int8 for v in calibration.variants
        ],
    }  # fmt: skip


# Answers --------------------------------------------------------------------------------------------------------------


def _stem(name: str, runtime: str) -> str:
    return f"{name}_{runtime.replace('/', '-')}"


def rows(path: Path) -> list[dict[str, Any]]:
    """All rows of the file."""
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def ask(args: argparse.Namespace, about: dict[str, Any], function: Callable[..., dict[str, Any]]) -> None:
    """Answer a question that is not in the file yet; what it is about are the arguments of the function."""
    question = {"what": args.what, **about}
    if any({k: r.get(k) for k in question} == question for r in rows(args.out)):
        return
    row = question | function(*about.values(), args) | {"date": time.strftime("%Y-%m-%d")}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:  # a line at a time: an interruption loses one answer
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row)[:300], flush=True)


def run(args: argparse.Namespace) -> None:
    """Ask every question of a kind."""
    args.cache.mkdir(parents=True, exist_ok=True)
    by_network = {"schemes": schemes, "profiles": profile, "values": values}
    by_budget = {"cases": case, "again": again}
    if args.what == "accuracy":
        for runtime in args.runtimes:
            ask(args, {"runtime": runtime}, accuracy)
        return
    if args.what == "cifar":
        for precision in args.precisions:
            for budget in args.budgets:
                ask(args, {"budget": budget, "precision": precision}, cifar)
        return
    for name in args.models:
        for runtime in args.runtimes:
            about = {"model": name, "runtime": runtime}
            if args.what in by_network:
                ask(args, about, by_network[args.what])
                continue
            for budget in args.budgets:
                ask(args, about | {"budget": budget}, by_budget[args.what])


def summary(args: argparse.Namespace) -> None:
    """Print the tables of docs/benchmarks/int8.md."""
    found = rows(args.out)

    def of(what: str) -> list[dict[str, Any]]:
        return [r for r in found if r["what"] == what]

    names = ("fp32", *SCHEMES)
    print("| network | runtime | fp32, ms | " + " | ".join(f"int8-{s}" for s in names[1:-1]) + " |")
    for r in of("schemes"):
        cells = [f"{r[s]['seconds'] / r['fp32']['seconds']:.2f}" if s in r else "refused" for s in names[1:-1]]
        print(f"| {r['model']} | {r['runtime']} | {1e3 * r['fp32']['seconds']:.2f} | {' | '.join(cells)} |")
    print("\n| network | runtime | scheme | grid | configurations | hold-out error | within 10% | seconds |")
    for r in of("profiles"):
        errors, grid = r["errors"], ", ".join(map(str, r["grid"]))
        print(
            f"| {r['model']} | {r['runtime']} | {r['target'].split()[1]} | {grid} | {r['configurations']} | "
            f"{errors['holdout_mape']:.1%} | {errors['holdout_within_10']:.0%} | {r['seconds']:.0f} |"
        )
    print("\n| network | runtime | budget | verdict | used | networks | ms: dense fp32 | int8 | pruned fp32 | int8 |")
    for r in of("cases"):
        times = [f"{1e3 * v['seconds']:.2f}" for v in r["variants"]]
        print(
            f"| {r['model']} | {r['runtime']} | {r['budget']} | {r['verdict']} | {r['utilisation']:.1%} | "
            f"{r['measurements']} | {' | '.join(times)} |"
        )
    later = of("again")
    print(f"\nverified again: {sum(r['verdict'] == 'MET' for r in later)} of {len(later)} MET")
    print("\n| budget | precision | verdict | used | ms | accuracy | dense |")
    for r in of("cifar"):
        print(
            f"| {r['budget']} | {r['target'].split()[1]} | {r['verdict']} | {r['utilisation']:.1%} | "
            f"{1e3 * r['measured']:.3f} | {r['accuracy']:.2%} | {r['dense_accuracy']:.2%} |"
        )
        for v in r["variants"]:
            score, size = "" if v["accuracy"] is None else f"{v['accuracy']:.2%}", f"{v['bytes'] / 2**10:.0f} KiB"
            print(f"| | {v['network']} {v['precision']} | | | {1e3 * v['seconds']:.3f} | {score} | {size} |")
    for r in of("values"):
        print(r["model"], r["runtime"], {w: f"{v['ratio']:.3f}" for w, v in r.items() if isinstance(v, dict)})


def main() -> None:
    """Parse, then ask or summarise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("schemes", "profiles", "cases", "again", "accuracy", "cifar", "values", "summary")
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--runtimes", nargs="+", default=list(RUNTIMES))
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS))
    parser.add_argument("--precisions", nargs="+", default=["int8", "fp32"], help="of cifar")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of one measurement")
    parser.add_argument("--profile-limit", type=float, default=150.0, help="seconds of one profile")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with cifar10.npz")
    parser.add_argument("--weights", type=Path, default=Path("data/weights"), help="folder with resnet20-12fca82f.th")
    parser.add_argument("--cache", type=Path, default=Path("int8-cache"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    summary(args) if args.what == "summary" else run(args)


if __name__ == "__main__":
    main()
