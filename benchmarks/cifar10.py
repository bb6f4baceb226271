"""DSA and its rivals on all of CIFAR-10. Resumable: every finished run is a line of JSON, and is not run again.

    python benchmarks/cifar10.py resnet20 --data DIR --weights resnet20-12fca82f.th   # pretrained, 75 / 50 / 33 % FLOPs
    python benchmarks/cifar10.py vgg --data DIR            # VGG-16-BN at a quarter of its width, 50 / 20 % FLOPs
    python benchmarks/cifar10.py scratch --data DIR --network vgg16_quarter --budgets 0.2 --seeds 0 1 2 3 4
    python benchmarks/cifar10.py guidance --data DIR --weights ...   # train + val, val only, none; and the ablation
    python benchmarks/cifar10.py rationality --data DIR --weights ...
    python benchmarks/cifar10.py overhead --data DIR
    python benchmarks/cifar10.py paper --data DIR --device cuda --models resnet20 resnet56   # Table 2, 300 epochs each
    python benchmarks/cifar10.py report                    # tables and pictures from what is there

``--worker 0/2`` and ``--worker 1/2`` share the runs between two processes. One thread each, bfloat16, channels last.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import fcntl
import itertools
import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

import budgets
from dsa_hw import find_groups
from dsa_hw.channels import ChannelGroups, masked, select_channels
from dsa_hw.experiments.dense import rewind
from dsa_hw.methods.baselines.morphnet import allocate_morphnet, train_morphnet
from dsa_hw.methods.baselines.ssl import allocate_ssl, train_ssl
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.dsa.allocator import Allocator
from dsa_hw.methods.dsa.elimination import elimination
from dsa_hw.methods.dsa.fisher import fisher
from dsa_hw.methods.dsa.recipe import Recipe
from dsa_hw.methods.dsa.trainer import Trainer
from dsa_hw.methods.problem import Problem, Proposal, Realised, realise
from dsa_hw.methods.registry import solve
from dsa_hw.pipeline.recovering import recover_network
from dsa_hw.pipeline.unlabelled import UnlabelledSet, unlabelled_set
from dsa_hw.training.batchnorm import batch_statistics, recalibrate
from dsa_hw.training.distillation import distillation_loss
from dsa_hw.training.finetune import finetune
from dsa_hw.training.loaders import RepeatingLoader
from dsa_hw.training.losses import autocast
from dsa_hw.training.metrics import accuracy
from dsa_hw.utils.modules import evaluating
from dsa_hw.zoo import data
from dsa_hw.zoo.cifar import ResNet
from dsa_hw.zoo.models import load_model

RESULTS = Path(__file__).parent / "results"
FINETUNE_EPOCHS, FINETUNE_LR = 2, 0.05
WEIGHTS = {3: "resnet20-12fca82f.th", 9: "resnet56-4bfd9763.th"}  # of akamaster/pytorch_resnet_cifar10
TEACHER = 0.9  # weight of the dense network's logits in the loss, where it is the teacher
RIVALS = ("uniform", "global_gamma", "ssl", "morphnet", "netadapt", "annealing", "knapsack", "torch_pruning")
COMPUTE = {"precision": "bf16", "channels_last": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "dsa": {"precision": "bf16"},
    "ssl": COMPUTE,
    "morphnet": COMPUTE,
    "netadapt": {**COMPUTE, "statistics": "batch"},
    "annealing": {**COMPUTE, "statistics": "batch"},
}


class Book:
    """Results as lines of JSON; several processes may write."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def has(self, **key: Any) -> bool:
        return any(all(row.get(k) == v for k, v in key.items()) for row in self.rows())

    def add(self, row: dict[str, Any]) -> None:
        row = {**row, "date": datetime.date.today().isoformat(), "torch": torch.__version__}
        with self.path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(row) + "\n")
        shown = {k: v for k, v in row.items() if k not in ("widths", "history", "date", "torch")}
        print(json.dumps(shown), flush=True)


