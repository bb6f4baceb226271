"""The paper's ImageNet recipe: ResNet-18 at 60 % of its FLOPs, ResNet-50 at 60 and 50 %.

See docs/benchmarks/imagenet.md.

    torchrun --nproc-per-node 8 benchmarks/imagenet.py --data IMAGENET --model resnet18 --flops 60% --out runs/r18-60

``IMAGENET`` has ``train/CLASS/*.JPEG`` and ``val/CLASS/*.JPEG``. Trained from scratch: warm-up, allocation together
with the weights, then the pruned network alone. One process per GPU (nccl), or several on processors (gloo); without
torchrun it is one process. Ctrl-C stops after the step; the same command continues. ``--out`` gets ``log.csv``,
``allocation.csv``, ``checkpoint.pt``, and at the end ``plan.json``, ``model.pt`` and ``result.json``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler, Subset

import budgets
from dsa_hw import find_groups
from dsa_hw.channels.plan import Plan
from dsa_hw.errors import DsaError
from dsa_hw.methods.dsa.recipe import Recipe
from dsa_hw.methods.dsa.trainer import Trained, Trainer
from dsa_hw.training import metrics
from dsa_hw.zoo.models import load_model

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
VAL_SHARE = 0.1  # of the training images, for the keep ratios


@contextmanager
def ranks() -> Iterator[tuple[int, int, torch.device]]:
    """(rank, number of ranks, device) as torchrun says; one process without it."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if "RANK" not in os.environ:
        yield 0, 1, device
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield distributed.get_rank(), distributed.get_world_size(), device
    finally:
        distributed.destroy_process_group()


def loaders(args: argparse.Namespace, rank: int, world: int, device: torch.device) -> tuple[DataLoader[Any], ...]:
    """train, val (for the keep ratios), both together (once those are decided) and this rank's share of test."""
    from dsa_hw.zoo.torchvision_compat import torchvision

    transforms = torchvision.transforms
    finish = [transforms.ToTensor(), transforms.Normalize(MEAN, DEVIATION)]
    moved = transforms.Compose([transforms.RandomResizedCrop(args.size), transforms.RandomHorizontalFlip(), *finish])
    resize = transforms.Resize(round(args.size * 256 / 224))
    plain = transforms.Compose([resize, transforms.CenterCrop(args.size), *finish])
    folder = torchvision.datasets.ImageFolder
    try:
        augmented, still, test = (
            folder(str(args.data / part), transform)
            for part, transform in (("train", moved), ("train", plain), ("val", plain))
        )
    except (FileNotFoundError, OSError) as error:
        raise DsaError(
            f"{args.data} is no ImageNet folder ({error}); it must have train/CLASS/*.JPEG and val/CLASS/*.JPEG"
        ) from error
    order = torch.randperm(len(augmented), generator=torch.Generator().manual_seed(args.seed))[: args.limit].tolist()
    cut = max(round(VAL_SHARE * len(order)), 1)
    shown = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[: args.limit].tolist()
    batch = args.batch // world
    common = {"num_workers": args.workers, "pin_memory": device.type == "cuda", "persistent_workers": args.workers > 0}

    def sampled(data: Any, drop_last: bool) -> DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank, seed=args.seed, drop_last=drop_last)
        return DataLoader(data, batch, sampler=sampler, drop_last=drop_last, **common)

    return (
        sampled(Subset(augmented, order[cut:]), True),
        sampled(Subset(still, order[:cut]), False),
        sampled(Subset(augmented, order), True),
        DataLoader(Subset(test, shown[rank::world]), batch, **common),
    )


def recipe(args: argparse.Namespace) -> Recipe:
    """The paper's, with every stage and milestone scaled to ``--epochs``."""
    full = Recipe.paper("imagenet", precision=args.precision, lr=args.lr)
    scale = args.epochs / full.epochs
    return replace(
        full,
        warm_up=scale * full.warm_up,
        allocation=scale * full.allocation,
        finetune=scale * full.finetune,
        milestones=tuple(scale * milestone for milestone in full.milestones),
    )


