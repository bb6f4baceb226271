"""Networks from ONNX files: converted by onnx2torch, and compared with ONNX Runtime on the file itself.

onnx2torch knows the operators of opset 17 and earlier. A file of a later opset is first converted to opset 17 by onnx.
An operator that is not known is an error that names it. What is converted wrongly is noticed, because the outputs of
both are compared.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from dsa_hw.errors import MissingDependencyError, ModelError
from dsa_hw.utils.inputs import as_path
from dsa_hw.utils.text import first_line, one_line

__all__ = ["from_onnx", "is_onnx"]

_OPSET: Final = 17
_LARGEST: Final = 2**31 - 1  # bytes of one protobuf message
_MOST_NUMBERS: Final = 2**30  # of an input, as for other networks
_TOLERANCE: Final = 1e-3  # of the largest output; kernels of two runtimes differ by 1e-5


def is_onnx(name: str) -> bool:
    """Tell whether the name of a network is a path of an ONNX file."""
    return name.endswith(".onnx")


def from_onnx(
    path: str | os.PathLike[str], input_shape: Sequence[int] | None = None
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Read a network from an ONNX file.

    Its outputs are those of ONNX Runtime on the file; this is checked. The file is data: external weights must lie in
    its folder, and operators of other domains than ONNX's own are refused.

    Args:
        path: The file.
        input_shape: Shape of the input, where the file leaves more open than the batch size.

    Returns:
        The network in evaluation mode, and a tuple of example inputs; an open batch size is 1.

    Raises:
        MissingDependencyError: onnx, onnx2torch or ONNX Runtime is not installed.
        ModelError: The file cannot be read, an operator is not known, a shape is open, or the outputs differ.
    """
    import dsa_hw.zoo.torchvision_compat  # noqa: F401  (onnx2torch imports torchvision)

    try:
        import onnx
        import onnx2torch
        from onnx import numpy_helper, version_converter
    except ImportError as error:
        raise MissingDependencyError(
            f"ONNX files need the package {error.name}, which is not installed. Run pip install 'dsa-hw[onnx]'."
        ) from error
    path = as_path(path, "path")
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST} bytes")
        graph = onnx.load(path)
        onnx.checker.check_model(graph)
    except Exception as error:  # of the operating system, protobuf or onnx's checker
        raise ModelError(f"Cannot read the ONNX file {one_line(path)} ({first_line(error)}).") from error
    inputs = _example_inputs(graph, input_shape, path)
    wanted = _outputs_of_file(graph, inputs, path)
    _check_operators(graph, path)
    opset = next((entry.version for entry in graph.opset_import if entry.domain in ("", "ai.onnx")), 0)
    try:
        if opset > _OPSET:
            graph = version_converter.convert_version(graph, _OPSET)
        _inline_constants(graph, numpy_helper)
        model = _with_fixed_shapes(onnx2torch.convert(graph)).eval()
        with torch.no_grad():
            found = model(*inputs)
    except Exception as error:  # NotImplementedError for an operator; whatever else a converter raises
        raise ModelError(
            f"onnx2torch cannot convert {one_line(path)}, opset {opset} ({type(error).__name__}: {first_line(error)}). "
            "Export the network from its framework with an opset of 13 to 17, or give its PyTorch code."
        ) from error
    outputs = list(found) if isinstance(found, (tuple, list)) else [found]
    difference = _difference(wanted, outputs)
    if not difference <= _TOLERANCE:
        how = "number or shapes" if math.isinf(difference) else f"{difference:.2g} of the largest one"
        raise ModelError(
            f"The network that onnx2torch made of {one_line(path)} computes something else than the file: its outputs "
            f"differ in {how}; at most {_TOLERANCE:g} is accepted. Give its PyTorch code instead."
        )
    return model, inputs


def _example_inputs(graph: Any, shape: Sequence[int] | None, path: Path) -> tuple[Tensor, ...]:
    """Return noise of the shapes that the file names, and zeros where an input is not floating-point."""
    import onnx

    known = {tensor.name for tensor in graph.graph.initializer}
    given = [value for value in graph.graph.input if value.name not in known]
    if not given:
        raise ModelError(f"{one_line(path)} has no input.")
    if shape is not None and len(given) != 1:
        raise ModelError(f"--input is for networks with one input; {one_line(path)} has {len(given)}.")
    source = torch.Generator().manual_seed(0)
    found: list[Tensor] = []
    for value in given:
        kind = value.type.tensor_type
        sides = [side.dim_value if side.HasField("dim_value") else 0 for side in kind.shape.dim]
        if sides and sides[0] == 0:
            sides[0] = 1  # the batch
        if shape is not None:
            if len(shape) != len(sides) or any(b not in (0, a) for a, b in zip(shape[1:], sides[1:], strict=True)):
                there = "x".join(str(side or "?") for side in sides)
                raise ModelError(f"The input of {one_line(path)} is {there}; got {'x'.join(map(str, shape))}.")
            sides = list(shape)
        if not all(sides):
            there = "x".join(str(side or "?") for side in sides)
            raise ModelError(f"{one_line(path)} leaves the size of input {one_line(value.name, 60)} open ({there}). "
                             "Give it: --input 1x3x224x224.")  # fmt: skip
        if math.prod(sides) > _MOST_NUMBERS:
            raise ModelError(f"An input may have at most {_MOST_NUMBERS:.0e} numbers; got {'x'.join(map(str, sides))}.")
        dtype = torch.from_numpy(np.zeros(1, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))).dtype
        noise = torch.randn(sides, generator=source)
        found.append(noise.to(dtype) if dtype.is_floating_point else torch.zeros(sides, dtype=dtype))
    return tuple(found)


