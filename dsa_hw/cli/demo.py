"""``dsa-hw demo`` (``make demo``): compare a latency and a FLOPs budget on a small network, from training to report.

Nothing is downloaded: the digits are part of scikit-learn.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dsa_hw
from dsa_hw.cli.compare import comparison_text
from dsa_hw.cli.options import DEFAULT_TARGET, add_command
from dsa_hw.errors import MeasurementError
from dsa_hw.experiments.settings import ExperimentSettings
from dsa_hw.pipeline.options import ProfileOptions
from dsa_hw.utils.text import one_line, percent

if TYPE_CHECKING:
    from torch import nn

    from profilers import MeasuringRules

__all__ = ["add", "demo", "network", "run"]

_EXAMPLES = """Examples:
  dsa-hw demo
  dsa-hw demo --out report/

The report is OUT/index.html. After an interruption the same command
continues. Exit codes: 0 the report is written, 2 invalid input, 4 a
measurement cannot be trusted.
"""
_SETTINGS = ExperimentSettings(train_epochs=8, epochs=2, finetune_epochs=4, reading=3.0, lr=0.1)
_PROFILING = ProfileOptions(samples=24, holdout=6, time_limit=45.0, name="small inverted-residual network")
# Accepted interference, tried in turn, so that the demo ends with a result on any machine. None accepts every run.
_TOLERANCES = (0.05, 0.25, None)
_LAST_TIME_LIMIT = 240.0  # seconds for the profile where every run is accepted


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
        profiling: How the network is profiled; its measuring rules are replaced.
        command: The command line, for the report.

    Raises:
        MeasurementError: Not even accepting every run gives a result.
    """
    begin = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begin:5.0f} s  {text}", flush=True)

    print("dsa-hw demo: a small residual network on digits, FLOPs budget against latency budget\n")
    for number, tolerance in enumerate(_TOLERANCES):
        limit = profiling.time_limit if tolerance else _LAST_TIME_LIMIT
        try:
            table = dsa_hw.compare(
                f"{__name__}:network",
                "digits",
                [dsa_hw.LatencyBudget("50%"), dsa_hw.FlopsBudget("50%")],
                target=target,
                methods=("dsa",),
                settings=settings,
                profiling=replace(profiling, rules=_rules(tolerance), time_limit=limit),
                out=out,
                progress=True,
                listener=say,
                command=command,
            )
            break
        except MeasurementError as error:
            if tolerance is None:
                raise
            say(f"too much interference to measure: {one_line(error, 160)}")
            say(f"continuing with {_accepted(_TOLERANCES[number + 1])}; the report says so")
    print(f"\n{comparison_text(table)}\n\n{table.attrs['headline']}")
    print(f"Measured with {_accepted(tolerance)}: sufficient for a demo, not for publication.")
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
        nn.Conv2d(3, 32, 3, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU6(),
        block(32, 32, 1, 4),
        block(32, 64, 2, 4),
        block(64, 64, 1, 4),
        block(64, 96, 2, 4),
        block(96, 96, 1, 4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, 10),
    )


def _rules(tolerance: float | None) -> MeasuringRules:
    if tolerance is None:
        return replace(dsa_hw.MeasuringRules.allowing(10.0), waiting=math.inf, precision=0.05)
    return dsa_hw.MeasuringRules.allowing(tolerance)


def _accepted(tolerance: float | None) -> str:
    if tolerance is None:
        return "every run accepted, whatever the interference"
    return f"interference of up to {percent(tolerance, 0)} accepted"
