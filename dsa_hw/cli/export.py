"""``dsa-hw export``: write the pruned network of a plan as ONNX, OpenVINO IR, LiteRT or an archive of torch.export."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dsa_hw
from dsa_hw.cli.loading import load_named_data, model_and_inputs
from dsa_hw.cli.options import add_command, add_data, add_model
from dsa_hw.cli.output import print_json
from dsa_hw.errors import PlanError
from dsa_hw.utils.files import locked, refuse_overwriting, write_bytes

if TYPE_CHECKING:
    from torch import nn

__all__ = ["add", "run"]

_SUFFIXES = {"onnx": ".onnx", "openvino": ".xml", "tflite": ".tflite", "torch": ".pt2"}
_EXAMPLES = """Examples:
  dsa-hw export small/
  dsa-hw export small/ --format torch --out small/model.pt2
  dsa-hw export small/plan.json --model resnet18 --weights tuned.pt \\
      --retrained --out tuned.onnx
  dsa-hw export small/plan.json --model resnet20 --precision int8
  dsa-hw export small/plan.json --model resnet20 --precision int8 \\
      --format openvino --out small/model.xml
  dsa-hw export small/plan.json --model resnet20 --precision int8 \\
      --format tflite --data cifar10

A plan of a network of torchvision, timm or transformers says how to make it;
others need --model.

--precision int8 uses the calibration in the certificate of the plan, or
calibrates again on --data, which retrained weights need.

A LiteRT file needs the environment of dsa-hw setup litert. Its int8 uses the
calibration of a plan with a budget on litert/cpu int8, or --data.

The SHA-256 of a model.onnx, model.int8.onnx or model.int8.tflite beside the plan
is written to the plan.

