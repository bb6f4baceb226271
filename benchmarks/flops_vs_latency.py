"""Is latency-awareness worth it? Accuracy on CIFAR-10 at equal *measured* latency, ONNX Runtime on the CPU.

    python benchmarks/flops_vs_latency.py decide --data DIR --weights resnet20-12fca82f.th   # on a quiet machine
    python benchmarks/flops_vs_latency.py train --data DIR --weights ... --worker 0/2        # any number of processes
    python benchmarks/flops_vs_latency.py report
    python benchmarks/flops_vs_latency.py slopes                     # what a channel costs: latency against FLOPs

The trained ResNet-20 (option A) and a MobileNetV2 for CIFAR-10 that is trained here and kept; 60 and 40 % of the dense
latency; three seeds (which images guide the allocation, and the order of fine-tuning). Four networks a case:

    latency   DSA under the latency budget, measured and corrected as ``dsa_hw.allocate`` does
    FLOPs     DSA under the FLOPs budget that takes as long, then measured and corrected just so
    uniform   the same keep ratio everywhere, under the latency budget, measured and corrected
    Torch-Pruning   global magnitude, at the ratio whose network takes as long as the first

then all in one interleaved session. Measuring wants a quiet machine and training wants all of it, so the two are apart.
Resumable: every finished case and every trained network is a line of JSON.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import fcntl
import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from cifar10 import Taught, taught_loss
from torch import nn

import budgets
import profilers
from budgets import LatencyBudget
from dsa_hw import allocate, find_groups
from dsa_hw.channels import shrink
from dsa_hw.experiments.dense import rewind
from dsa_hw.experiments.equal_latency import match_latency
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.problem import Problem, Proposal, Realised
from dsa_hw.methods.registry import solve
from dsa_hw.pipeline.meters import DENSE, DeviceMeter, rules_for
from dsa_hw.pipeline.options import ProfileOptions
from dsa_hw.pipeline.recovering import recover_network
from dsa_hw.pipeline.unlabelled import unlabelled_set
from dsa_hw.training.batchnorm import recalibrate
from dsa_hw.training.finetune import finetune
from dsa_hw.training.metrics import accuracy
from dsa_hw.utils.progress import Bar
from dsa_hw.zoo import data as datasets
from dsa_hw.zoo.models import load_model
from profilers import MeasuringRules
from profilers.targets import resolve

HERE = Path(__file__).parent
MODELS = ("resnet20_a", "mobilenet_v2_small")
OURS, FLOPS, UNIFORM, RIVAL = "latency, dsa", "FLOPs, dsa", "uniform", "Torch-Pruning"
CLOSE, MOST = 0.03, 6  # as close as latencies are brought (a budget is used to 97 %), and how often one is halved
TARGET = "onnxruntime/cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("what", choices=("decide", "train", "report", "slopes"))
    option("--data", type=Path, default=Path("."), help="folder with cifar10.npz")
    option("--weights", type=Path, default=Path("../shared/data/weights/resnet20-12fca82f.th"))
    option("--work", type=Path, default=Path(".cache/flops_vs_latency"), help="folder for profiles and networks")
    option("--out", type=Path, default=HERE / "results" / "flops_vs_latency.jsonl")
    option("--models", nargs="+", default=list(MODELS), choices=MODELS)
    option("--shares", nargs="+", type=float, default=[60, 40], help="per cent of the dense latency")
    option("--seeds", nargs="+", type=int, default=[0, 1, 2])
    option("--dense-epochs", type=float, default=8, help="of MobileNetV2 (%(default)s)")
    option("--epochs", type=float, default=2, help="of fine-tuning (%(default)s)")
    option("--finish", choices=("plain", "recovered"), default="plain", help="recovered: refit, then distillation")
    option("--worker", default="0/1")
    args = parser.parse_args()
    if args.what == "train":  # as many processes as there are cores, rather than threads
        torch.set_num_threads(1)
    if args.what == "report":
        print(report(args.out, args.finish))
        return
    for name in args.models:
        network = Network(name, args)
        if args.what == "slopes":
            print(name, slopes(network).round(2).to_string(index=False), sep="\n")
            continue
        for seed in args.seeds:
            for share in args.shares:
                {"decide": decide, "train": train}[args.what](network, seed, share, args)


class Network:
    """A trained network, its groups, its profile and its fitted latency."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.args = name, args
        self.dense = dense_network(name, args)
        self.inputs = (torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)),)
        self.groups = find_groups(self.dense, self.inputs)
        self.sizes = self.groups.sizes
        self.rules = MeasuringRules()
        self._cost: Any = None

    @property
    def cost(self) -> Any:
        """Latency model, from a profile that is measured once."""
        if self._cost is None:
            self.args.work.mkdir(parents=True, exist_ok=True)
            with Bar(True) as listener:
                profile = profilers.profile(
                    self.dense, self.inputs, TARGET, out=self.args.work / f"{self.name}.sqlite", groups=self.groups,
                    name=self.name, rules=self.rules, samples=40, holdout=10, listener=listener,
                )  # fmt: skip
            self._cost = budgets.fit(profile, self.groups)
            self.grid = np.array([int(profile.grid.get(n, 1)) for n in self.groups.names], np.int64)
        return self._cost