class Case:
    """A trained network, its groups, its FLOPs and the data."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...], args: argparse.Namespace) -> None:
        self.model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.groups: ChannelGroups = find_groups(model, inputs)
        self.flops = budgets.flops(self.groups)
        self.dense = float(self.flops.value(torch.ones(len(self.groups), dtype=torch.float64)))
        self.inputs, self.args = inputs, args
        self._data: dict[int, data.Data] = {}
        self._rankings: dict[tuple[str, int], list[Any]] = {}
        self._logits: dict[tuple[int, int], list[torch.Tensor]] = {}

    def data(self, seed: int) -> data.Data:
        if seed not in self._data:
            self._data = {seed: data.load_data("cifar10", self.args.data, seed=seed)}
        return self._data[seed]

    def problem(self, budget: float, seed: int, method: str = "", **changes: Any) -> Problem:
        found = self.data(seed)
        rewind(found.train, found.val)
        costs = CostSet([self.flops], self.groups.sizes, [budget * self.dense])
        problem = Problem(
            self.model, self.groups, costs, self.inputs, train=found.train, val=found.val,
            seed=seed, epochs=1.0, options=OPTIONS.get(method, {}), progress=self.args.progress,
        )  # fmt: skip
        return replace(problem, **changes)

    def images(self, seed: int) -> UnlabelledSet | None:
        """Training images without labels and augmentation, for the refit."""
        return unlabelled_set(self.model, self.inputs, self.data(seed).train, seed=seed, listener=lambda *_: None)

    def ranking(self, seed: int) -> list[Any]:
        """Fisher information of every channel: the order in which all methods search with ``--order``."""
        return self._ranked(fisher, seed)

    def selection(self, seed: int) -> list[Any]:
        """The order in which channels are finally chosen with ``--order``."""
        return self._ranked({"fisher": fisher, "elimination": elimination}[self.args.order], seed)

    def _ranked(self, how: Callable[..., Any], seed: int) -> list[Any]:
        if (how.__name__, seed) not in self._rankings:
            problem = self.problem(1.0, seed)
            batches = itertools.islice(iter(self.data(seed).val), 16)
            found = how(self.model, self.groups, batches, problem.loss, precision="bf16")
            self._rankings[how.__name__, seed] = found
        return self._rankings[how.__name__, seed]

    def finish(
        self, network: nn.Module, seed: int, epochs: float = FINETUNE_EPOCHS, cut: Realised | None = None
    ) -> dict[str, Any]:
        """Accuracy before and after fine-tuning; the same for every method.

        Without ``cut``, batch-norm statistics are measured again before, and the fine-tuning has labels only. With it,
        weights are refitted to the dense network before, on 512 images without labels, and distilled while they are
        fine-tuned.
        """
        found = self.data(seed)
        row: dict[str, Any] = {}
        rewind(found.train)
        if cut is None:
            network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            recalibrate(network, found.train, 10, "bf16")
        else:
            begin = time.process_time()
            recover_network(self.problem(1.0, seed), cut, self.images(seed), "refit", lambda *_: None)
            row["recover_cpu_s"] = time.process_time() - begin
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        row["before"], row["val_before"] = accuracy(network, found.test), accuracy(network, found.val)
        begin = time.process_time()
        if epochs:
            finetune(
                network, found.train if cut is None else Taught(found.train, self.model, self._logits), epochs,
                loss=nn.functional.cross_entropy if cut is None else taught_loss,
                lr=FINETUNE_LR, precision="bf16", progress=self.args.progress,
            )  # fmt: skip
            row["accuracy"], row["val"] = accuracy(network, found.test), accuracy(network, found.val)
        return row | {"epochs": epochs, "finetune_cpu_s": time.process_time() - begin}


class Taught:
    """Training batches with (labels, logits of the dense network) as targets.

    Batches depend on seed and epoch only, so that the logits are computed once and shared by all methods and budgets.
    """

    def __init__(self, loader: Iterable[Any], teacher: nn.Module, known: dict[tuple[int, int], list[torch.Tensor]]):
        assert isinstance(loader, data.Batches)
        self.loader, self.teacher, self.known = loader, teacher, known

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def epoch(self) -> int:
        return self.loader.epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self.loader.epoch = number

    def __iter__(self) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]:
        logits = self.known.setdefault((self.loader.seed, self.loader.epoch), [])
        for step, (images, labels) in enumerate(self.loader):
            if step == len(logits):
                with torch.no_grad(), evaluating(self.teacher), autocast("bf16", images.device):
                    logits.append(self.teacher(images).float())
            yield images, (labels, logits[step])


def taught_loss(outputs: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    labels, logits = targets
    hard = nn.functional.cross_entropy(outputs.float(), labels)
    return (1.0 - TEACHER) * hard + TEACHER * distillation_loss(outputs, logits)


# -- the methods ------------------------------------------------------------------------------------------------------


def torch_pruning_network(case: Case, budget: float) -> tuple[nn.Module, float]:
    """Torch-Pruning's global magnitude pruner, in small steps until the counted FLOPs are within the budget."""
    import torch_pruning
    from torch.utils.flop_counter import FlopCounterMode

    network = copy.deepcopy(case.model).eval()
    heads = [m for m in network.modules() if isinstance(m, nn.Linear)]
    pruner = torch_pruning.pruner.BasePruner(
        network, case.inputs, importance=torch_pruning.importance.GroupMagnitudeImportance(p=2), global_pruning=True,
        pruning_ratio=1.0, iterative_steps=400, ignored_layers=heads, max_pruning_ratio=0.95,
    )  # fmt: skip
    while True:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(*case.inputs)
        used = counter.get_total_flops() / case.dense
        if used <= budget:
            return network, used
        pruner.step()


