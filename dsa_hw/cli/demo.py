"""``make demo``: train a small residual network on digits, profile it here, compare budgets, write a report.

Nothing is downloaded: the digits come with scikit-learn. Interrupted, the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from profilers import MeasuringRules

__all__ = ["main", "network"]

# What is tried in turn: the disturbance that is allowed. A demo gives an answer on any machine, and says how good.
_ALLOWED = (0.05, 0.25)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0, or the exit code of what went wrong."""
    from dsa_hw.errors import DsaError

    parser = argparse.ArgumentParser(prog="python -m dsa_hw.cli.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder of the report (%(default)s)")
    args = parser.parse_args(arguments)
    try:
        return _demo(args.out)
    except DsaError as error:
        print(f"demo: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"\ndemo: interrupted; make demo continues with what is in {args.out}", file=sys.stderr)
        return 130


def network() -> nn.Module:
    """A residual network that is trained while one waits: inverted residual blocks, as MobileNetV2 is made of.

    Its 1 x 1 and depthwise convolutions do unlike work per FLOP, as in the networks that are shipped to devices. In a
    network of nothing but 3 x 3 convolutions time follows FLOPs, and both budgets ask for much the same.
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


def _demo(out: Path) -> int:
    from budgets import FlopsBudget, LatencyBudget
    from dsa_hw.cli.compare import text_of
    from dsa_hw.errors import MeasurementError
    from dsa_hw.experiments.compare import compare
    from dsa_hw.experiments.settings import ExperimentSettings
    from dsa_hw.pipeline.options import ProfileOptions
    from profilers import MeasuringRules

    begin = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begin:5.0f} s  {text}", flush=True)

    # The last resort accepts every run: then only the order of magnitude counts, and the page says so.
    everything = replace(MeasuringRules.allowing(10.0), waiting=math.inf, precision=0.05)
    choices = [*map(MeasuringRules.allowing, _ALLOWED), everything]
    settings = ExperimentSettings(train_epochs=8, epochs=2, finetune_epochs=4, reading=3.0, lr=0.1)
    profiling = ProfileOptions(samples=24, holdout=6, time_limit=45.0, name="small inverted-residual network")
    print("dsa_hw demo: a small residual network on digits, FLOPs budgets against latency budgets\n")
    for number, rules in enumerate(choices):
        try:
            table = compare(
                "dsa_hw.cli.demo:network",
                "digits",
                [LatencyBudget("50%"), FlopsBudget("50%")],
                methods=("dsa",),
                settings=settings,
                profiling=replace(
                    profiling, rules=rules, time_limit=profiling.time_limit if number < len(_ALLOWED) else 240.0
                ),
                out=out,
                progress=True,
                listener=say,
                command=f"python -m dsa_hw.cli.demo --out {out}",
            )
            break
        except MeasurementError as error:
            if number == len(choices) - 1:
                raise
            say(f"this machine is too busy to measure well: {' '.join(str(error).split())[:160]} ...")
            say(f"going on with {_allowed(choices[number + 1])}; the report says so")
    print(f"\n{text_of(table)}\n\n{table.attrs['headline']}")
    if rules.worst > MeasuringRules().worst:
        print(f"(measured with {_allowed(rules)}: good for a demo, not to quote)")
    print(f"\nreport: {Path(table.attrs['report']).resolve()}  ({time.perf_counter() - begin:.0f} s)")
    print(
        "next: dsa-hw compare --model resnet20 --data digits --budgets flops=50% latency=50% params=50% --out report20/"
    )
    return 0


def _allowed(rules: MeasuringRules) -> str:
    if rules.worst >= 1:
        return "every run accepted, however disturbed"
    return f"disturbances of up to {100 * rules.worst:g} % allowed"


if __name__ == "__main__":
    sys.exit(main())