--json prints an object with out, bytes, parameters.
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "export",
        run,
        summary="write the pruned network of a plan as ONNX, OpenVINO IR, LiteRT or for torch.export",
        description="Write the pruned network of a plan as one ONNX file, as OpenVINO IR (.xml and .bin), or as a "
        "LiteRT file (.tflite), in fp32 or int8; or as an archive of torch.export (.pt2), in fp32.",
        examples=_EXAMPLES,
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="folder of dsa-hw allocate, or its plan.json")
    add_model(
        parser,
        weights="state dict of the pruned network (default: model.safetensors beside the plan)",
        pretrained=None,
        required=False,
    )
    parser.add_argument(
        "--retrained", action="store_true", help="accept weights that were trained further after the plan was saved"
    )
    parser.add_argument(
        "--precision", default="fp32", metavar="NAME",
        help="fp32; int8, in the scheme of the plan; or int8-SCHEME, for example int8-u8 (default: fp32)",
    )  # fmt: skip
    parser.add_argument("--format", choices=tuple(_SUFFIXES), default="onnx", help="kind of file")
    add_data(parser, ", to calibrate int8 on again (default: the calibration in the plan)")
    parser.set_defaults(seed=0)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the file to write (default: model.onnx or model.int8.onnx beside the "
        "plan; .xml for OpenVINO, .tflite for LiteRT, .pt2 for torch)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Rebuild the pruned network, export it, and print the path."""
    from dsa_hw.pipeline.result import INT8_ONNX, INT8_TFLITE, ONNX, check_files, file_digest
    from dsa_hw.pipeline.sharing import dense_network
    from dsa_hw.pipeline.verification import plan_inputs, pruned_network, weights_beside
    from dsa_hw.utils.modules import check_finite_outputs, check_finite_weights

    place = args.plan / "plan.json" if args.plan.is_dir() else args.plan
    folder = place.parent
    is_int8 = args.precision.startswith("int8")
    if not is_int8 and args.precision != "fp32":
        raise PlanError(f"--precision must be fp32, int8 or int8-SCHEME; got {args.precision!r}.")
    if is_int8 and args.format == "torch":
        raise PlanError(f"--format torch writes fp32. Use --format onnx, openvino or tflite for {args.precision}.")
    name = (INT8_TFLITE if args.format == "tflite" else INT8_ONNX) if is_int8 else ONNX
    out = args.out or (folder / name).with_suffix(_SUFFIXES[args.format])
    plan = dsa_hw.Plan.load(place)
    # The old file is replaced, whatever became of it.
    check_files(replace(plan, files={file: sha for file, sha in plan.files.items() if file != name}), folder)
    weights = args.weights or weights_beside(plan, folder)
    refuse_overwriting(out, place, weights)
    given: tuple[Any, ...] | None = None
    if args.model is None:
        model = dense_network(plan)
    else:
        model, given = model_and_inputs(args, plan.inputs[0] if len(plan.inputs) == 1 else None)
    inputs = plan_inputs(plan, model, given)
    small = pruned_network(model, plan, inputs, weights)
    is_saved = weights is not None and plan.network is not None and not args.retrained
    if is_saved:
        plan.check_network(small, inputs, str(weights))
    check_finite_weights(small, "the pruned network")
    check_finite_outputs(small, inputs, "the pruned network")
    content = _int8(args, plan, small, inputs, is_saved) if is_int8 else _fp32(args.format, small, inputs)
    if args.format == "openvino":
        from profilers.targets.openvino import write_ir

        size = write_ir(content, out)
    else:
        write_bytes(out, content)
        size = len(content)
        if out.resolve() == (folder / name).resolve():
            _record(place, name, file_digest(out) if is_saved and not args.data else None)
    parameters = sum(p.numel() for p in small.parameters())
    if weights is None:
        print("The weights are random (no --weights).", file=sys.stderr)
    if args.json:
        print_json({"out": str(out), "bytes": size, "parameters": parameters})
    else:
        print(f"saved: {out}, {parameters / 1e6:.3f} M parameters, {size / 2**20:.2f} MiB")
    return 0


def _fp32(form: str, small: nn.Module, inputs: tuple[Any, ...]) -> bytes:
    if form == "tflite":
        from profilers.litert.convert import to_bytes

        return to_bytes(small, inputs)
    from dsa_hw.pipeline.result import archive_bytes, onnx_bytes

    return archive_bytes(small, inputs) if form == "torch" else onnx_bytes(small, inputs)


def _int8(
    args: argparse.Namespace, plan: dsa_hw.Plan, small: nn.Module, inputs: tuple[Any, ...], is_saved: bool
) -> bytes:
    """Return the quantised network, calibrated as in the plan or on ``--data``."""
    from dsa_hw.pipeline.quantised import calibration_inputs, quantised_for
    from profilers.networks.quantised import quantise_network
    from profilers.targets import resolve

    calibrations = dsa_hw.Certificate.from_dict(plan.certificate).int8
    precision, runtime = args.precision, {"openvino": "openvino", "tflite": "litert"}.get(args.format, "onnxruntime")
    fitting = [c for c in calibrations if c.target.startswith("litert/") == (runtime == "litert")]
    if precision == "int8" and fitting:
        precision = fitting[0].precision
    target = resolve(f"{runtime}/cpu", precision=precision)
    if args.data:
        data = load_named_data(args)
        found = calibration_inputs(small, inputs, [("training data", data.train if data else None)], 0)
        return quantise_network(small, inputs, target, batches=[found.inputs]).content
    if not is_saved:
        raise PlanError("The calibration in the plan is of the weights that it was saved with. Give --data.")
    return quantised_for(small, inputs, target, calibrations).content


def _record(path: Path, name: str, digest: str | None) -> None:
    """Write the hash of a file to the plan; None removes it, for a network that is not the plan's."""
    with locked(path, PlanError):
        plan = dsa_hw.Plan.load(path)
        files = {file: sha for file, sha in plan.files.items() if file != name}
        if digest is not None:
            files[name] = digest
        if files != plan.files:
            replace(plan, files=files).save(path)
