"""``dsa-hw verify``: does the certificate of a plan still hold, on this machine, today?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import dsa_hw
from dsa_hw.cli.loading import load_named_data, measuring_rules, model_and_inputs
from dsa_hw.cli.options import EXIT_CODES, add_command, add_data, add_measuring, add_model
from dsa_hw.cli.output import print_json, print_text
from dsa_hw.utils.arguments import duration

__all__ = ["add", "run"]

_EXAMPLES = """Examples:
  dsa-hw verify small/plan.json --model resnet18
  dsa-hw verify small/plan.json --model resnet18 --json
  dsa-hw verify plan.json --model resnet18 --target ssh://pi@board
  dsa-hw verify small/plan.json --model resnet20 --data digits \\
      --dense-weights resnet20.pt

The files beside the plan are compared with the hashes in it, the outputs of
the network with those that the plan was saved with. A plan does not choose
code, a host or a path: a target that is not this computer, an energy counter
and a technology file must be given here. With --data the quality is measured
again, on the test images.

Exit codes: 0 the certificate still holds, 2 invalid input, 3 it does not
hold, 4 inconclusive when the time is used up.

--json prints an object with verdict, same_device, device, versions, weights,
measured_quality, then, now.
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "verify",
        run,
        summary="measure the network of a plan again, to check its certificate",
        description="Measure the network of a plan again together with the dense one, for every budget of its "
        "certificate. Measuring ends as soon as the verdict is clear.",
        examples=_EXAMPLES,
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="plan.json of dsa-hw allocate")
    add_model(
        parser,
        weights="state dict of the pruned network (default: model.safetensors beside the plan)",
        pretrained="the dense network has pretrained weights, which --data needs",
    )
    add_data(parser, ", to measure the quality on again (default: only the budgets)")
    parser.add_argument(
        "--dense-weights", type=Path, metavar="FILE", help="state dict of the dense network, which --data needs"
    )
    parser.add_argument(
        "--time-limit", type=duration, default="60s", metavar="TIME", help="time for each budget, for example 2min"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the order of runs")
    add_measuring(parser, target=None)
    parser.add_argument(
        "--counter",
        metavar="MODULE:FUNCTION",
        help="your own energy meter, which returns joules; required if the plan was made with one",
    )
    parser.add_argument(
        "--technology", metavar="JSON", help="your own technology file of an energy estimate, if the plan needs one"
    )


def run(args: argparse.Namespace) -> int:
    """Measure again, and print the certificate then and now."""
    plan = dsa_hw.Plan.load(args.plan)
    dsa_hw.Certificate.from_dict(plan.certificate)  # a damaged one is refused before the model is loaded
    model, inputs = model_and_inputs(args, plan.inputs[0] if len(plan.inputs) == 1 else None, args.dense_weights)
    data = load_named_data(args)
    found = dsa_hw.verify(
        args.plan,
        model,
        example_inputs=inputs,
        target=args.target,
        rules=measuring_rules(args),
        weights=args.weights,
        data=None if data is None else data.val if data.test is None else data.test,
        metric=data.metric if data else None,
        step=data.step if data else None,
        time_limit=args.time_limit,
        seed=args.seed,
        counter=args.counter,
        technology=args.technology,
    )
    if args.json:
        content = {
            "verdict": str(found.verdict),
            "same_device": found.same_device,
            "device": found.device,
            "versions": found.versions,
            "weights": found.weights,
            "measured_quality": found.measured_quality,
            "then": found.then.to_dict(),
            "now": found.now.to_dict(),
        }
        print_json(content)
    else:
        print_text(found)
    return EXIT_CODES[found.verdict]
