"""The precision int8: pairs of QuantizeLinear and DequantizeLinear in an exported graph, with static scales.

Weights get a scale for each output channel, activations one for each tensor, from the range of its values on
calibration inputs. A runtime replaces the pairs around an operation by its int8 kernel. Which kernel that is depends on
how activations are represented (`Scheme`): the same network can become three times faster or two times slower, so
`profilers.profiling.schemes` measures. Which values the scales have does not matter for the time (docs/guide/int8.md).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
import torch

from dsa_hw.errors import MissingDependencyError, ModelError, ProfileError
from dsa_hw.utils.text import one_line, unknown_name

__all__ = ["PRECISIONS", "SCHEMES", "Int8", "Ranges", "Scheme", "calibrate", "layers_of", "noise_like", "quantise"]

PRECISIONS: Final = r"fp32|fp16|int8(?:-[a-z0-9]+)?(?:-without:[\w.,]+)?"
"""Regular expression of the name of a precision."""
_INT8 = re.compile(r"int8(?:-(?P<scheme>[a-z0-9]+))?(?:-without:(?P<without>[\w.,]+))?", re.ASCII)
_LAYERS: Final = ("Conv", "Gemm", "MatMul")  # operations with weights that become int8

Ranges = Mapping[str, tuple[float, float]]
"""The smallest and the largest value of each activation, by the name of its tensor in the graph."""


@dataclass(frozen=True)
class Scheme:
    """How a graph is quantised; weights are always signed and symmetric, with a scale for each output channel.

    Attributes:
        name: In the name of a precision, e.g. "u8" in "int8-u8".
        signed: Whether activations are int8; uint8 otherwise.
        symmetric: Whether the zero point of activations is 0.
        layers_only: Whether only convolutions and linear layers are quantised; otherwise also what lies between them.
        float_weights: Whether weights and biases are stored in fp32, with a pair of their own, as TensorRT expects.
        tool: What quantises.
    """

    name: str
    signed: bool = False
    symmetric: bool = False
    layers_only: bool = False
    float_weights: bool = False
    tool: str = "static Q/DQ"

    def __str__(self) -> str:
        kind = "int8" if self.signed else "uint8"
        where = "convolutions and linear layers" if self.layers_only else "every operation with an int8 kernel"
        zero = "symmetric" if self.symmetric else "with zero points"
        weights = ", weights stored in fp32" if self.float_weights else ""
        return f"{self.tool}, int8 weights per channel, {kind} activations {zero}, {where}{weights}"


SCHEMES: Final = {
    scheme.name: scheme
    for scheme in (
        Scheme("u8"),
        Scheme("s8", signed=True),
        Scheme("u8layers", layers_only=True),
        Scheme("s8sym", signed=True, symmetric=True, float_weights=True),
        Scheme("s8edge", signed=True, tool="ai-edge-quantizer static_wi8_ai8"),
    )
}
"""The schemes by name. A target says which of them it can run (`Target.schemes`)."""


@dataclass(frozen=True)
class Int8:
    """A precision of the form ``int8``, ``int8-SCHEME`` or ``int8-SCHEME-without:LAYER,LAYER``.

    >>> str(Int8.parse("int8-u8-without:fc,conv1"))
    'int8-u8-without:conv1,fc'

    Attributes:
        scheme: How to quantise; None where measuring must choose first.
        without: Layers that stay in fp32, by the name of their module.
    """

    scheme: Scheme | None = None
    without: tuple[str, ...] = ()

    form: ClassVar[str] = "int8-SCHEME-without:LAYER,LAYER"

    @classmethod
    def parse(cls, precision: str) -> Int8 | None:
        """Return the int8 precision of this name; None where it is another precision.

        Raises:
            ProfileError: The name is not of this form, or there is no such scheme.
        """
        if not precision.startswith("int8"):
            return None
        found = _INT8.fullmatch(precision)
        if found is None:
            raise ProfileError(f"A precision in int8 must have the form {cls.form}; got {precision!r}.")
        if found["scheme"] and found["scheme"] not in SCHEMES:
            raise ProfileError(unknown_name("int8 scheme", found["scheme"], tuple(SCHEMES)))
        without = sorted({name for name in (found["without"] or "").split(",") if name})
        return cls(SCHEMES[found["scheme"]] if found["scheme"] else None, tuple(without))

    def chosen(self, scheme: Scheme) -> Int8:
        """Return the same precision with a scheme."""
        return replace(self, scheme=scheme)

    def __str__(self) -> str:
        scheme = f"-{self.scheme.name}" if self.scheme else ""
        return f"int8{scheme}{'-without:' + ','.join(self.without) if self.without else ''}"


def noise_like(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return inputs to calibrate with where only the time matters: noise in place of constant floating-point values."""
    source = torch.Generator().manual_seed(0)

    def one(x: Any) -> Any:
        if not x.is_floating_point() or bool((x != x.flatten()[:1]).any()):
            return x
        return torch.randn(x.shape, generator=source).to(x)

    return tuple(one(x) for x in inputs)