def accuracy(model: torch.nn.Module, test: DataLoader[Any], precision: str, device: torch.device) -> float:
    """Over all ranks' shares of the test images, each image once."""
    count = len(test.dataset)  # type: ignore[arg-type]
    right = metrics.accuracy(model, test, precision) * count if count else 0.0
    both = torch.tensor([right, count], dtype=torch.float64, device=device)
    if distributed.is_initialized():
        distributed.all_reduce(both)
    return float(both[0] / both[1])


def run(args: argparse.Namespace) -> None:
    budget = budgets.FlopsBudget(args.flops, convention="paper")
    with ranks() as (rank, world, device):
        logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s", stream=sys.stderr)
        if args.batch % world:
            raise DsaError(f"--batch {args.batch} images cannot be shared by {world} processes; choose a multiple")
        torch.manual_seed(args.seed)
        train, val, whole, test = loaders(args, rank, world, device)
        model, inputs = load_model(args.model, (1, 3, args.size, args.size))
        groups = find_groups(model, inputs)
        cost = budget.cost(groups)
        begin = time.monotonic()
        trainer = Trainer(
            model.to(device),
            groups,
            budget,
            train,
            val,
            recipe(args),
            finetune=whole,
            test=test,  # log.csv: on the first rank's share of the test images
            folder=args.out,
            progress=rank == 0,
            seed=args.seed,
            title=f"{args.model} at {args.flops}",
        )
        started = trainer.step
        trained = trainer.run()
        final = accuracy(trained.model, test, args.precision, device)
        if rank == 0:
            report(args, groups, trained, final, cost, world, started, time.monotonic() - begin)


def report(
    args: argparse.Namespace,
    groups: Any,
    trained: Trained,
    final: float,
    cost: Any,
    world: int,
    started: int,
    seconds: float,
) -> None:
    """Plan, weights and numbers."""
    Plan.of(groups, trained.kept).save(args.out / "plan.json")
    torch.save(trained.model.state_dict(), args.out / "model.pt")
    used = float(cost.value(torch.from_numpy(trained.widths / groups.sizes))) / cost.dense
    found = {
        "model": args.model,
        "asked": args.flops,
        "flops": used,
        "accuracy": final,
        "epochs": args.epochs,
        "batch": args.batch,
        "processes": world,
        "size": args.size,
        "limit": args.limit,
        "seed": args.seed,
        "precision": args.precision,
        "started_at_step": started,
        "seconds": seconds,
        "torch": torch.__version__,
        "widths": dict(zip(groups.names, trained.widths.tolist(), strict=True)),
    }
    (args.out / "result.json").write_text(json.dumps(found, indent=1))
    print(f"{args.model}: {100 * used:.2f} % of the FLOPs, top-1 {100 * final:.2f} %, in {args.out}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train/ and val/")
    parser.add_argument("--model", default="resnet18", help="torchvision name (%(default)s)")
    parser.add_argument("--flops", default="60%", help="budget (60%%)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; continued if it exists")
    parser.add_argument("--epochs", type=float, default=120.0, help="(%(default)s) stages are scaled to it")
    parser.add_argument("--batch", type=int, default=256, help="images of all processes together (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.1, help="for --batch 256 (%(default)s)")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="AMP (%(default)s)")
    parser.add_argument("--size", type=int, default=224, help="pixels (%(default)s)")
    parser.add_argument(
        "--workers", type=int, default=8, help="processes that read images, for each rank (%(default)s)"
    )
    parser.add_argument("--limit", type=int, help="images of each set, for a trial (all)")
    parser.add_argument("--seed", type=int, default=0)
    try:
        run(parser.parse_args(arguments))
    except DsaError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:
        # While Python shuts down, a thread of gloo may still release a tensor, and the process is aborted.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
