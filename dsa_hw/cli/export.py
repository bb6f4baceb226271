"""``dsa-hw export``: write the pruned network of a plan as ONNX."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import dsa_hw
from dsa_hw.cli.options import add_command, add_json, add_model, model_and_inputs
from dsa_hw.errors import PlanError
from dsa_hw.utils.files import locked, refuse_overwriting

__all__ = ["add", "run"]

_EXAMPLES = """Examples:
  dsa-hw export small/plan.json --model resnet18
  dsa-hw export small/plan.json --model resnet18 --weights tuned.pt \\
      --retrained --out tuned.onnx

The SHA-256 of a model.onnx beside the plan is written to the plan.

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
    add_model(parser, weights="state dict of the pruned network (default: model.safetensors beside the plan)")
    parser.add_argument(
        "--retrained", action="store_true", help="accept weights that were trained further after the plan was saved"
    )
    parser.add_argument(
        "--out", type=Path, metavar="ONNX", help="the file to write (default: model.onnx beside the plan)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Rebuild the pruned network, export it, and print the path."""
    from dsa_hw.pipeline.result import ONNX, check_files, file_digest, write_onnx
    from dsa_hw.pipeline.verification import plan_inputs, pruned_network, weights_beside
    from dsa_hw.utils.modules import check_finite_outputs, check_finite_weights

    folder = args.plan.parent
    out = args.out or folder / ONNX
    plan = dsa_hw.Plan.load(args.plan)
    # The old model.onnx is replaced, whatever became of it.
    check_files(replace(plan, files={name: sha for name, sha in plan.files.items() if name != ONNX}), folder)
    weights = args.weights or weights_beside(plan, folder)
    refuse_overwriting(out, args.plan, weights)
    model, inputs = model_and_inputs(args, plan.inputs[0] if len(plan.inputs) == 1 else None)
    inputs = plan_inputs(plan, model, inputs)
    small = pruned_network(model, plan, inputs, weights)
    is_saved = weights is not None and plan.network is not None and not args.retrained
    if is_saved:
        plan.check_network(small, inputs, str(weights))
    check_finite_weights(small, "the pruned network")
    check_finite_outputs(small, inputs, "the pruned network")
    path = write_onnx(small, inputs, out)
    if path.resolve() == (folder / ONNX).resolve():
        _record(args.plan, file_digest(path) if is_saved else None)
    parameters, size = sum(p.numel() for p in small.parameters()), path.stat().st_size
    if weights is None:
        print("The weights are random (no --weights).", file=sys.stderr)
    if args.json:
        print(json.dumps({"out": str(path), "bytes": size, "parameters": parameters}))
    else:
        print(f"saved: {path}, {parameters / 1e6:.3f} M parameters, {size / 2**20:.2f} MiB")
    return 0


def _record(path: Path, digest: str | None) -> None:
    """Write the hash of model.onnx to the plan; None removes it, for a network that is not the plan's."""
    from dsa_hw.pipeline.result import ONNX

    with locked(path, PlanError):
        plan = dsa_hw.Plan.load(path)
        files = {name: sha for name, sha in plan.files.items() if name != ONNX}
        if digest is not None:
            files[ONNX] = digest
        if files != plan.files:
            replace(plan, files=files).save(path)
