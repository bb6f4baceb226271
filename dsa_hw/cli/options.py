"""Options that several commands share, and the objects that they describe."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dsa_hw
from dsa_hw.cli.run_file import add_run_file
from dsa_hw.errors import InfeasibleBudgetError, MeasurementError, ModelError, ProfileError
from dsa_hw.experiments.settings import ExperimentSettings
from dsa_hw.pipeline.options import ProfileOptions, RefinementOptions
from dsa_hw.pipeline.reading import Verdict
from dsa_hw.utils.arguments import (
    amount,
    confidence,
    duration,
    positive_amount,
    positive_integer,
    share,
    whole_number,
)

if TYPE_CHECKING:
    from torch import nn

    from dsa_hw.zoo.data import Data
    from dsa_hw.zoo.preprocessing import Preprocessing
    from profilers import MeasuringRules

__all__ = [
    "BUDGET_HELP",
    "DEFAULT_TARGET",
    "EXIT_CODES",
    "METHODS",
    "PRETRAINED_HELP",
    "add_command",
    "add_data",
    "add_json",
    "add_measuring",
    "add_model",
    "add_search",
    "add_training",
    "image_preprocessing",
    "load_dense",
    "load_named_data",
    "measuring_rules",
    "model_and_inputs",
    "profile_options",
    "refinement_options",
    "settings_of",
    "step_listener",
    "target_of",
    "warn_of_random_weights",
]

DEFAULT_TARGET = "onnxruntime/cpu"
EXIT_CODES = {
    Verdict.MET: 0,
    Verdict.NOT_MET: InfeasibleBudgetError.exit_code,
    Verdict.INCONCLUSIVE: MeasurementError.exit_code,
}
# Listed here because importing the methods takes seconds; a test compares.
METHODS = ("dsa", "annealing", "cem", "global_gamma", "knapsack", "legr", "morphnet", "netadapt", "ssl", "uniform")
PRETRAINED_HELP = "load the default weights of torchvision, or those of the timm tag or the hub's repository"
BUDGET_HELP = (
    "latency=5ms, latency=50%%, latency.p95=8ms, flops=50%%, params=2M, memory=64MiB, energy=40mJ or "
    "estimated_energy=50%%"
)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of examples, and adds the default of an option to its help."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help or "", action.default
        if default is None or default is False or default is argparse.SUPPRESS or text.endswith(")"):
            return text
        return f"{text} (default: %(default){'g' if isinstance(default, float) else 's'})"


def add_command(
    subparsers: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    description: str,
    examples: str,
    continues: bool = False,
) -> argparse.ArgumentParser:
    """Add a command.

    Args:
        subparsers: What ``add_subparsers`` returned.
        name: Name of the command.
        run: Runs it with the parsed arguments and returns the exit code.
        summary: A line for ``dsa-hw --help``.
        description: What the command does, in sentences.
        examples: Shown below the options, as it is.
        continues: Whether the command, repeated after an interruption, continues from ``--out``.

    Returns:
        The parser of the command, to add options to.
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, 79),
        epilog=examples,
        formatter_class=_HelpFormatter,
    )
    parser.set_defaults(run=run, continues=continues)
    add_run_file(parser)
    return parser


# Adding options -------------------------------------------------------------------------------------------------------


def add_model(
    parser: argparse.ArgumentParser, *, shape: bool = True, weights: str | None = None, pretrained: str | None = None
) -> None:
    """Add ``--model``, ``--classes``, ``--input`` if ``shape``, and ``--weights`` and ``--pretrained`` with help."""
    parser.set_defaults(input=None, pretrained=False)
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="torchvision name, resnet20 (a CIFAR network), timm/NAME, hf-hub:ORG/NAME, or package.module:factory",
    )
    parser.add_argument(
        "--classes", type=positive_integer, metavar="N", help="number of outputs (default: the model's own)"
    )
    if shape:
        parser.add_argument(
            "--input", metavar="SHAPE", help="shape of the input, for example 1x3x224x224 (default: the model's own)"
        )
    if pretrained is not None:
        parser.add_argument("--pretrained", action="store_true", help=pretrained)
    if weights is not None:
        parser.add_argument("--weights", type=Path, metavar="FILE", help=weights)


def add_data(parser: argparse.ArgumentParser, purpose: str = "", required: bool = False) -> None:
    """Add ``--data``, for the given purpose, ``--batch-size`` and ``--workers``."""
    option = parser.add_argument
    forms = "digits, cifar10:FILE.npz, imagefolder:DIR, or package.module:loaders"
    option("--data", required=required, metavar="DATA", help=f"{forms}{purpose}")
    option("--batch-size", type=positive_integer, default=128, metavar="N", help="examples in a batch of --data")
    option("--workers", type=whole_number, default=0, metavar="N", help="processes that read images")