def proposed(case: Case, method: str, budget: float, seed: int, cache: dict[Any, nn.Module]) -> Proposal:
    """What a method proposes. SSL and MorphNet train once for all budgets of a seed."""
    name, _, variant = method.partition(":")
    problem = case.problem(budget, seed, name)
    if name in ("ssl", "morphnet"):
        train, allocate = (train_ssl, allocate_ssl) if name == "ssl" else (train_morphnet, allocate_morphnet)
        # MorphNet's penalty is weighted by the cost's gradient at alpha = 1, which no budget changes.
        if (name, seed) not in cache:
            cache.clear()
            cache[name, seed] = train(problem)
        return allocate(problem, cache[name, seed])
    if name == "dsa":
        guides: dict[str, dict[str, Any]] = {"train": {}, "none": {"train": None, "val": None}}
        problem = replace(problem, **guides.get(variant, {"train": None}))
    elif case.args.order != "own":
        ranking = case.ranking(seed)
        problem = replace(problem, importance=lambda *_: ranking)
    return solve(problem, name)


def one(case: Case, study: str, method: str, budget: float, seed: int, cache: dict[Any, nn.Module]) -> dict[str, Any]:
    torch.manual_seed(seed)
    begin = time.process_time()
    row: dict[str, Any] = {"study": study, "method": method, "budget": budget, "seed": seed, **setting(case.args)}
    if method == "torch_pruning":
        network, used = torch_pruning_network(case, budget)
        row |= {"used": used / budget, "allocate_cpu_s": time.process_time() - begin}
    else:
        base, _, extra = method.partition("+")
        known = allocated(case, row)
        if known:
            widths = np.array([known["widths"][name] for name in case.groups.names])
            proposal = Proposal(widths / case.groups.sizes, case.model, case.selection(seed))
            realised, row_used = realise(case.problem(budget, seed), proposal, widths), known["used"]
        else:
            proposal = proposed(case, base, budget, seed, cache)
            if case.args.order != "own":
                proposal = replace(proposal, importance=case.selection(seed))
            realised, row_used = build(case, proposal, budget, seed)
        seconds = known["allocate_cpu_s"] if known else time.process_time() - begin
        row |= {"used": row_used, "allocate_cpu_s": seconds}
        row["widths"] = dict(zip(case.groups.names, realised.widths.tolist(), strict=True))
        epochs = case.args.finetune + float(extra or 0)
        cut = realised if case.args.finish == "recovered" else None
        return row | case.finish(realised.model, seed, epochs, cut)
    return row | case.finish(network, seed)


