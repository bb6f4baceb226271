"""Make configurations by narrowing the weights of an exported graph.

For a configuration, ``groups.slices`` gives the kept indices of every parameter. One pass over the graph then finds,
for every tensor, which indices are kept on which axis. Numbers that the exporter wrote into the graph as constants
(shapes of reshapes, sizes of splits, groups of depthwise convolutions) follow from that. An operation without a rule
is an error that names it; the outputs are checked against the shrunk network (`ConfigurationBuilder.check`).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from dsa_hw.utils.arrays import Ints
from profilers.litert.worker.masks import NarrowedAxes
from profilers.networks.onnx_export import export
from profilers.networks.onnx_narrow.rules import visit
from profilers.networks.onnx_narrow.walk import OnnxWalk
from profilers.networks.quantisation import Int8, calibrate, noise_like, quantise

if TYPE_CHECKING:
    from dsa_hw.channels import ChannelGroups

__all__ = ["OnnxTemplate"]

_PAIR = ("QuantizeLinear", "DequantizeLinear")
_QUANTISED = "_quantized"  # what onnxruntime.quantization adds to the name of a tensor that it has quantised


class OnnxTemplate:
    """A network exported once, from which any configuration can be made.

    Attributes:
        arrays: The tensors stored in the graph, by name.
        shapes: Dense shapes of all tensors, by name.
        sources: For a stored tensor, the parameter of the network that it holds, and the parameter's axis for each of
            its axes (-1 for an added axis of length 1).
        plain: The same network before it was quantised; itself where it is not.
    """

    def __init__(
        self, model: nn.Module, groups: ChannelGroups, inputs: tuple[Any, ...], int8: Int8 | None = None
    ) -> None:
        """Export ``model``, and quantise it where ``int8`` is given: scales are narrowed like the weights."""
        proto = export(model, inputs)
        state = {k: v.detach().cpu().numpy() for k, v in model.state_dict(keep_vars=True).items()}
        self.groups = groups
        self._read(proto)
        self.sources = _sources(self.arrays, state)
        self.plain = self
        if int8 is not None:
            self.plain = copy.copy(self)
            proto = quantise(proto, calibrate(proto, [noise_like(inputs)]), int8)
            self._read(proto)
            self.sources = {**self.sources, **_quantised_sources(proto, self.sources)}

    def _read(self, proto: Any) -> None:
        import onnx
        from onnx import numpy_helper

        self._tensors = {t.name: t for t in proto.graph.initializer}
        self.arrays = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
        self.shapes = {name: tuple(a.shape) for name, a in self.arrays.items()}
        self.shapes |= _activation_shapes(proto)
        self._skeleton = onnx.ModelProto()
        self._skeleton.CopyFrom(_without_weights(proto))

    def make(self, kept: Sequence[Ints]) -> bytes:
        """Return the ONNX file of the configuration that keeps ``kept``.

        ``kept`` has K sorted index arrays.
        """
        from onnx import ModelProto, numpy_helper

        model = ModelProto()
        model.CopyFrom(self._skeleton)
        walk = OnnxWalk(self, kept)
        for node in model.graph.node:
            visit(walk, node)
        for name, tensor in self._tensors.items():
            axes = walk.of(name)
            if axes:
                array = _take(self.arrays[name], axes)
                model.graph.initializer.append(numpy_helper.from_array(array, name))
            else:
                model.graph.initializer.append(tensor)
        for name, array in walk.constants.items():
            model.graph.initializer.append(numpy_helper.from_array(array, name))
        return bytes(model.SerializeToString())


def _activation_shapes(proto: Any) -> dict[str, tuple[int, ...]]:
    """Return the dense shapes of all activations: those that the exporter stored, and those that inference adds."""
    import onnx

    found: dict[str, tuple[int, ...]] = {}
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    for value in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output):
        dims = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and all(d.HasField("dim_value") for d in dims):
            found[value.name] = tuple(int(d.dim_value) for d in dims)
    return found


def _without_weights(proto: Any) -> Any:
    """Return the graph alone: no initialisers, and no dense shapes that would contradict narrower ones."""
    from onnx import helper

    graph = helper.make_graph(proto.graph.node, proto.graph.name, proto.graph.input, proto.graph.output)
    model = helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)
    model.functions.extend(proto.functions)
    for node in model.graph.node:
        del node.metadata_props[:]
    return model


def _sources(arrays: dict[str, NDArray[Any]], state: dict[str, NDArray[Any]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the parameter that each stored tensor holds, and the parameter's axes (see `OnnxTemplate`).

    Tensors are matched by name and shape where the exporter kept both. Otherwise they are matched by content: the
    exporter stores weights of linear layers transposed and scales with added axes of length 1. Contents are unique
    after `onnx_export.generic`.
    """

    def key(array: NDArray[Any]) -> bytes:
        return hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()

    plain = {key(a): name for name, a in state.items() if a.size > 1}
    turned = {key(a.T): name for name, a in state.items() if a.ndim == 2}
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, array in arrays.items():
        if name in state and state[name].shape == array.shape:
            found[name] = (name, tuple(range(array.ndim)))
        elif array.dtype.kind != "f" or array.size <= 1:
            continue
        elif array.ndim == 2 and (source := turned.get(key(array))) and state[source].shape == array.shape[::-1]:
            found[name] = (source, (1, 0))
        elif source := plain.get(key(array)):
            old = [i for i, n in enumerate(state[source].shape) if n > 1]
            new = [i for i, n in enumerate(array.shape) if n > 1]
            if [state[source].shape[i] for i in old] == [array.shape[i] for i in new]:
                position = dict(zip(new, old, strict=True))
                found[name] = (source, tuple(position.get(i, -1) for i in range(array.ndim)))
    return found


def _quantised_sources(
    proto: Any, sources: dict[str, tuple[str, tuple[int, ...]]]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the same for the constants of Q/DQ pairs: int8 weights, and their scales, zero points and biases.

    All but the weights have one axis, which is that of the output channels of the weights.
    """
    from onnx import helper

    stored = {t.name for t in proto.graph.initializer}
    made = {node.output[0]: node for node in proto.graph.node if node.op_type in _PAIR}
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    outputs: dict[str, tuple[str, tuple[int, ...]]] = {}  # of a dequantised weight: the axis of its output channels
    for name, node in made.items():
        chain = [node]  # from the last node of a pair to the constant
        while chain[-1].input[0] in made:
            chain.append(made[chain[-1].input[0]])
        constant = chain[-1].input[0]
        origin = sources.get(constant) or sources.get(constant.removesuffix(_QUANTISED))
        if constant not in stored or origin is None:
            continue
        found[constant] = origin
        axes = [helper.get_attribute_value(a) for a in node.attribute if a.name == "axis"]
        if not axes or len(origin[1]) < 2:
            continue  # one scale for the whole tensor, or a bias, which follows its weights
        outputs[name] = (origin[0], (origin[1][axes[0]],))
        for each in chain:
            found |= {x: outputs[name] for x in each.input[1:] if x in stored}
    for node in proto.graph.node:
        if len(node.input) > 2 and node.input[1] in outputs and node.input[2] in made:
            bias = made[node.input[2]]
            found |= {x: outputs[node.input[1]] for x in bias.input if x in stored}
    return found


def _take(array: NDArray[Any], axes: NarrowedAxes) -> NDArray[Any]:
    for axis, mask in axes.items():
        array = np.compress(mask, array, axis=axis)
    return np.ascontiguousarray(array)