def calibrate(proto: Any, batches: Iterable[Sequence[Any]]) -> Ranges:
    """Return the range of every floating-point activation of a graph.

    Args:
        proto: The ``onnx.ModelProto``, in fp32.
        batches: Inputs in the order of the graph, with the shapes of the graph.

    Raises:
        ModelError: There is no batch, the graph cannot be run, or a value is not finite.
    """
    import onnx

    ort = _onnxruntime()
    names = _activations(proto)
    inputs = [x.name for x in proto.graph.input]
    watched = onnx.ModelProto()
    watched.CopyFrom(proto)
    del watched.graph.output[:]
    for i, name in enumerate(names):
        for end in ("Min", "Max"):
            node = onnx.helper.make_node(f"Reduce{end}", [name], [f"range::{end}{i}"], keepdims=0)
            watched.graph.node.append(node)
            watched.graph.output.append(onnx.helper.make_tensor_value_info(node.output[0], 1, []))
    options = ort.SessionOptions()
    options.log_severity_level = 3
    low, high = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    try:
        session = ort.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])
        for batch in batches:
            feed = {name: x.detach().cpu().numpy() for name, x in zip(inputs, batch, strict=True)}
            ends = np.asarray(session.run(None, feed), np.float64).reshape(-1, 2)
            low, high = np.fmin(low, ends[:, 0]), np.fmax(high, ends[:, 1])
    except Exception as error:  # ONNX Runtime has a dozen unrelated exception classes
        raise ModelError(f"ONNX Runtime cannot calibrate the network: {one_line(error)}") from error
    if not np.isfinite([low, high]).all():
        raise ModelError("Cannot calibrate int8: there is no calibration input, or an activation is not finite.")
    return {name: (float(a), float(b)) for name, a, b in zip(names, low, high, strict=True)}


def quantise(proto: Any, ranges: Ranges, precision: Int8) -> Any:
    """Return a graph with pairs of QuantizeLinear and DequantizeLinear.

    Args:
        proto: The ``onnx.ModelProto``, in fp32; not changed.
        ranges: The range of every activation, see `calibrate`.
        precision: The scheme, and the layers that stay in fp32.

    Raises:
        ProfileError: A layer that is to stay in fp32 does not exist, or an activation has no range.
    """
    import onnx

    _onnxruntime()
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.calibrate import CalibrationMethod, TensorData, TensorsData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    scheme = precision.scheme
    if scheme is None:
        raise ProfileError("The scheme of int8 is not chosen. Name one, for example int8-u8.")
    copied = onnx.ModelProto()
    copied.CopyFrom(proto)
    for i, node in enumerate(copied.graph.node):
        node.name = node.name or f"node {i}"
    _pool_globally(copied)
    missing = [name for name in _activations(copied) if name not in ranges]
    if missing:
        raise ProfileError(
            f"The ranges do not belong to this graph: there is none for {missing[0]!r}. Calibrate the network again."
        )
    extremes = {name: tuple(np.asarray(x, np.float32) for x in ends) for name, ends in ranges.items()}
    found = TensorsData(
        CalibrationMethod.MinMax, {name: TensorData(lowest=a, highest=b) for name, (a, b) in extremes.items()}
    )
    options = {
        "ActivationSymmetric": scheme.symmetric,
        "AddQDQPairToWeight": scheme.float_weights,
        "QuantizeBias": not scheme.float_weights,
    }
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # about its own internals
    try:
        quantizer = QDQQuantizer(
            copied,
            per_channel=True,
            reduce_range=False,
            weight_qType=QuantType.QInt8,
            activation_qType=QuantType.QInt8 if scheme.signed else QuantType.QUInt8,
            tensors_range=found,
            nodes_to_quantize=[],
            nodes_to_exclude=_excluded(copied, precision.without),
            op_types_to_quantize=_operations(scheme),
            extra_options=options,
        )
        quantizer.quantize_model()
        quantizer.model.topological_sort()
    finally:
        logging.disable(level)
    return quantizer.model.model