def allocated(case: Case, row: dict[str, Any]) -> dict[str, Any] | None:
    """Return a recorded run whose widths are taken over: searched alike, with other epochs or selection."""
    same = ("study", "method", "budget", "seed", "finish")
    found = [known for known in Book(case.args.out).rows() if all(known.get(k) == row.get(k) for k in same)]
    return found[0] if found and case.args.order != "own" else None


def setting(args: argparse.Namespace) -> dict[str, Any]:
    """What distinguishes runs besides method, budget and seed; nothing for those of the first study."""
    changed = {"order": args.order, "finish": args.finish, "epochs": args.finetune}
    return {k: v for k, v in changed.items() if v not in ("own", "plain")}


def build(case: Case, proposal: Proposal, budget: float, seed: int) -> tuple[Realised, float]:
    realised = realise(case.problem(budget, seed), proposal)
    used = float(case.flops.value(torch.from_numpy(realised.widths / case.groups.sizes))) / case.dense / budget
    return realised, used


def compare(case: Case, study: str, runs: Iterator[tuple[str, float, int]], args: argparse.Namespace) -> None:
    book, cache = Book(args.out), {}  # type: tuple[Book, dict[Any, nn.Module]]
    part, parts = (int(n) for n in args.worker.split("/"))
    for method, budget, seed in runs:
        # Runs of one method and seed share a trained network, so they go to the same worker.
        if zlib.crc32(f"{method} {seed}".encode()) % parts != part:
            continue
        if not book.has(study=study, method=method, budget=budget, seed=seed, **setting(args)):
            book.add(one(case, study, method, budget, seed, cache))


def trained_resnet(args: argparse.Namespace, blocks: int = 3) -> Case:
    """ResNet-20 (3 blocks per stage) or ResNet-56 (9) with the weights of ``--weights``, a file or a folder."""
    model = ResNet(blocks=blocks, shortcut="A").eval()
    file = args.weights / WEIGHTS[blocks] if args.weights.is_dir() else args.weights
    state = torch.load(file, weights_only=True, map_location="cpu")["state_dict"]
    model.load_state_dict({key.removeprefix("module."): value for key, value in state.items()})
    return Case(model, (torch.zeros(1, 3, 32, 32),), args)


def plan(args: argparse.Namespace, default: list[tuple[float, int]]) -> Iterator[tuple[str, float, int]]:
    """Method, budget and seed of every run: those asked for, else those of the published tables."""
    if args.budgets:
        default = [(budget, seed) for budget in args.budgets for seed in args.seeds]
    return ((m, budget, seed) for budget, seed in default for m in args.methods or ("dsa", *RIVALS))


def resnet20(args: argparse.Namespace) -> None:
    plans = [(0.33, 0), (0.5, 0), (0.33, 1), (0.5, 1), (0.33, 2), (0.5, 2), (0.75, 0)]
    compare(trained_resnet(args), "resnet20", plan(args, plans), args)


def resnet56(args: argparse.Namespace) -> None:
    compare(trained_resnet(args, 9), "resnet56", plan(args, [(0.44, 0), (0.5, 0)]), args)


def vgg(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model, inputs = load_model("vgg16_quarter")
    file = Path(args.cache) / "vgg16_quarter.pt"
    case = Case(model, inputs, args)
    if file.exists():
        model.load_state_dict(torch.load(file, weights_only=True))
    else:
        found = case.data(0)
        finetune(
            model, found.train, args.vgg_epochs, lr=0.1, warm_up=0.2, precision="bf16", progress=args.progress,
            folder=args.cache / "vgg16_quarter",
        )  # fmt: skip
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), file)
        row = {"study": "vgg", "method": "dense", "budget": 1.0, "seed": 0, "epochs": args.vgg_epochs}
        Book(args.out).add({**row, "accuracy": accuracy(model, found.test)})
    compare(case, "vgg", plan(args, [(0.2, 0), (0.5, 0), (0.2, 1), (0.2, 2)]), args)


