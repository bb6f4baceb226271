"""Is latency-awareness worth it? Accuracy on CIFAR-10 at equal *measured* latency, ONNX Runtime on the CPU.

    python benchmarks/flops_vs_latency.py run --data cifar10.npz --weights resnet20-12fca82f.th
    python benchmarks/flops_vs_latency.py report
    python benchmarks/flops_vs_latency.py run --data cifar10.npz --weights ... --limit-train 512 --smoke   # minutes

Latency-budget DSA against FLOPs-budget DSA, uniform and Torch-Pruning, all brought to the same measured latency and
trained equally long: the trained ResNet-20 (option A) and a MobileNetV2 for CIFAR-10 that is trained here and cached;
60 and 40 % of the dense latency, three seeds. Resumable: every finished case is a line of JSON, and inside a case
``dsa_hw.compare`` keeps what it has in its folder. One thread.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from budgets import FlopsBudget, LatencyBudget
from dsa_hw import data as datasets
from dsa_hw.comparison import compare
from dsa_hw.gauges import DeviceGauge, rules_for
from dsa_hw.models import load
from dsa_hw.report.findings import Difference
from dsa_hw.settings import Settings
from dsa_hw.training import evaluate
from dsa_hw.workshop import answers, train
from profilers import Protocol
from profilers.targets import resolve

RESULTS = Path(__file__).parent / "results" / "flops_vs_latency.jsonl"
MODELS = ("resnet20_a", "mobilenet_v2_cifar")
OURS = "latency budget, dsa"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("what", choices=("run", "report"))
    option("--data", type=Path, help="CIFAR-10 as .npz")
    option("--weights", type=Path, help="the shared ResNet-20 (.th)")
    option("--work", type=Path, default=Path("flops_vs_latency"), help="folder for what is kept (%(default)s)")
    option("--out", type=Path, default=RESULTS)
    option("--models", nargs="+", default=list(MODELS), choices=MODELS)
    option("--shares", nargs="+", type=float, default=[60, 40], help="per cent of the dense latency")
    option("--seeds", nargs="+", type=int, default=[0, 1, 2])
    option("--target", default="onnxruntime/cpu")
    option("--allow", type=float, default=0.03, help="disturbance allowed, as a share (%(default)s)")
    option("--train-epochs", type=float, default=15, help="of MobileNetV2 (%(default)s)")
    option("--epochs", type=float, default=2, help="while allocating (%(default)s)")
    option("--finetune-epochs", type=float, default=4)
    option("--precision", default="fp32", choices=("fp32", "bf16"))
    option("--limit-train", type=int, help="use only so many training images, and as many test images")
    option("--smoke", action="store_true", help="see that it runs: short training, a small profile, every run accepted")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "run":
        run(args)
    print(report(args.out))


def run(args: argparse.Namespace) -> None:
    for name in args.models:
        dense = dense_network(name, args)
        for seed in args.seeds:
            for share in args.shares:
                key = {
                    "model": name,
                    "seed": seed,
                    "share": share,
                    "limit_train": args.limit_train,
                    "smoke": args.smoke,
                }
                if any(all(row[k] == v for k, v in key.items()) for row in rows(args.out)):
                    continue
                begin = time.perf_counter()
                found = case(name, dense, seed, share, args)
                args.out.parent.mkdir(parents=True, exist_ok=True)
                with args.out.open("a") as file:
                    about = {"epochs": args.epochs, "finetune_epochs": args.finetune_epochs, "allow": args.allow}
                    row = {**key, **about, "precision": args.precision, "target": args.target, **found}
                    row |= {"seconds_spent": time.perf_counter() - begin, "date": time.strftime("%Y-%m-%d")}
                    file.write(json.dumps(row) + "\n")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cifar(args: argparse.Namespace, seed: int) -> datasets.Data:
    whole = datasets.load("cifar10", args.data, seed=seed)
    n = args.limit_train
    if not n:
        return whole
    return replace(whole, train=whole.train.first(n), val=whole.val.first(n), test=whole.test.first(n))


def settings(args: argparse.Namespace, seed: int) -> Settings:
    small = {"samples": 14, "holdout": 3, "reading": 2.0, "time_limit": 240.0} if args.smoke else {}
    return Settings(
        epochs=args.epochs, finetune_epochs=args.finetune_epochs, precision=args.precision, seed=seed, lr=0.1,
        finetune_lr=0.02, **small,
    )  # fmt: skip


def rules(args: argparse.Namespace) -> Protocol:
    if args.smoke:
        return replace(Protocol.allowing(10.0), waiting=math.inf, precision=0.1)
    return Protocol.allowing(args.allow)


def dense_network(name: str, args: argparse.Namespace) -> nn.Module:
    """The trained network: the shared ResNet-20, or a MobileNetV2 that is trained once and kept."""
    torch.manual_seed(0)
    model, _ = load(name)
    if name == "resnet20_a":
        state = torch.load(args.weights, weights_only=True, map_location="cpu")["state_dict"]
        model.load_state_dict({key.removeprefix("module."): value for key, value in state.items()})
        return model.eval()
    kept = args.work / f"{name}-{args.train_epochs:g}-{args.limit_train or 'all'}.pt"
    if kept.exists():
        model.load_state_dict(torch.load(kept, weights_only=True))
        return model.eval()
    images = cifar(args, 0)
    train(model, images.train, args.train_epochs, 0.1, settings(args, 0), True, f"training {name}")
    print(f"{name}: {100 * evaluate(model, images.test):.2f} % after {args.train_epochs:g} epochs")
    kept.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), kept)
    return model.eval()


def case(name: str, dense: nn.Module, seed: int, share: float, args: argparse.Namespace) -> dict[str, Any]:
    """One network, seed and share: accuracy and latency of every rival."""
    images, out = cifar(args, seed), args.work / f"{name}-{share:g}-seed{seed}-{args.limit_train or 'all'}"
    table = compare(
        dense, images, [LatencyBudget(f"{share:g}%"), FlopsBudget(f"{share:g}%")], target=args.target, name=name,
        methods={"latency": ("dsa", "uniform"), "flops": ("dsa",)}, settings=settings(args, seed), out=out,
        protocol=rules(args), options={"dsa": {"precision": args.precision}}, progress=True, listener=print,
    )  # fmt: skip
    named = {"dense": "dense"}
    for _, row in table[table["kind"] != "dense"].iterrows():
        kind = "FLOPs" if row["kind"] == "flops" else row["kind"]
        named[row["id"]] = f"{kind} budget, {row['method']}" + (" at equal latency" if row["matches"] else "")
    found = {
        named[row["id"]]: {
            k: row[k] for k in ("seconds", "low", "high", "accuracy", "accuracy_before", "flops", "params")
        }
        for _, row in table.iterrows()
    }
    goal = next(id for id, text in named.items() if text == OURS)
    widths = {named[id]: w for id, w in table.attrs["widths"].items()}
    right = {text: correct(out, id) for id, text in named.items()}
    try:
        found["Torch-Pruning at equal latency"], right["Torch-Pruning at equal latency"] = torch_pruning(
            dense, rebuilt(dense, out, goal), images, seed, args
        )
    except ImportError as error:
        print(f"Torch-Pruning is left out: {error}; pip install 'dsa-hw[rivals]'")
    differences = {
        text: paired(right[OURS], other) for text, other in right.items() if "equal" in text or "uniform" in text
    }
    return {"networks": found, "widths": widths, "ours_minus": differences}


def correct(out: Path, id: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    from dsa_hw.workshop import slug

    kept = torch.load(out / "networks" / f"{slug(id)}.pt", weights_only=True)
    return kept["correct"].numpy().astype(bool)


def paired(a: Any, b: Any) -> dict[str, float]:
    """Difference in percentage points with half of its 95 % interval over test images."""
    each = 100 * (a.astype(float) - b.astype(float))
    d = Difference(float(each.mean()), float(1.96 * each.std(ddof=1) / np.sqrt(len(each))))
    return {"points": d.points, "error": d.error}


def rebuilt(dense: nn.Module, out: Path, id: str) -> nn.Module:
    from dsa_hw import apply_plan
    from dsa_hw.workshop import slug

    small = apply_plan(dense, out / "plans" / f"{slug(id)}.json")
    small.load_state_dict(torch.load(out / "networks" / f"{slug(id)}.pt", weights_only=True)["state_dict"])
    return small.eval()


def torch_pruning(
    dense: nn.Module, goal: nn.Module, images: Any, seed: int, args: argparse.Namespace
) -> tuple[Any, Any]:
    """Torch-Pruning's global magnitude pruner, its ratio halved in between until it takes as long as ``goal``."""
    import torch_pruning as tp

    inputs = (torch.randn(images.shape, generator=torch.Generator().manual_seed(0)),)
    chosen = settings(args, seed)
    gauge = DeviceGauge(resolve(args.target), inputs, rules_for(LatencyBudget("50%"), rules(args)), seed)

    def pruned(ratio: float) -> nn.Module:
        model = copy.deepcopy(dense)
        tp.pruner.BasePruner(
            model, inputs, importance=tp.importance.GroupMagnitudeImportance(p=2), global_pruning=True,
            pruning_ratio=ratio, max_pruning_ratio=0.95, round_to=8,
            ignored_layers=[m for m in model.modules() if isinstance(m, nn.Linear)],
        ).step()  # fmt: skip
        return model.eval()

    low, high, best = 0.0, 0.95, (np.inf, None, None)
    for _ in range(4 if args.smoke else 8):
        ratio = (low + high) / 2
        model = pruned(ratio)
        found = gauge.read({"network": model, "goal": goal}, 2 * chosen.reading)
        off = float(np.log(found["network"].value / found["goal"].value))
        best = min(best, (abs(off), model, found), key=lambda item: item[0])
        if abs(off) <= 0.01:
            break
        low, high = (ratio, high) if off > 0 else (low, ratio)
    _, model, found = best
    assert model is not None
    assert found is not None
    before = evaluate(model, images.test)
    # As long as the others: what DSA trains while it allocates is fine-tuning here.
    train(
        model, images.train, chosen.epochs + chosen.finetune_epochs, chosen.finetune_lr, chosen, True, "Torch-Pruning"
    )
    right = answers(model, images.test)
    reading, beside = found["network"], found["goal"]
    row = {"seconds": reading.value, "low": reading.low, "high": reading.high, "accuracy": float(right.mean())}
    row |= {"accuracy_before": before, "params": sum(p.numel() for p in model.parameters())}
    # Its own session, together with our network: the ratio is what counts.
    return {**row, "goal_seconds": beside.value}, right


def report(path: Path) -> str:
    """Mean and deviation over seeds of accuracy, latency over ours, and our lead in points."""
    lines = []
    for row in rows(path):
        ours = row["networks"][OURS]
        for text, found in row["networks"].items():
            beside = found.get("goal_seconds", ours["seconds"])
            lead = row["ours_minus"].get(text, {})
            lines.append(
                {
                    "model": row["model"],
                    "share": row["share"],
                    "network": text,
                    "seed": row["seed"],
                    "accuracy": 100 * found["accuracy"],
                    "latency": found["seconds"] / beside,
                    "lead": lead.get("points", np.nan),
                    "smoke": row["smoke"],
                }
            )
    if not lines:
        return f"{path} has no results yet"
    frame = pd.DataFrame(lines)
    table = frame.groupby(["smoke", "model", "share", "network"], sort=False).agg(
        seeds=("seed", "nunique"), accuracy=("accuracy", "mean"), deviation=("accuracy", "std"),
        latency_over_ours=("latency", "mean"), our_lead=("lead", "mean"), lead_deviation=("lead", "std"),
    )  # fmt: skip
    return table.round(3).to_string()


if __name__ == "__main__":
    main()
