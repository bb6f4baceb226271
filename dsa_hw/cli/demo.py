"""``dsa-hw demo`` (``make demo``): compare a latency and a FLOPs budget on a small network, from training to report.

Nothing is downloaded: the digits are part of scikit-learn.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dsa_hw
from dsa_hw.cli.compare import comparison_text
from dsa_hw.cli.options import DEFAULT_TARGET, add_command
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
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="folder of the report")


def run(args: argparse.Namespace) -> int:
    """Run the demo."""
    demo(args.out, command=args.typed)
    return 0


def demo(
    out: Path,
    *,
    target: str = DEFAULT_TARGET,
    settings: ExperimentSettings = _SETTINGS,
    profiling: ProfileOptions = _PROFILING,
    command: str = "dsa-hw demo",
) -> None:
    """Compare a latency and a FLOPs budget, and print what is done and what was found.

    Args:
        out: Folder of the report.
        target: Where latency is measured.
        settings: How the networks are trained and measured.
        profiling: How the network is profiled.
        command: The command line, for the report.
    """
    begin = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begin:5.0f} s  {text}", flush=True)

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
        progress=True,
        listener=say,
        command=command,
    )
    print(f"\n{comparison_text(table)}\n\n{table.attrs['headline']}")
    print(f"\nreport: {Path(table.attrs['report']).resolve()} ({time.perf_counter() - begin:.0f} s)")
    print(
        "next: dsa-hw compare --model resnet20 --data digits --budgets flops=50% latency=50% params=50% --out report20/"
    )


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