def scratch(args: argparse.Namespace) -> None:
    """From scratch under one cycle; every arm has the same steps, and 45,000 images in the first 30% of them.

    ``uniform`` is pruned at initialisation, ``uniform:trainer`` as DSA is, but with dL/dalpha = 0. ``dsa:widths`` has
    the widths that DSA found with this seed from the start.
    """
    book, arms = Book(args.out), args.methods or ("dsa", "dsa:widths", "uniform", "uniform:trainer", "dense")
    for seed, budget, method in itertools.product(args.seeds, args.budgets or [0.5], arms):
        study = f"scratch, {args.network} at {100 * budget:g}%, {args.epochs:g} epochs"
        if book.has(study=study, method=method, seed=seed):
            continue
        torch.manual_seed(seed)
        case = Case(*load_model(args.network), args)
        model, groups, found, begin = case.model, case.groups, case.data(seed), time.process_time()
        allocates = method in ("dsa", "uniform:trainer")
        if method in ("uniform", "dsa:widths"):
            if method == "uniform":
                proposal, widths = solve(case.problem(budget, seed), "uniform"), None
            else:
                known = [r for r in book.rows() if (r["study"], r.get("method"), r.get("seed")) == (study, "dsa", seed)]
                if not known:
                    raise SystemExit(f"dsa:widths needs the run of dsa with seed {seed}; name dsa before it.")
                widths = np.array([known[0]["widths"][name] for name in groups.names])
                proposal = Proposal(widths / groups.sizes, model)
            model = realise(case.problem(budget, seed), proposal, widths).model
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            groups = find_groups(model, case.inputs)
        limit = budget * case.dense if allocates else 2.0 * case.dense  # the others have nothing to allocate
        trainer = Trainer(
            model, groups, CostSet([budgets.flops(groups)], groups.sizes, [limit]), found.train, found.val,
            Recipe.short(args.epochs, precision="bf16"), finetune=found.whole, progress=args.progress, seed=seed,
            folder=args.cache / "-".join(map(str, ("scratch", args.network, method, budget, seed, args.epochs))),
        )  # fmt: skip
        if method == "uniform:trainer":
            trainer.allocator.loss = lambda outputs, _: 0.0 * outputs.sum()
        trained = trainer.run()
        row = {"study": study, "method": method, "budget": budget, "seed": seed, "epochs": args.epochs}
        row["widths"] = dict(zip(groups.names, trained.widths.tolist(), strict=True))
        row["training_loss"] = float(trained.log["loss"].iloc[-1])
        book.add({**row, "accuracy": accuracy(trained.model, found.test), "cpu_s": time.process_time() - begin})


def paper(args: argparse.Namespace) -> None:
    """Table 2 of the paper: ResNet-20 and ResNet-56 from scratch by the paper's recipe, dense, uniform and DSA.

    Each run has a folder in ``--cache`` and is continued after an interruption. ``--smoke``: a few steps of each stage.
    """
    book = Book(args.out)
    short: dict[str, Any] = {"warm_up": 0.02, "allocation": 0.1, "finetune": 0.02, "milestones": ()}
    precision = "bf16" if args.device == "cpu" else "fp32"
    runs = [("dense", 1.0), *((m, b) for b in (0.75, 0.5, 0.333) for m in ("dsa", "uniform"))]
    for name, (method, budget) in itertools.product(args.models, runs):
        key = {
            "study": "paper",
            "model": name,
            "method": method,
            "budget": budget,
            "seed": args.seed,
            "smoke": args.smoke,
        }
        if (args.methods and method not in args.methods) or book.has(**key):
            continue
        torch.manual_seed(args.seed)
        case = Case(*load_model(name), args)
        model, groups, found = case.model, case.groups, case.data(args.seed)
        if method == "uniform":
            model = build(case, solve(case.problem(budget, args.seed), "uniform"), budget, args.seed)[0].model
            groups = find_groups(model, case.inputs)
        cost = budgets.flops(groups)
        limit = budget * case.dense if method == "dsa" else 2.0 * case.dense  # the others have nothing to allocate
        first = found.train if method == "dsa" else found.whole
        folder = args.cache / "-".join(map(str, ("paper", name, method, budget, args.seed, args.smoke)))
        trainer = Trainer(
            model.to(args.device), groups, CostSet([cost], groups.sizes, [limit]), first, found.val,
            Recipe.paper(precision=precision, **(short if args.smoke else {})), finetune=found.whole,
            test=found.test, folder=folder, progress=True, seed=args.seed,
        )  # fmt: skip
        trained = trainer.run()
        used = float(cost.value(torch.from_numpy(trained.widths / groups.sizes))) / case.dense
        book.add({**key, "used": used, "accuracy": accuracy(trained.model, found.test)})


