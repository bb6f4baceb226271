"""dsa-hw verify: does a plan's certificate still hold, on this machine, today?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dsa_hw.cli.inspect import add_model_options
from dsa_hw.cli.options import EXIT_CODES, add_measuring, measuring_rules, model_and_inputs, read_weights

_EXAMPLES = """examples:
  dsa-hw verify small/plan.json --model resnet18
  dsa-hw verify small/plan.json --model resnet18 --weights small/model.pt --json

Exit codes: 0 it holds, 2 wrong input, 3 it does not hold, 4 inconclusive after the time limit.
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "verify",
        help="measure the network of a plan again: does its certificate still hold?",
        description="Measure the network of a plan again beside the dense one, for every budget of its certificate.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("plan", type=Path, help="plan.json, as dsa-hw allocate wrote it")
    add_model_options(parser)
    parser.add_argument("--weights", type=Path, metavar="PT", help="state dict of the small network (model.pt)")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="per budget (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    add_measuring(parser, target=None)
    parser.add_argument(
        "--counter",
        metavar="MODULE:FUNCTION",
        help="energy meter that returns joules, as profilers.energy takes it (needed where the plan was made with one)",
    )
    parser.add_argument(
        "--technology", metavar="JSON", help="of an energy estimate, where the plan was made with the user's own"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure again and compare."""
    from dsa_hw.channels.plan import Plan
    from dsa_hw.pipeline.certificate import Certificate
    from dsa_hw.pipeline.verification import verify

    plan = Plan.load(args.plan)
    Certificate.from_dict(plan.certificate)  # before anything is loaded
    model, inputs = model_and_inputs(args, plan.inputs[0] if len(plan.inputs) == 1 else None)
    found = verify(
        plan,
        model,
        example_inputs=inputs,
        target=args.target,
        rules=measuring_rules(args),
        weights=read_weights(args.weights) if args.weights else None,
        time_limit=args.time_limit,
        seed=args.seed,
        counter=args.counter,
        technology=args.technology,
    )
    if args.json:
        content = {
            "verdict": str(found.now.verdict),
            "same_device": found.same_device,
            "device": found.device,
            "versions": found.versions,
            "then": found.then.to_dict(),
            "now": found.now.to_dict(),
        }
        print(json.dumps(content, indent=1))
    else:
        print(found)
    return EXIT_CODES[found.now.verdict]
