"""``dsa-hw allocate``: prune a network to a budget, measured and certified."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dsa_hw
from dsa_hw.cli.budget_args import parse_budgets
from dsa_hw.cli.options import (
    BUDGET_HELP,
    DEFAULT_TARGET,
    EXIT_CODES,
    METHODS,
    PRETRAINED_HELP,
    add_command,
    add_data,
    add_model,
    add_search,
    image_preprocessing,
    load_dense,
    profile_options,
    refinement_options,
    target_of,
    warn_of_random_weights,
)
from dsa_hw.errors import ModelError
from dsa_hw.utils.arguments import amount
from dsa_hw.utils.files import refuse_overwriting
from dsa_hw.utils.text import percent

if TYPE_CHECKING:
    from torch import nn

    from dsa_hw import Allocation
    from dsa_hw.zoo.data import Data

__all__ = ["add", "run"]

_EXAMPLES = """Examples:
  dsa-hw allocate --model resnet18 --pretrained --images photos/ \\
      --budget latency=50% --out small/
  dsa-hw allocate --model timm/resnet50.a1_in1k --pretrained \\
      --data imagefolder:imagenet --budget latency=10ms --finetune 2
  dsa-hw allocate --model resnet20 --data digits --budget latency=60% \\
      --budget flops=80% --epochs 4 --out small/
  dsa-hw allocate --model resnet18 --budget latency=12ms \\
      --profile profile.sqlite --confidence 0.95
  dsa-hw allocate --model resnet20 --data cifar10 --weights resnet20.pt \\
      --budget latency=0.3ms --precision int8

OUT gets index.html (the result as a page), plan.json (with the certificate),
model.safetensors (weights), widths.csv, cost_model.json and the measurements;
with --precision int8 also model.int8.onnx. After an interruption the same
command continues. Exit codes: 0 every budget is met, 2 invalid input, 3 a
budget cannot be met or is not met, 4 the measurement is less precise than
--require, or inconclusive.

--json prints an object with model, certificate, widths, accuracy, out.
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "allocate",
        run,
        summary="prune a network to a budget, measured and certified",
        description="Prune a network to one or more budgets. The network is profiled on the target and a cost model is "
        "fitted; keep ratios are allocated, channels are removed, and the pruned network is measured and corrected "
        "until it meets the budgets.",
        examples=_EXAMPLES,
        continues=True,
    )
    add_model(parser, weights="state dict of the dense network (default: random weights)", pretrained=PRETRAINED_HELP)
    option = parser.add_argument
    option(
        "--budget", action="append", required=True, metavar="COST=AMOUNT", help=f"{BUDGET_HELP}; may be repeated"
    )  # fmt: skip
    add_data(parser, "; keep ratios and weights are learned from it (default: synthetic inputs)")
    option("--images", type=Path, metavar="DIR", help="folder of images without labels, to refit the weights with")
    option("--method", default="dsa", metavar="NAME", help=f"method that finds keep ratios: {', '.join(METHODS)}")
    option("--epochs", type=amount, metavar="N", help="epochs that the method may train (default: the method's own)")
    option(
        "--recovery", choices=("auto", "none", "refit", "distil"), default="auto",
        help="refit the weights that remain to the dense network's outputs; distil also trains them on these outputs; "
        "auto is distil without --data, else refit",
    )  # fmt: skip
    option(
        "--finetune",
        type=amount,
        default=0.0,
        metavar="EPOCHS",
        help="epochs of fine-tuning the pruned network, with the dense one as its teacher",
    )
    option("--out", type=Path, default=Path("allocation"), metavar="DIR", help="folder of the results")
    add_search(parser, "profile store (.sqlite) or fitted cost model (.json) to use instead of measuring")
    option("--force", action="store_true", help="use a cost model of another network, target or runtime version")


def run(args: argparse.Namespace) -> int:
    """Allocate, save and print the certificate."""
    from dsa_hw.experiments.report import write_allocation

    refuse_overwriting(args.out / "model.safetensors", args.weights)
    budgets = parse_budgets(args.budget)
    if args.finetune and not args.data:
        raise ModelError("--finetune needs training data. Name them with --data, for example --data digits.")
    warn_of_random_weights(args)
    model, inputs, data = load_dense(args)
    images = None
    if args.images:
        from dsa_hw.zoo.image_folder import unlabelled_images

        images = unlabelled_images(args.images, image_preprocessing(args), workers=args.workers, seed=args.seed)
    result = dsa_hw.allocate(
        model,
        budgets,
        example_inputs=inputs,
        train=data.train if data else None,
        val=data.val if data else None,
        loss=data.loss if data else None,
        step=data.step if data else None,
        metric=data.metric if data else None,
        images=images,
        target=target_of(args),
        method=args.method,
        recovery=args.recovery,
        options={} if args.epochs is None else {"epochs": args.epochs},
        seed=args.seed,
        out=args.out,
        progress=not args.json,
        profiling=profile_options(args),
        refinement=refinement_options(args),
    )
    accuracy: dict[str, float] = {}
    if data:
        result, accuracy = _assessed(model, result, data, args)
    certificate = result.certificate
    check = ["dsa-hw", "verify", str(args.out / "plan.json"), "--model", args.model]
    if args.classes is not None:
        check += ["--classes", str(args.classes)]
    if args.target != DEFAULT_TARGET:
        check += ["--target", args.target]
    write_allocation(result, args.out / "index.html", model=args.model, command=shlex.join(check))
    if args.json:
        content = {
            "model": args.model,
            "certificate": certificate.to_dict(),
            "widths": {str(name): int(width) for name, width in result.widths.items()},
            "accuracy": accuracy,
            "out": str(args.out),
        }
        print(json.dumps(content, indent=1))
    else:
        print(result)
        if "fine-tuned" in accuracy:
            print(f"  accuracy before fine-tuning: {percent(accuracy['pruned'])}")
        skipped = (data.skipped if data else 0) + (len(images.skipped) if images else 0)
        if skipped:
            print(f"  skipped: {skipped} image{'s' if skipped > 1 else ''} that cannot be read")
        print(f"saved: {args.out}\npage: {args.out / 'index.html'}\nnext: {shlex.join(check)}")
    return EXIT_CODES[certificate.verdict]


def _assessed(
    model: nn.Module, result: Allocation, data: Data, args: argparse.Namespace
) -> tuple[Allocation, dict[str, float]]:
    """Fine-tune if asked to, and save the result with its quality on the test images; return test accuracies too."""
    from dsa_hw.training.finetune import finetune

    def assessed() -> Allocation:
        return result.assess(
            model, data.val if data.test is None else data.test, metric=data.metric, step=data.step,
            source="validation data" if data.test is None else "test data", calibration=data.train,
        )  # fmt: skip

    result = assessed()
    found = {"dense": result.quality.dense, "pruned": result.quality.value}
    if args.finetune:
        finetune(
            result.model, data.train, args.finetune, loss=data.loss, step=data.step, teacher=model,
            progress=not args.json,
        )  # fmt: skip
        result = assessed()
        found["fine-tuned"] = result.quality.value
    result.save(args.out)
    return result, {name: interval.value for name, interval in found.items() if interval is not None}
