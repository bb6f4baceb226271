"""``dsa-hw export``: write the pruned network of a plan as ONNX."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import dsa_hw
from dsa_hw.cli.options import add_command, add_json, add_model, model_and_inputs, read_weights
from dsa_hw.utils.files import refuse_overwriting

__all__ = ["add", "run"]

_EXAMPLES = """Examples:
  dsa-hw export small/plan.json --model resnet18 --weights small/model.pt \\
      --out model.onnx

--json prints an object with out, bytes, parameters.
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "export",
        run,
        summary="write the pruned network of a plan as ONNX",
        description="Write the pruned network of a plan as one ONNX file.",
        examples=_EXAMPLES,
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="plan.json of dsa-hw allocate")
    add_model(parser, weights="state dict of the pruned network, model.pt (default: random weights)")
    parser.add_argument("--out", type=Path, default=Path("model.onnx"), metavar="ONNX", help="the file to write")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Rebuild the pruned network, export it, and print the path."""
    from dsa_hw.pipeline.result import write_onnx
    from dsa_hw.pipeline.verification import pruned_network

    refuse_overwriting(args.out, args.plan, args.weights)
    plan = dsa_hw.Plan.load(args.plan)
    model, inputs = model_and_inputs(args, plan.inputs[0] if len(plan.inputs) == 1 else None)
    small = pruned_network(model, plan, inputs, read_weights(args.weights) if args.weights else None)
    path = write_onnx(small, inputs, args.out)
    parameters, size = sum(p.numel() for p in small.parameters()), path.stat().st_size
    if not args.weights:
        print("The weights are random (no --weights).", file=sys.stderr)
    if args.json:
        print(json.dumps({"out": str(path), "bytes": size, "parameters": parameters}))
    else:
        print(f"saved: {path}, {parameters / 1e6:.3f} M parameters, {size / 2**20:.2f} MiB")
    return 0
