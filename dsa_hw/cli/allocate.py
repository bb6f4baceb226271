"""``dsa-hw allocate``: prune a network to a budget, measured and certified."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dsa_hw
from dsa_hw.cli.budget_args import parse_budgets
from dsa_hw.cli.loading import image_preprocessing, load_dense, search_arguments
from dsa_hw.cli.options import (
    BUDGET_HELP,
    EXIT_CODES,
    add_command,
    add_data,
    add_method,
    add_model,
    add_out,
    add_search,
)  # fmt: skip
from dsa_hw.cli.output import (
    print_json,
    print_text,
    random_weights_warning,
    shows_progress,
    verify_command,
    warn_of_random_weights,
)  # fmt: skip
from dsa_hw.errors import ModelError
from dsa_hw.utils.arguments import amount
from dsa_hw.utils.files import refuse_overwriting

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
  dsa-hw allocate --model network.onnx --images photos/ --budget latency=5ms

OUT gets index.html (the result as a page), README.md (a model card), plan.json
(with the certificate), model.safetensors (weights), widths.csv, cost_model.json
and the measurements; with --precision int8 also model.int8.onnx, and for an
ONNX file model.onnx. After an interruption the same command continues. Exit
codes: 0 every budget is met, 2 invalid input, 3 a budget cannot be met or is
not met, 4 the measurement is less precise than --require, or inconclusive.

--json prints an object with model, certificate, widths, accuracy, out, page.
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
    add_model(parser, weights="state dict of the dense network (default: random weights)")
    option = parser.add_argument
    option(
        "--budget", action="append", required=True, metavar="COST=AMOUNT", help=f"{BUDGET_HELP}; may be repeated"
    )  # fmt: skip
    add_data(parser, "; keep ratios and weights are learned from it (default: synthetic inputs)")
    option("--images", type=Path, metavar="DIR", help="folder of images without labels, to refit the weights with")
    add_method(parser)
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
    add_out(parser, "allocation")
    add_search(parser)


def run(args: argparse.Namespace) -> int:
    """Allocate, save and print the certificate."""
    from dsa_hw.channels import find_groups
    from dsa_hw.experiments.report import flops_share, write_allocation
    from dsa_hw.zoo.onnx_networks import is_onnx

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
        method=args.method,
        recovery=args.recovery,
        options={} if args.epochs is None else {"epochs": args.epochs},
        seed=args.seed,
        **search_arguments(args),
    )
    accuracy: dict[str, float] = {}
    before = ""
    if data:
        result, accuracy, before = _assessed(model, result, data, args)
    onnx = args.out / "model.onnx" if is_onnx(args.model) else None
    if onnx is not None:  # what came as ONNX is wanted as ONNX
        result.save(args.out, onnx=True)
    certificate = result.certificate
    check = verify_command(args)
    warning = random_weights_warning(args)
    write_allocation(
        result,
        args.out / "index.html",
        model=args.model,
        command=check,
        flops=flops_share(find_groups(model, result.inputs), result.widths),
        warnings=[warning] if warning else [],
    )
    if args.json:
        content = {
            "model": args.model,
            "certificate": certificate.to_dict(),
            "widths": {str(name): int(width) for name, width in result.widths.items()},
            "accuracy": accuracy,
            "out": str(args.out),
            "page": str(args.out / "index.html"),
        }
        print_json(content)
    else:
        print_text(result)
        if before:
            print(f"  before fine-tuning: {before}")
        skipped = (data.skipped if data else 0) + (len(images.skipped) if images else 0)
        if skipped:
            print(f"  skipped: {skipped} image{'s' if skipped > 1 else ''} that cannot be read")
        if onnx is not None:
            print(f"onnx: {onnx}")
        print(f"saved: {args.out}\npage: {args.out / 'index.html'}\nnext: {check}")
    return EXIT_CODES[certificate.verdict]


def _assessed(
    model: nn.Module, result: Allocation, data: Data, args: argparse.Namespace
) -> tuple[Allocation, dict[str, float], str]:
    """Fine-tune if asked to, and save the result with its quality on the test images.

    Returns:
        The result, its test accuracies or scores, and that before fine-tuning as text.
    """
    from dsa_hw.training.finetune import finetune

    def assessed() -> Allocation:
        return result.assess(
            model, data.val if data.test is None else data.test, metric=data.metric, step=data.step,
            source="validation data" if data.test is None else "test data", calibration=data.train,
        )  # fmt: skip

    result = assessed()
    found, before = {"dense": result.quality.dense, "pruned": result.quality.value}, ""
    if args.finetune:
        before = result.quality.brief
        finetune(
            result.model, data.train, args.finetune, loss=data.loss, step=data.step, teacher=model,
            progress=shows_progress(args),
        )  # fmt: skip
        result = assessed()
        found["fine-tuned"] = result.quality.value
    result.save(args.out)
    return result, {name: interval.value for name, interval in found.items() if interval is not None}, before