def dense_network(name: str, args: argparse.Namespace) -> nn.Module:
    """The shared ResNet-20, or a MobileNetV2 that is trained once and kept."""
    torch.manual_seed(0)
    model, _ = load_model(name)
    if name == "resnet20_a":
        state = torch.load(args.weights, weights_only=True, map_location="cpu")["state_dict"]
        model.load_state_dict({key.removeprefix("module."): value for key, value in state.items()})
        return model.eval()
    kept = args.work / f"{name}-{args.dense_epochs:g}.pt"
    if not kept.exists():
        images = datasets.load_data("cifar10", args.data, seed=0)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        finetune(
            model, images.train, args.dense_epochs, lr=0.1, warm_up=0.2, precision="bf16", progress=True,
            folder=args.work / f"{name}-unfinished",
        )  # fmt: skip
        row = {"what": "dense", "model": name, "epochs": args.dense_epochs}
        note(args.out, {**row, "accuracy": accuracy(model, images.test)})
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), kept)
    model.load_state_dict(torch.load(kept, weights_only=True))
    return model.eval()


# -- lines of JSON ----------------------------------------------------------------------------------------------------


def rows(path: Path, **key: Any) -> list[dict[str, Any]]:
    """Finished lines that agree with ``key``."""
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in found if all(row.get(k) == v for k, v in key.items())]


def note(path: Path, row: dict[str, Any]) -> None:
    row = {**row, "date": datetime.date.today().isoformat()}
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row) + "\n")
    print(json.dumps({k: v for k, v in row.items() if k not in ("choices",)}), flush=True)


# -- which networks ---------------------------------------------------------------------------------------------------


def decide(network: Network, seed: int, share: float, args: argparse.Namespace) -> None:
    """Widths of four networks that take equally long, measured."""
    key = {"what": "decided", "model": network.name, "seed": seed, "share": share}
    if rows(args.out, **key):
        return
    begin, images = time.perf_counter(), datasets.load_data("cifar10", args.data, seed=seed)
    meter = DeviceMeter(resolve(TARGET), network.inputs, rules_for(LatencyBudget("50%"), network.rules), seed)
    made: dict[str, nn.Module] = {}
    choices: dict[str, Any] = {}
    for text, method in ((OURS, "dsa"), (FLOPS, "dsa"), (UNIFORM, "uniform")):
        rewind(images.val)
        found = allocate(
            network.dense, LatencyBudget(f"{share:g}%"), example_inputs=network.inputs, val=images.val, target=TARGET,
            method=flops_proposal(network, images, seed, share / 100) if text == FLOPS else method, seed=seed,
            options={"precision": "bf16"} if method == "dsa" else {},
            profiling=ProfileOptions(source=network.cost, rules=network.rules, time_limit=90.0, name=network.name),
        )  # fmt: skip
        assert found.proposal is not None
        made[text] = found.model
        choices[text] = {
            "kept": [np.asarray(u).tolist() for u in found.plan.kept],
            "alpha": np.round(found.proposal.alpha, 4).tolist(),
            "measurements": len(found.rounds),
        }
        print(text, found.widths.tolist(), found.certificate.entries[0], found.rounds.to_string(), sep="\n", flush=True)
    before = [r["choices"][RIVAL] for r in rows(args.out, what="decided", model=network.name, share=share)]
    made[RIVAL], choices[RIVAL] = torch_pruning_twin(network, meter, made[OURS], before)
    readings = meter.read({DENSE: network.dense, **made}, 60.0)
    flops = {text: counted(model, network.inputs) for text, model in {DENSE: network.dense, **made}.items()}
    note(
        args.out,
        {
            **key, "target": meter.title, "choices": choices, "flops": flops,
            "readings": {text: asdict(r) for text, r in readings.items()}, "seconds": time.perf_counter() - begin,
        },
    )  # fmt: skip