def add_measuring(parser: argparse.ArgumentParser, target: str | None = DEFAULT_TARGET) -> None:
    """Add ``--target`` and ``--require``."""
    text = "where to measure, for example torch/cuda"
    if target is None:
        text += " (default: the target of the plan, if that is this computer)"
    parser.add_argument("--target", default=target, metavar="RUNTIME/DEVICE", help=text)
    parser.add_argument(
        "--require",
        type=share,
        metavar="SHARE",
        help="fail where a 95%% interval is wider than this, for example 2%% (default: accept every interval)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_search(parser: argparse.ArgumentParser, profile: str) -> None:
    """Add what `profile_options` and `refinement_options` read, ``--seed`` and ``--json``.

    Args:
        parser: The parser of the command.
        profile: Help of ``--profile``.
    """
    profiling, refinement = ProfileOptions(), RefinementOptions()
    option = parser.add_argument
    option("--profile", type=Path, metavar="PATH", help=profile)
    option(
        "--samples", type=positive_integer, default=profiling.samples, metavar="N",
        help="configurations to measure and fit the cost model to",
    )  # fmt: skip
    option(
        "--holdout", type=whole_number, default=profiling.holdout, metavar="N",
        help="configurations to measure and test the cost model with",
    )  # fmt: skip
    option(
        "--grid", default=profiling.grid, metavar="N",
        help="widths to use: multiples of N, or auto to find those that the target runs efficiently",
    )  # fmt: skip
    option(
        "--time-limit", type=duration, default="10min", metavar="TIME",
        help="time for measuring the profile, for example 90s",
    )  # fmt: skip
    option(
        "--minimum", type=share, default=f"{100 * refinement.minimum:g}%", metavar="SHARE",
        help="smallest share of its channels that a group keeps",
    )  # fmt: skip
    option(
        "--confidence", type=confidence, default=refinement.confidence, metavar="P",
        help="confidence with which a budget is met; more of it uses less of the budget",
    )  # fmt: skip
    add_measuring(parser)
    option("--precision", metavar="NAME", help="number format on the target: fp32, fp16 or int8 (default: fp32)")
    option(
        "--int8-without", metavar="LAYERS",
        help="layers that stay in fp32 with --precision int8, separated by commas; dsa-hw inspect --int8 ranks them",
    )  # fmt: skip
    option("--seed", type=whole_number, default=0, metavar="N", help="seed of everything random")
    add_json(parser)


def add_training(parser: argparse.ArgumentParser, budgets: str | None = None) -> None:
    """Add ``--budgets`` if its help is given, and what `settings_of` reads."""
    default = ExperimentSettings()
    option = parser.add_argument
    if budgets is not None:
        option("--budgets", nargs="+", required=True, metavar="COST=AMOUNT", help=budgets)
    option(
        "--train-epochs", type=amount, metavar="N",
        help="epochs of the dense network (default: 20, or 0 with weights or without --data)",
    )  # fmt: skip
    option(
        "--epochs", type=amount, default=default.epochs, metavar="N",
        help="epochs that the method may train while it allocates",
    )  # fmt: skip
    option(
        "--finetune-epochs", type=amount, default=default.finetune_epochs, metavar="N",
        help="epochs of fine-tuning each pruned network",
    )  # fmt: skip
    option("--lr", type=positive_amount, default=default.lr, help="peak learning rate of the dense network")
    option(
        "--finetune-lr",
        type=positive_amount,
        default=default.finetune_lr,
        metavar="LR",
        help="peak rate of fine-tuning",
    )
    option("--train-precision", default=default.precision, choices=("fp32", "bf16"), help="number format of training")


# Reading options ------------------------------------------------------------------------------------------------------


def target_of(args: argparse.Namespace) -> str:
    """Return ``--target`` with the precision of ``--precision`` and ``--int8-without``.

    Raises:
        ProfileError: Layers are named without ``--precision int8``.
    """
    precision = args.precision
    if args.int8_without:
        if not (precision or "").startswith("int8"):
            raise ProfileError("--int8-without needs --precision int8.")
        precision = f"{precision}-without:{args.int8_without}"
    return f"{args.target} {precision}" if precision else str(args.target)


def measuring_rules(args: argparse.Namespace) -> MeasuringRules:
    """Return the measuring rules with the precision of ``--require``."""
    return dsa_hw.MeasuringRules(require=args.require)


def profile_options(args: argparse.Namespace) -> ProfileOptions:
    """Return how to profile."""
    return ProfileOptions(
        source=args.profile, samples=args.samples, holdout=args.holdout, grid=args.grid, time_limit=args.time_limit,
        rules=measuring_rules(args), force=getattr(args, "force", False), name=args.model,
    )  # fmt: skip


def refinement_options(args: argparse.Namespace) -> RefinementOptions:
    """Return how keep ratios become a network."""
    return RefinementOptions(minimum=args.minimum, confidence=args.confidence)


def settings_of(args: argparse.Namespace) -> ExperimentSettings:
    """Return how the networks of a comparison or a sweep are trained."""
    trained = bool(args.data) and not args.weights and not args.pretrained
    epochs = args.train_epochs if args.train_epochs is not None else 20.0 if trained else 0.0
    return ExperimentSettings(
        train_epochs=epochs, epochs=args.epochs, finetune_epochs=args.finetune_epochs, lr=args.lr,
        finetune_lr=args.finetune_lr, precision=args.train_precision, seed=args.seed,
    )  # fmt: skip


def model_and_inputs(
    args: argparse.Namespace, shape: tuple[int, ...] | None = None
) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return the model of ``--model`` with inputs of the shape of ``--input``, or else of ``shape``."""
    from dsa_hw.zoo.models import load_model, parse_shape

    return load_model(
        args.model,
        parse_shape(args.input) if args.input else shape,
        pretrained=args.pretrained,
        classes=args.classes,
    )


def load_named_data(args: argparse.Namespace) -> Data | None:
    """Return the data of ``--data``, prepared for the network of ``--model``; None without it."""
    from dsa_hw.zoo.data import load_data

    if not args.data:
        return None
    images = args.data.startswith("imagefolder:")
    return load_data(
        args.data, batch=args.batch_size, seed=args.seed, workers=args.workers,
        preprocessing=image_preprocessing(args) if images else None,
    )  # fmt: skip


def image_preprocessing(args: argparse.Namespace) -> Preprocessing:
    """Return how pictures become inputs of the network of ``--model``."""
    from dsa_hw.zoo.models import parse_shape, preprocessing_of

    return preprocessing_of(args.model, parse_shape(args.input) if args.input else None)


def load_dense(args: argparse.Namespace) -> tuple[nn.Module, tuple[Any, ...], Data | None]:
    """Return the dense network with its weights, its inputs, and the data of ``--data``.

    Random weights depend on ``--seed`` alone, so that a repeated command continues with the same network.
    """
    import torch

    from dsa_hw.utils.modules import load_weights
    from dsa_hw.utils.weights import read_weights

    if args.pretrained and args.weights:
        raise ModelError("Give --pretrained or --weights, not both.")
    data = load_named_data(args)
    torch.manual_seed(args.seed)
    model, inputs = model_and_inputs(args, data.shape if data else None)
    if args.weights:
        load_weights(model, read_weights(args.weights), args.model)
    if data is not None and data.classes is not None:
        _check_outputs(model, inputs, data, args)
    return model, inputs, data


def _check_outputs(model: nn.Module, inputs: tuple[Any, ...], data: Data, args: argparse.Namespace) -> None:
    """Refuse class folders that are not the classes of the network."""
    import torch

    from dsa_hw.training.losses import logits_of
    from dsa_hw.utils.modules import evaluating

    if not args.data.startswith("imagefolder:"):
        return  # numbered classes, which may be fewer than the outputs
    with torch.no_grad(), evaluating(model):
        outputs = logits_of(model(*inputs))
    if isinstance(outputs, torch.Tensor) and outputs.ndim == 2 and outputs.shape[1] != data.classes:
        raise ModelError(
            f"{args.data} has {data.classes} classes, but {args.model} has {outputs.shape[1]} outputs. Use --classes "
            f"{data.classes}, with weights that were trained for these classes."
        )


# Output ---------------------------------------------------------------------------------------------------------------


def warn_of_random_weights(args: argparse.Namespace, trained: bool = False) -> None:
    """Print that the weights are random, unless there are weights or the network is ``trained`` first.

    The factory of a user (``package.module:factory``) may load weights, so nothing is printed for it.
    """
    from dsa_hw.zoo.user_code import is_code

    if args.weights or trained or is_code(args.model) or (args.pretrained and args.classes is None):
        return
    text = (
        "The weights are random (no --pretrained or --weights): any accuracy or agreement with the dense network is "
        "meaningless."
    )
    if args.pretrained:
        text = f"The last layer may be new and random (--classes {args.classes}): its accuracy is meaningless."
    print(text, file=sys.stderr if args.json else sys.stdout, flush=True)


def step_listener(args: argparse.Namespace) -> Callable[[str], None] | None:
    """Return what prints each step to standard error; None with ``--json``."""
    return None if args.json else lambda text: print(text, file=sys.stderr, flush=True)