def _outputs_of_file(graph: Any, inputs: tuple[Tensor, ...], path: Path) -> list[Tensor]:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # a thread and files that nobody asked for
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            "ONNX files are compared with ONNX Runtime, which is not installed. Run pip install 'dsa-hw[onnx]'."
        ) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
        feed = {value.name: x.numpy() for value, x in zip(session.get_inputs(), inputs, strict=True)}
        return [torch.from_numpy(np.array(out)) for out in session.run(None, feed)]
    except Exception as error:  # onnxruntime has its own classes
        raise ModelError(f"ONNX Runtime cannot run {one_line(path)} ({first_line(error)}).") from error


def _check_operators(graph: Any, path: Path) -> None:
    """Refuse operators of other domains, and those that onnx2torch does not know."""
    from onnx2torch.node_converters import registry

    known = {description.operation_type for description in registry._CONVERTER_REGISTRY}
    missing = Counter(
        f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
        for node in graph.graph.node
        if node.domain not in ("", "ai.onnx") or node.op_type not in known
    )
    if missing:
        names = ", ".join(f"{one_line(name, 60)} ({count})" for name, count in sorted(missing.items())[:8])
        raise ModelError(
            f"{one_line(path)} has operators that onnx2torch does not know: {names}. Export the network from its "
            "framework with an opset of 13 to 17, or give its PyTorch code."
        )


def _inline_constants(graph: Any, numpy_helper: Any) -> None:
    """Turn nodes that are constants, or copies of some, into initializers, so that layers get them as weights.

    ``allowzero`` of a Reshape, which onnx2torch refuses, has no effect where no side is 0.
    """
    kept = []
    for node in graph.graph.node:
        known = {tensor.name: tensor for tensor in graph.graph.initializer}
        if node.op_type == "Identity" and node.input[0] in known:
            copied = numpy_helper.from_array(numpy_helper.to_array(known[node.input[0]]), node.output[0])
            graph.graph.initializer.append(copied)
            continue
        if node.op_type == "Reshape" and node.input[1] in known and numpy_helper.to_array(known[node.input[1]]).all():
            others = [attribute for attribute in node.attribute if attribute.name != "allowzero"]
            del node.attribute[:]
            node.attribute.extend(others)
        if node.op_type == "Constant" and len(node.attribute) == 1 and node.attribute[0].name == "value":
            tensor = numpy_helper.from_array(numpy_helper.to_array(node.attribute[0].t), node.output[0])
            graph.graph.initializer.append(tensor)
        else:
            kept.append(node)
    del graph.graph.node[:]
    graph.graph.node.extend(kept)


def _with_fixed_shapes(model: Any) -> nn.Module:
    """Write the constant shapes of Reshape nodes into the graph: torch.export cannot trace shapes that are tensors."""
    for node in model.graph.nodes:
        if node.op != "call_module" or type(model.get_submodule(node.target)).__name__ != "OnnxReshape":
            continue
        values, shape = node.args
        if shape.op == "get_attr":
            sides = model.get_buffer(shape.target).tolist()
            if 0 not in sides:  # a 0 keeps the side of the input
                if -1 not in sides:
                    sides[-1] = -1  # in (1, 512) before the last layer, 512 is the channels, which may become fewer
                with model.graph.inserting_before(node):
                    made = model.graph.call_function(torch.reshape, (values, tuple(sides)))
                node.replace_all_uses_with(made)
                model.graph.erase_node(node)
    model.graph.eliminate_dead_code()
    model.recompile()
    return model


def _difference(wanted: Sequence[Tensor], found: Sequence[Any]) -> float:
    """Return the largest difference of an output over its largest value; infinity where shapes differ."""
    if len(wanted) != len(found) or any(a.shape != b.shape for a, b in zip(wanted, found, strict=True)):
        return math.inf
    gaps = [0.0]
    for a, b in zip(wanted, found, strict=True):
        a, b = a.double(), b.detach().double()
        scale = float(a.abs().max()) if a.numel() else 0.0
        gap = float((a - b).abs().max()) if a.numel() else 0.0
        gaps.append(gap / scale if scale > 0 else (0.0 if gap == 0 else math.inf))
    return max(gaps)