def counted(model: nn.Module, inputs: Any) -> float:
    return float(budgets.flops(find_groups(model, inputs)).dense)


def flops_proposal(network: Network, images: Any, seed: int, share: float) -> Proposal:
    """Keep ratios of DSA under the FLOPs budget whose network is predicted to take ``share`` of the dense latency.

    Which budget that is depends on the keep ratios, so it is found twice: for uniform ones, then for DSA's own.
    """
    flops, cost, sizes = budgets.flops(network.groups), network.cost, network.sizes
    latency = CostSet([cost], sizes)
    aim = share * float(latency.dense[0])
    alpha = np.full(len(network.groups), share)
    for _ in range(2):
        limit = match_latency(alpha, sizes, flops, lambda w: float(latency.at_widths(w)[0]), aim, network.grid).limit
        rewind(images.val)
        costs = CostSet([flops], sizes, [limit])
        problem = Problem(
            network.dense, network.groups, costs, network.inputs, network.grid, val=images.val, seed=seed,
            progress=True, options={"precision": "bf16"},
        )  # fmt: skip
        found = solve(problem)
        alpha = found.alpha
    print(f"FLOPs budget {100 * limit / float(flops.dense):.1f} %", flush=True)
    return found


def torch_pruning_twin(
    network: Network, meter: DeviceMeter, goal: nn.Module, before: Sequence[Any]
) -> tuple[nn.Module, Any]:
    """Torch-Pruning's global magnitude pruner at the ratio that takes as long as ``goal``, by halving.

    With widths rounded to 8, and where that leaves too large a gap, to fewer, as its users may. Magnitudes know no
    seed: what was found ``before`` for another one is tried first.
    """
    best: tuple[float, Any, Any] = (np.inf, None, None)
    for choice in before:
        model = torch_pruned(network, choice["ratio"], choice["step"])
        if abs(distance(meter, model, goal)) <= CLOSE:
            return model, choice
    for step in (8, 4, 1):
        low, high = 0.0, 0.95
        for _ in range(MOST):
            ratio = (low + high) / 2
            model = torch_pruned(network, ratio, step)
            off = distance(meter, model, goal)
            best = min(best, (abs(off), model, {"ratio": ratio, "step": step}), key=lambda item: item[0])
            if best[0] <= CLOSE:
                return best[1], best[2]
            low, high = (ratio, high) if off > 0 else (low, ratio)
    return best[1], best[2]


def torch_pruned(network: Network, ratio: float, step: int) -> nn.Module:
    import torch_pruning

    model = copy.deepcopy(network.dense)
    torch_pruning.pruner.BasePruner(
        model, network.inputs, importance=torch_pruning.importance.GroupMagnitudeImportance(p=2), global_pruning=True,
        pruning_ratio=ratio, max_pruning_ratio=0.95, round_to=step,
        ignored_layers=[m for m in model.modules() if isinstance(m, nn.Linear)],
    ).step()  # fmt: skip
    return model.eval()


def distance(meter: DeviceMeter, model: nn.Module, goal: nn.Module) -> float:
    """log of the measured latency over the goal's, in one interleaved run."""
    found = meter.read({"network": model, "goal": goal}, 10.0)
    return float(np.log(found["network"].value / found["goal"].value))


def slopes(network: Network, at: float = 0.75) -> pd.DataFrame:
    """Slopes dF/dalpha of both costs with every keep ratio at ``at``, each in % of its dense value, and their ratio."""
    flops, alpha = budgets.flops(network.groups), np.full(len(network.groups), at)
    whole = float(CostSet([network.cost], network.sizes).dense[0])
    table = pd.DataFrame({"group": list(network.groups.names), "channels": network.sizes})
    table["latency %"] = 100 * np.asarray(network.cost.gradient(alpha)) / whole
    table["FLOPs %"] = 100 * np.asarray(flops.gradient(alpha)) / float(flops.dense)
    table["latency over FLOPs"] = table["latency %"] / table["FLOPs %"]
    return table


