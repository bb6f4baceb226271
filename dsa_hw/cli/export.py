"""dsa-hw export: the pruned network of a plan as an ONNX file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dsa_hw.cli.inspect import add_model_options
from dsa_hw.cli.options import model_and_inputs, read_weights

_EXAMPLES = """example:
  dsa-hw export small/plan.json --model resnet18 --weights small/model.pt --out model.onnx
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "export",
        help="write the pruned network of a plan as ONNX",
        description="Write the pruned network of a plan as ONNX.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("plan", type=Path, help="plan.json, as dsa-hw allocate wrote it")
    add_model_options(parser)
    parser.add_argument("--weights", type=Path, metavar="PT", help="state dict of the small network (model.pt)")
    parser.add_argument("--out", type=Path, default=Path("model.onnx"), metavar="ONNX", help="(%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Rebuild, export, say where it is."""
    from dsa_hw.channels.plan import Plan
    from dsa_hw.pipeline.result import write_onnx
    from dsa_hw.pipeline.verification import pruned_network
    from dsa_hw.utils.files import refuse_overwriting

    refuse_overwriting(args.out, args.plan, args.weights)
    plan = Plan.load(args.plan)
    model, inputs = model_and_inputs(args, plan.inputs[0] if len(plan.inputs) == 1 else None)
    small = pruned_network(model, plan, inputs, read_weights(args.weights) if args.weights else None)
    path = write_onnx(small, inputs, args.out)
    parameters = sum(p.numel() for p in small.parameters())
    if args.json:
        print(json.dumps({"out": str(path), "bytes": path.stat().st_size, "parameters": parameters}))
        return 0
    print(f"saved: {path}, {parameters / 1e6:.3f} M parameters, {path.stat().st_size / 2**20:.2f} MiB")
    if not args.weights:
        print("note: no --weights, so the weights are those of a new, untrained network", file=sys.stderr)
    return 0