# The names are keys of the recorded results. "the paper's relaxation" has |gamma| and a beta2 of importances as in the
# paper, but soft masks and beta2 from 10 to 100.
ABLATION: dict[str, dict[str, Any]] = {
    "train + val: hard masks for weights": {"guide": "train"},
    "train + val: sampled masks for weights": {"guide": "train", "weight_masks": "sampled"},
    "no data": {"guide": "none"},
    "val only": {},
    "order of units: |gamma|": {"importance": "gamma"},
    "softness by importance, not by rank": {"softness": "importance"},
    "both (the paper's relaxation)": {"importance": "gamma", "softness": "importance"},
    "masks: 1 straight-through": {"masks": "straight_through"},
    "masks: 4 straight-through": {"masks": "straight_through", "samples": 4},
    "4 batches per step, 30 steps": {"batches": 4, "steps": 30},
    "no averaging of gradients": {"smoothing": 0.0},
    "distance in theta, not in cost": {"metric": "logit"},
    "small steps (travel 1)": {"travel": 1.0},
    "soft at first (beta2 2 to 50)": {"beta2": (2.0, 50.0)},
    "fast budget (20 steps)": {"steps": 20},
    "no floor": {"minimum": 0.0},
    "stored batch-norm statistics": {"statistics": "stored"},
}


def guidance(args: argparse.Namespace) -> None:
    """Three guidances and the ablation at 33 %, each followed by a third of an epoch of fine-tuning."""
    case = trained_resnet(args)
    book, seed, budget = Book(args.out), 0, 0.33
    part, parts = (int(n) for n in args.worker.split("/"))
    for index, name in enumerate(("uniform", *ABLATION)):
        if index % parts != part or book.has(study="guidance", method=name):
            continue
        torch.manual_seed(seed)
        changes = dict(ABLATION.get(name, {}))
        minimum, importance = changes.pop("minimum", 0.05), changes.pop("importance", "auto")
        base, guide = ("dsa" if name in ABLATION else name), changes.pop("guide", "val")
        guides: dict[str, dict[str, Any]] = {"none": {"train": None, "val": None}, "train": {}, "val": {"train": None}}
        problem = case.problem(budget, seed, base, minimum=minimum, importance=importance, **guides[guide])
        if base == "dsa":
            problem = replace(problem, options={**problem.options, **changes})
        proposal = solve(problem, base)
        realised, used = build(case, proposal, budget, seed)
        row = {"study": "guidance", "method": name, "budget": budget, "seed": seed, "used": used}
        row["widths"] = dict(zip(case.groups.names, realised.widths.tolist(), strict=True))
        book.add(row | case.finish(realised.model, seed, 1 / 3))


def rationality(args: argparse.Namespace) -> None:
    """Fig. 5 of the paper: sensitivity of each group, pruned alone, against |dL/dalpha|."""
    from scipy.stats import spearmanr

    case, book = trained_resnet(args), Book(args.out)
    if book.has(study="rationality"):
        return
    found = case.data(0)
    batches = list(itertools.islice(iter(found.val), 8))
    allocator = Allocator(
        case.model, case.groups, budgets.FlopsBudget("33%"), steps=60, precision="bf16", smoothing=0.0
    )
    allocator.admm.state.theta[:] = allocator.admm.state.z[:] = 1.0  # alpha = 0.73 everywhere: some channels matter
    allocator.step(*batches)
    gradient = np.abs(allocator.admm.state.gradient)
    rows = {}
    for share in (0.25, 0.5, 0.75):
        rise = []
        for k in range(len(case.groups)):
            widths = case.groups.sizes.copy()
            widths[k] = max(1, round(share * widths[k]))
            rise.append(_loss(case, widths, batches) - _loss(case, case.groups.sizes, batches))
        rows[str(share)] = {"rise": rise, "spearman": float(spearmanr(rise, gradient).statistic)}
    book.add({"study": "rationality", "groups": case.groups.names, "gradient": gradient.tolist(), "kept": rows})