# -- what they are worth ----------------------------------------------------------------------------------------------


def train(network: Network, seed: int, share: float, args: argparse.Namespace) -> None:
    """Fine-tune every network of a case that was decided, all alike.

    With ``--finish recovered`` weights are refitted to the dense network first, and it teaches while they are
    fine-tuned. The refit needs the kept channels, so that Torch-Pruning's network is left out there.
    """
    part, parts = (int(n) for n in args.worker.split("/"))
    case = {"model": network.name, "seed": seed, "share": share}
    recovers = args.finish == "recovered"
    logits: dict[tuple[int, int], list[torch.Tensor]] = {}
    for decided in rows(args.out, what="decided", **case):
        for text, choice in decided["choices"].items():
            key = {"what": "trained", **case, "network": text, **({"finish": args.finish} if recovers else {})}
            done = [row for row in rows(args.out, **key) if row.get("finish", "plain") == args.finish]
            if zlib.crc32(json.dumps(key).encode()) % parts != part or done:
                continue
            if recovers and "kept" not in choice:
                continue
            images = datasets.load_data("cifar10", args.data, seed=seed)
            if "kept" in choice:
                kept = [np.asarray(units) for units in choice["kept"]]
                model = shrink(network.dense, network.groups, kept)
            else:
                model = torch_pruned(network, choice["ratio"], choice["step"])
            if recovers:
                widths = np.array([len(units) for units in kept])
                costs = CostSet([budgets.flops(network.groups)], network.sizes)
                problem = Problem(network.dense, network.groups, costs, network.inputs, seed=seed)
                given = unlabelled_set(network.dense, network.inputs, images.train, seed=seed, listener=lambda *_: None)
                recover_network(problem, Realised(widths, kept, model), given, "refit", lambda *_: None)
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            if not recovers:
                recalibrate(model, images.train, 10, "bf16")
            before = accuracy(model, images.test)
            torch.manual_seed(seed)
            if recovers:
                taught = Taught(images.train, network.dense, logits)
                finetune(model, taught, args.epochs, lr=0.05, precision="bf16", loss=taught_loss)
            else:
                finetune(model, images.train, args.epochs, lr=0.05, precision="bf16")
            after = accuracy(model, images.test)
            note(args.out, {**key, "before": before, "accuracy": after, "epochs": args.epochs})


def report(path: Path, finish: str = "plain") -> str:
    """Mean over seeds of accuracy, latency and FLOPs beside ours, and our lead with its standard error over seeds."""
    lines = []
    for decided in rows(path, what="decided"):
        case = {k: decided[k] for k in ("model", "seed", "share")}
        found = rows(path, what="trained", **case)
        trained = {row["network"]: row for row in found if row.get("finish", "plain") == finish}
        if OURS not in trained:
            continue
        seconds = {text: reading["value"] for text, reading in decided["readings"].items()}
        for text, row in trained.items():
            lines.append(
                {
                    **case,
                    "network": text,
                    "before": 100 * row["before"],
                    "accuracy": 100 * row["accuracy"],
                    "our lead": 100 * (trained[OURS]["accuracy"] - row["accuracy"]),
                    "latency over ours": seconds[text] / seconds[OURS],
                    "latency over dense": seconds[text] / seconds[DENSE],
                    "FLOPs over dense": decided["flops"][text] / decided["flops"][DENSE],
                }
            )
    if not lines:
        return f"{path} has no trained network yet"
    frame = pd.DataFrame(lines)
    by = frame.groupby(["model", "share", "network"], sort=False)
    table = by[["before", "accuracy", "our lead", "latency over ours", "latency over dense", "FLOPs over dense"]].mean()
    table.insert(2, "deviation", by["accuracy"].std())
    table.insert(4, "standard error", by["our lead"].std() / np.sqrt(by["seed"].nunique()))
    table.insert(0, "seeds", by["seed"].nunique())
    return table.round(3).to_string()


if __name__ == "__main__":
    main()
