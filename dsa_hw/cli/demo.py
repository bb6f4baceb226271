"""``dsa-hw demo`` (``make demo``): compare a latency and a FLOPs budget on a small network, from training to report.

Nothing is downloaded: the digits are part of scikit-learn.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dsa_hw
from dsa_hw.cli.compare import comparison_data, comparison_table
from dsa_hw.cli.options import DEFAULT_TARGET, add_command, add_out
from dsa_hw.cli.output import print_json, print_table, shows_progress
from dsa_hw.experiments.settings import ExperimentSettings
from dsa_hw.pipeline.options import ProfileOptions

if TYPE_CHECKING:
    from torch import nn

__all__ = ["add", "demo", "network", "run"]

_EXAMPLES = """Examples:
  dsa-hw demo
  dsa-hw demo --out report/

The report is OUT/index.html. After an interruption the same command
continues. Exit codes: 0 the report is written, 2 invalid input.

--json prints an object with networks, widths, headline, report.
"""
_SETTINGS = ExperimentSettings(train_epochs=4, epochs=1, finetune_epochs=2, reading=3.0, lr=0.1)
_PROFILING = ProfileOptions(samples=24, holdout=6, time_limit=45.0, name="small inverted-residual network")


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "demo",
        run,
        summary="train, profile, prune and compare a small network, in a few minutes",
        description="Train a small residual network on digits, profile it on this computer, prune it to 50% of its "
        "latency and to 50% of its FLOPs, and write a report. Nothing is downloaded.",
        examples=_EXAMPLES,
        continues=True,
    )
    add_out(parser, "report", "the report")


def run(args: argparse.Namespace) -> int:
    """Run the demo."""
    found = demo(args.out, command=args.typed, as_json=args.json, progress=shows_progress(args))
    if args.json:
        print_json(found)
    return 0


def demo(
    out: Path,
    *,
    target: str = DEFAULT_TARGET,
    settings: ExperimentSettings = _SETTINGS,
    profiling: ProfileOptions = _PROFILING,
    command: str = "dsa-hw demo",
    as_json: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Compare a latency and a FLOPs budget, and print what is done and what was found.

    Args:
        out: Folder of the report.
        target: Where latency is measured.
        settings: How the networks are trained and measured.
        profiling: How the network is profiled.
        command: The command line, for the report.
        as_json: Whether to print nothing.
        progress: Whether to print what is done.

    Returns:
        What was found, as plain data.
    """
    begin = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begin:5.0f} s  {text}", flush=True)

    if progress:
        print("dsa-hw demo: a small residual network on digits, FLOPs budget against latency budget\n")
    table = dsa_hw.compare(
        f"{__name__}:network",
        "digits",
        [dsa_hw.LatencyBudget("50%"), dsa_hw.FlopsBudget("50%")],
        target=target,
        methods=("dsa",),
        equal=False,  # a minute less; the headline does not need it
        settings=settings,
        profiling=profiling,
        out=out,
        progress=progress,
        listener=say if progress else None,
        command=command,
    )
    if as_json:
        return comparison_data(table)
    print()
    print_table(comparison_table(table))
    print(f"\n{table.attrs['headline']}")
    print(f"\nreport: {Path(table.attrs['report']).resolve()} ({time.perf_counter() - begin:.0f} s)")
    print(
        "next: dsa-hw compare --model resnet20 --data digits --budgets flops=50% latency=50% params=50% --out report20/"
    )
    return comparison_data(table)


def network() -> nn.Module:
    """Return a network of inverted residual blocks, as in MobileNetV2, that trains within a minute.

    Its 1 x 1 and depthwise convolutions take different times per FLOP, as in networks for devices. In a network of
    3 x 3 convolutions latency is nearly proportional to FLOPs, and both budgets give similar widths.
    """
    from torch import nn

    from dsa_hw.zoo.torchvision_compat import torchvision

    block = torchvision.models.mobilenetv2.InvertedResidual
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, 2, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU6(),
        block(64, 64, 1, 6),
        block(64, 96, 2, 6),
        block(96, 96, 1, 6),
        block(96, 160, 2, 6),
        block(160, 160, 1, 6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(160, 10),
    )