def _loss(case: Case, widths: Any, batches: list[Any]) -> float:
    kept = select_channels(case.model, case.groups, widths)
    total = 0.0
    with torch.no_grad(), batch_statistics(case.model), masked(case.model, case.groups, kept):
        for inputs, labels in batches:
            total += float(nn.functional.cross_entropy(case.model(inputs), labels)) / len(batches)
    return total


def overhead(args: argparse.Namespace) -> None:
    """CPU time of training with allocation over training without, interleaved in blocks of 40 weight steps."""
    torch.manual_seed(0)
    model, inputs = load_model("resnet20")
    case = Case(model, inputs, args)
    found = case.data(0)
    twin = copy.deepcopy(case.model)
    recipe = Recipe.paper(precision="bf16", warm_up=0, allocation=300, finetune=0, milestones=())
    trainer = Trainer(case.model, case.groups, budgets.FlopsBudget("50%"), found.train, found.val, recipe)
    from dsa_hw.training.losses import autocast, checked_loss

    source = RepeatingLoader(found.train)
    optimiser = torch.optim.SGD(twin.parameters(), 0.05, 0.9, weight_decay=4e-5)

    def plain() -> None:
        twin.train()
        with autocast("bf16", torch.device("cpu")):
            value = checked_loss(twin, next(source), nn.functional.cross_entropy)
        optimiser.zero_grad(set_to_none=True)
        value.backward()
        optimiser.step()

    seconds: dict[str, list[float]] = {"with": [], "without": []}
    turns: list[tuple[str, Callable[[], None]]] = [("with", trainer.advance), ("without", plain)]
    for turn in range(6):
        for name, step in turns:
            begin = time.process_time()
            for _ in range(40):
                step()
            if turn:  # the first turn warms up
                seconds[name].append(time.process_time() - begin)
    ratio = float(np.median(seconds["with"]) / np.median(seconds["without"]))
    Book(args.out).add({"study": "overhead", "ratio": ratio, "seconds": seconds, "weight_steps": trainer.every})


def report(args: argparse.Namespace) -> None:
    """Print the tables, and draw the pictures in docs/images."""
    from cifar10_report import write_report

    write_report(pd.DataFrame(Book(args.out).rows()), args.pictures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    studies = {
        f.__name__: f for f in (resnet20, resnet56, vgg, scratch, paper, guidance, rationality, overhead, report)
    }
    parser.add_argument("study", choices=studies)
    parser.add_argument("--data", type=Path, default=Path("."), help="folder with cifar10.npz")
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="file, or folder with the .th files")
    parser.add_argument("--out", type=Path, default=RESULTS / "cifar10.jsonl")
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache"), help="folder for trained networks and checkpoints"
    )
    parser.add_argument("--pictures", type=Path, default=Path("docs/images"))
    parser.add_argument("--worker", default="0/1")
    parser.add_argument("--methods", nargs="*")
    parser.add_argument("--budgets", nargs="*", type=float, help="shares of the FLOPs")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument(
        "--order",
        choices=("own", "fisher", "elimination"),
        default="own",
        help="how channels are chosen: by each method's ranking, or alike (all search by Fisher information then)",
    )
    parser.add_argument(
        "--finish", choices=("plain", "recovered"), default="plain", help="recovered: refit, then distillation"
    )
    parser.add_argument("--finetune", type=float, default=FINETUNE_EPOCHS, help="epochs after the cut (%(default)s)")
    parser.add_argument("--network", default="vgg16_quarter", help="of the study scratch (%(default)s)")
    parser.add_argument("--epochs", type=float, default=15.0, help="of the study scratch (%(default)s)")
    parser.add_argument("--vgg-epochs", type=float, default=12.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", nargs="*", default=["resnet20", "resnet56"], help="of the study paper")
    parser.add_argument("--device", default="cpu", help="of the study paper")
    parser.add_argument("--smoke", action="store_true", help="see that the study paper runs")
    parser.add_argument("--progress", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    studies[args.study](args)


if __name__ == "__main__":
    main()