def layers_of(proto: Any) -> dict[str, str]:
    """Return the name of each node with weights that becomes int8, by the name of its module.

    The exporter names the tensor of a parameter like the parameter.
    """
    weights = {t.name for t in proto.graph.initializer}
    found = {}
    for node in proto.graph.node:
        if node.op_type in _LAYERS and len(node.input) > 1 and node.input[1] in weights:
            found[node.input[1].removesuffix(".weight")] = node.name
    return found


def _pool_globally(proto: Any) -> None:
    """Replace means over height and width, as torch exports global pooling, by the operation with an int8 kernel."""
    from onnx import helper, numpy_helper

    stored = {t.name: t for t in proto.graph.initializer}
    inferred = _shaped(proto)
    for node in proto.graph.node:
        if node.op_type != "ReduceMean" or len(node.input) < 2 or node.input[1] not in stored:
            continue
        axes = sorted(int(a) % 4 for a in numpy_helper.to_array(stored[node.input[1]]).ravel())
        keeps = next((helper.get_attribute_value(a) for a in node.attribute if a.name == "keepdims"), 1)
        if inferred.get(node.input[0]) == 4 and axes == [2, 3] and keeps:
            node.op_type = "GlobalAveragePool"
            del node.input[1:], node.attribute[:]


def _shaped(proto: Any) -> dict[str, int]:
    """Return the number of axes of each tensor whose shape is known."""
    import onnx

    graph = onnx.shape_inference.infer_shapes(proto).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    return {v.name: len(v.type.tensor_type.shape.dim) for v in values if v.type.tensor_type.HasField("shape")}


def _excluded(proto: Any, without: Sequence[str]) -> list[str]:
    layers = layers_of(proto)
    for name in without:
        if name not in layers:
            raise ProfileError(unknown_name("layer", name, tuple(layers)))
    return [layers[name] for name in without]


def _operations(scheme: Scheme) -> list[str]:
    from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

    if scheme.layers_only:
        return list(_LAYERS)
    # A transposed convolution has no int8 kernel on CPUs.
    return [name for name in dict.fromkeys((*QDQRegistry, *QLinearOpsRegistry)) if name != "ConvTranspose"]


def _activations(proto: Any) -> list[str]:
    """Return the names of the floating-point inputs and results of a graph."""
    import onnx

    inferred = onnx.shape_inference.infer_shapes(proto).graph
    floats = {
        value.name
        for value in (*inferred.input, *inferred.value_info, *inferred.output)
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    }
    stored = {t.name for t in proto.graph.initializer}
    names = (*(x.name for x in proto.graph.input), *(name for node in proto.graph.node for name in node.output))
    return [name for name in dict.fromkeys(names) if name in floats and name not in stored]


def _onnxruntime() -> Any:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # see profilers.targets.onnxruntime
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            "int8 needs the package onnxruntime, which quantises networks. Run: pip install 'dsa-hw[onnx]'"
        ) from error
    return onnxruntime
