"""Which number, known before any fine-tuning, predicts the accuracy after it? Loss as cut, or loss after the refit.

    python benchmarks/proxies.py --data DIR --weights DIR      # resumable; results/proxies.jsonl
    python benchmarks/proxies.py --summary

The recorded allocations of `cifar10.py` (results/cifar10.jsonl: widths, and accuracy after two epochs with labels) are
built again, with the channels in the order of their method. Losses are those of 1,024 validation images.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from cifar10 import RESULTS, Book, Case, trained_resnet
from scipy.stats import spearmanr
from torch import nn

from dsa_hw.channels import masked
from dsa_hw.experiments.dense import rewind
from dsa_hw.methods.problem import Problem, Proposal, realise
from dsa_hw.pipeline.recovering import recover_network
from dsa_hw.training.batchnorm import recalibrate
from dsa_hw.training.distillation import distillation_loss
from dsa_hw.utils.modules import evaluating

METHODS = ("dsa", "uniform", "netadapt", "annealing", "knapsack", "global_gamma")
KEY = ("study", "method", "budget", "seed")


def four_gradients(problem: Problem) -> list[Any]:
    """Return the squared gradients of masks on four whole batches: the knapsack's ranking when it was recorded."""
    found = [torch.zeros(int(size)) for size in problem.groups.sizes]
    with evaluating(problem.model):
        for inputs, targets in itertools.islice(problem.val or (), 4):
            masks = [torch.ones(len(part), requires_grad=True) for part in found]
            with torch.enable_grad(), masked(problem.model, problem.groups, masks):
                loss = nn.functional.cross_entropy(problem.model(inputs), targets)
                slopes = torch.autograd.grad(loss, masks, allow_unused=True)
            for part, slope in zip(found, slopes, strict=True):
                part += 0 if slope is None else slope.square()
    return [part.numpy() for part in found]


def order(case: Case, method: str, seed: int) -> Any:
    """Return the ranking of channels that the recorded run had."""
    if method == "dsa":
        return case.ranking(seed)
    problem = case.problem(1.0, seed, method)
    if method == "knapsack":
        return four_gradients(problem)
    return None


@torch.no_grad()
def losses(network: nn.Module, case: Case, batches: list[Any]) -> dict[str, float]:
    """Return cross-entropy and the distance from the dense network's outputs."""
    found = {"loss": 0.0, "distance": 0.0}
    with evaluating(network), evaluating(case.model):
        for images, labels in batches:
            outputs = network(images)
            found["loss"] += float(nn.functional.cross_entropy(outputs, labels)) / len(batches)
            found["distance"] += float(distillation_loss(outputs, case.model(images))) / len(batches)
    return found


def run(args: argparse.Namespace) -> None:
    """Compute the losses of every recorded allocation that is not in the file."""
    case, book = trained_resnet(args), Book(args.out)
    recorded = [row for row in Book(args.recorded).rows() if row["study"] == "resnet20" and "finish" not in row]
    recorded = [row for row in recorded if row["method"] in METHODS and row["budget"] in args.budgets]
    for row in sorted(recorded, key=lambda row: (row["seed"], row["budget"])):
        key = {name: row[name] for name in KEY}
        if book.has(**key):
            continue
        seed, found = row["seed"], case.data(row["seed"])
        problem = replace(case.problem(row["budget"], seed), importance="gamma")
        widths = np.array([row["widths"][name] for name in case.groups.names])
        ranking = order(case, row["method"], seed)
        cut = realise(problem, Proposal(widths / case.groups.sizes, case.model, ranking), widths)
        rewind(found.val, found.train)
        batches = list(itertools.islice(iter(found.val), 8))
        plain = copy.deepcopy(cut.model)
        recalibrate(plain, found.train, 4)
        before = losses(plain, case, batches)
        rewind(found.train)
        recover_network(problem, cut, case.images(seed), "refit", lambda *_: None)
        after = losses(cut.model, case, batches)
        both = {f"{k} as cut": v for k, v in before.items()} | {f"{k} refitted": v for k, v in after.items()}
        book.add({**key, "accuracy": row["accuracy"], **both})


def summarise(args: argparse.Namespace) -> None:
    """Print Spearman's rank correlation with the recorded accuracy, by budget."""
    rows = pd.DataFrame(Book(args.out).rows())
    names = [name for name in rows.columns if name.startswith(("loss", "distance"))]
    table = {}
    for budget, part in rows.groupby("budget"):
        table[f"{100 * float(str(budget)):.0f}%, {len(part)} runs"] = {
            name: -float(spearmanr(part[name], part["accuracy"]).statistic) for name in names
        }
    print(pd.DataFrame(table).round(2).to_string())


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("."), help="folder with cifar10.npz")
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="file, or folder with the .th files")
    parser.add_argument("--recorded", type=Path, default=RESULTS / "cifar10.jsonl")
    parser.add_argument("--out", type=Path, default=RESULTS / "proxies.jsonl")
    parser.add_argument("--budgets", nargs="*", type=float, default=[0.5, 0.33, 0.75])
    parser.add_argument("--summary", action="store_true")
    args = parser.parse_args()
    args.progress = False
    torch.set_num_threads(1)
    if not args.summary:
        run(args)
    summarise(args)


if __name__ == "__main__":
    main()
