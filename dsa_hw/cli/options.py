"""Options that several commands share, and the objects that they describe."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsa_hw.cli.run_file import add_run_file
from dsa_hw.errors import InfeasibleBudgetError, MeasurementError
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

__all__ = [
    "BUDGET_HELP",
    "DEFAULT_TARGET",
    "EXIT_CODES",
    "METHODS",
    "add_command",
    "add_data",
    "add_measuring",
    "add_method",
    "add_model",
    "add_out",
    "add_search",
    "add_training",
]

DEFAULT_TARGET = "onnxruntime/cpu"
EXIT_CODES = {
    Verdict.MET: 0,
    Verdict.NOT_MET: InfeasibleBudgetError.exit_code,
    Verdict.INCONCLUSIVE: MeasurementError.exit_code,
}
# Listed here because importing the methods takes seconds; a test compares.
METHODS = (
    "dsa", "annealing", "cem", "dmcp", "global_gamma", "knapsack", "legr", "morphnet", "netadapt", "ssl", "uniform",
)  # fmt: skip
_PRETRAINED_HELP = "load the default weights of torchvision, or those of the timm tag or the hub's repository"
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
    output: bool = True,
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
        output: Whether to add ``--json`` and ``--quiet``.

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
    if output:
        parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        parser.add_argument("--quiet", action="store_true", help="show no progress and no warnings")
    return parser


def add_model(
    parser: argparse.ArgumentParser,
    *,
    shape: bool = True,
    weights: str | None = None,
    pretrained: str | None = _PRETRAINED_HELP,
    required: bool = True,
) -> None:
    """Add ``--model``, ``--classes``, ``--input`` if ``shape``, and ``--weights`` and ``--pretrained`` with help."""
    parser.set_defaults(input=None, pretrained=False)
    parser.add_argument(
        "--model",
        required=required,
        metavar="NAME",
        help="torchvision name, resnet20 (a CIFAR network), timm/NAME, hf-hub:ORG/NAME, FILE.onnx, or "
        f"package.module:factory{'' if required else ' (default: what the plan says, if it does)'}",
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


def add_method(parser: argparse.ArgumentParser) -> None:
    """Add ``--method``."""
    parser.add_argument(
        "--method", default="dsa", metavar="NAME", help=f"method that finds keep ratios: {', '.join(METHODS)}"
    )


def add_out(parser: argparse.ArgumentParser, default: str, what: str = "the results") -> None:
    """Add ``--out``, the folder of ``what``."""
    parser.add_argument("--out", type=Path, default=Path(default), metavar="DIR", help=f"folder of {what}")


def add_search(parser: argparse.ArgumentParser, *, models: bool = True) -> None:
    """Add what `search_arguments` reads, and ``--seed``; ``models``: whether ``--profile`` may be a cost model."""
    profiling, refinement = ProfileOptions(), RefinementOptions()
    option = parser.add_argument
    kinds = "profile store (.sqlite) or fitted cost model (.json)" if models else "profile store (.sqlite)"
    option("--profile", type=Path, metavar="PATH", help=f"{kinds} to use instead of measuring")
    if models:
        option("--force", action="store_true", help="use a cost model of another network, target or runtime version")
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
