"""Export once, then make every configuration by narrowing the weights inside that graph.

`Template` holds the exported network. For a configuration, the kept indices of every parameter come from
``groups.slices``; walking the graph once carries, for every tensor, which indices survive on which axis. Numbers that
the exporter wrote into the graph as constants (shapes of reshapes, sizes of splits, groups of depthwise convolutions)
follow from that. An operation that is not understood is refused by name; outputs are checked against the really shrunk
network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from dsa_hw.errors import ProfileError
from profilers.litert.worker.narrow import reshaped
from profilers.networks.onnx_export import export

if TYPE_CHECKING:
    from dsa_hw.channels import ChannelGroups

__all__ = ["Template"]

Line = NDArray[np.bool_]
"""Which indices of one axis survive."""
Axes = dict[int, Line]
"""The narrowed axes of one tensor; an axis that is not there survives whole."""
Kept = Sequence[NDArray[np.int64]]


class Template:
    """A network exported once, from which any configuration can be made."""

    def __init__(self, model: nn.Module, groups: ChannelGroups, inputs: tuple[Any, ...]) -> None:
        import onnx
        from onnx import numpy_helper

        proto = export(model, inputs)
        self.groups = groups
        self._tensors = {t.name: t for t in proto.graph.initializer}
        self._arrays = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
        self._shapes = {name: tuple(a.shape) for name, a in self._arrays.items()}
        self._shapes |= _activation_shapes(proto)
        state = {k: v.detach().cpu().numpy() for k, v in model.state_dict(keep_vars=True).items()}
        self._sources = _provenance(self._arrays, state)
        self._skeleton = onnx.ModelProto()
        self._skeleton.CopyFrom(_without_weights(proto))
        self.size = sum(a.nbytes for a in self._arrays.values())

    def make(self, kept: Kept) -> bytes:
        """The ONNX file of the configuration that keeps ``kept`` (K sorted index arrays)."""
        from onnx import ModelProto, numpy_helper

        model = ModelProto()
        model.CopyFrom(self._skeleton)
        walk = _Walk(self, kept)
        for node in model.graph.node:
            walk.visit(node)
        for name, tensor in self._tensors.items():
            axes = walk.axes.get(name)
            if axes:
                array = _take(self._arrays[name], axes)
                model.graph.initializer.append(numpy_helper.from_array(array, name))
            else:
                model.graph.initializer.append(tensor)
        for name, array in walk.constants.items():
            model.graph.initializer.append(numpy_helper.from_array(array, name))
        return bytes(model.SerializeToString())


def _activation_shapes(proto: Any) -> dict[str, tuple[int, ...]]:
    """Dense shapes of all activations; the exporter writes down most, shape inference finds the rest."""
    import onnx

    found: dict[str, tuple[int, ...]] = {}
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    for value in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output):
        dims = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and all(d.HasField("dim_value") for d in dims):
            found[value.name] = tuple(int(d.dim_value) for d in dims)
    return found


def _without_weights(proto: Any) -> Any:
    """The graph alone: no initialisers, and no shapes of the dense network that would contradict narrower ones."""
    from onnx import helper

    graph = helper.make_graph(proto.graph.node, proto.graph.name, proto.graph.input, proto.graph.output)
    model = helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)
    model.functions.extend(proto.functions)
    for node in model.graph.node:
        del node.metadata_props[:]
    return model


def _provenance(
    arrays: dict[str, NDArray[Any]], state: dict[str, NDArray[Any]]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Graph tensor -> (tensor of the network, its axis for each axis of the graph tensor; -1 for an added axis of 1).

    By name and shape where the exporter kept both. Otherwise by content: the exporter stores weights of linear layers
    transposed and scales with axes of 1 added. `export.generic` made contents unique.
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


def _take(array: NDArray[Any], axes: Axes) -> NDArray[Any]:
    for axis, line in axes.items():
        array = np.compress(line, array, axis=axis)
    return np.ascontiguousarray(array)


_Rule = Callable[["_Walk", Any], None]
_RULES: dict[str, _Rule] = {}


def _rule(*kinds: str) -> Callable[[_Rule], _Rule]:
    def decorate(function: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(kinds, function))
        return function

    return decorate


class _Walk:
    """One pass over the graph for one configuration; nodes are changed in place."""

    def __init__(self, template: Template, kept: Kept) -> None:
        self._arrays = template._arrays
        self._shapes = template._shapes
        self.axes: dict[str, Axes] = {}
        self.constants: dict[str, NDArray[Any]] = {}
        mask = template.groups.flat_mask(kept)
        self.pads = [(pad.position // 2, pad.before, mask[units]) for pad, units in template.groups.pads]
        slices = template.groups.slices(kept)
        for name, (source, position) in template._sources.items():
            cuts = slices.get(source)
            if cuts:
                axes = {i: cuts[axis] for i, axis in enumerate(position) if axis in cuts}
                shape = self._shapes[name]
                self.axes[name] = {i: np.isin(np.arange(shape[i]), indices) for i, indices in axes.items()}

    def visit(self, node: Any) -> None:
        """Apply the rule of the node's kind; without narrowed inputs there is nothing to do."""
        if not any(self.axes.get(name) for name in node.input) and not (node.op_type == "Pad" and self.pads):
            return
        rule = _RULES.get(node.op_type)
        if rule is None:
            raise ProfileError(
                f"cannot narrow the exported network at {node.op_type} {node.output[0]!r}: the operation is not "
                "understood by profilers.networks.onnx_narrow.template"
            )
        rule(self, node)

    def of(self, name: str) -> Axes:
        """Narrowed axes of a tensor."""
        return self.axes.get(name, {})

    def shape(self, name: str) -> tuple[int, ...]:
        """Dense shape of a tensor."""
        if name not in self._shapes:
            raise ProfileError(f"cannot narrow the exported network: the shape of {name!r} is not known")
        return self._shapes[name]

    def value(self, node: Any, index: int) -> NDArray[Any]:
        """The constant at input ``index``."""
        name = node.input[index]
        if name not in self._arrays:
            raise ProfileError(
                f"cannot narrow the exported network at {node.op_type} {node.output[0]!r}: {name!r} is no constant"
            )
        return self._arrays[name]

    def count(self, name: str, axis: int) -> int:
        """New length of an axis."""
        line = self.of(name).get(axis)
        return self.shape(name)[axis] if line is None else int(line.sum())

    def set(self, name: str, axes: Axes) -> None:
        """Remember the narrowed axes of an output; lines that keep everything are dropped."""
        self.axes[name] = {axis: line for axis, line in axes.items() if not line.all()}

    def replace(self, node: Any, index: int, value: Iterable[int]) -> None:
        """Give the node a constant of its own (the old one may serve other nodes too)."""
        name = f"{node.output[0]}::{index}"
        self.constants[name] = np.asarray(list(value), np.int64)
        while len(node.input) <= index:
            node.input.append("")
        node.input[index] = name


def _attribute(node: Any, name: str, default: Any = None) -> Any:
    from onnx import helper

    for attribute in node.attribute:
        if attribute.name == name:
            return helper.get_attribute_value(attribute)
    return default


def _set_attribute(node: Any, name: str, value: Any) -> None:
    from onnx import helper

    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    if value is not None:
        node.attribute.append(helper.make_attribute(name, value))


def _bias(walk: _Walk, node: Any, index: int, line: Line | None) -> None:
    """A bias that batch norm was folded into has no name in the network: it follows the outputs of its operation."""
    if line is not None and len(node.input) > index and node.input[index] and not walk.of(node.input[index]):
        shape = walk.shape(node.input[index])
        if shape and shape[-1] == len(line):
            walk.set(node.input[index], {len(shape) - 1: line})


_SAME = [
    "Relu",
    "LeakyRelu",
    "Elu",
    "Selu",
    "Celu",
    "ThresholdedRelu",
    "Sigmoid",
    "HardSigmoid",
    "HardSwish",
    "Mish",
    "Softplus",
    "Softsign",
    "Tanh",
    "Erf",
    "Gelu",
    "Exp",
    "Log",
    "Sqrt",
    "Reciprocal",
    "Abs",
    "Neg",
    "Floor",
    "Ceil",
    "Round",
    "Sign",
    "Sin",
    "Cos",
    "Clip",
    "Cast",
    "Identity",
    "Dropout",
    "Not",
    "IsNaN",
    "IsInf",
    "MaxPool",
    "AveragePool",
    "LpPool",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "BatchNormalization",
    "InstanceNormalization",
    "LayerNormalization",
    "RMSNormalization",
    "Softmax",
    "LogSoftmax",
]


@_rule(*_SAME)
def _same(walk: _Walk, node: Any) -> None:
    axes = walk.of(node.input[0])
    walk.set(node.output[0], axes)
    if node.op_type in ("BatchNormalization", "InstanceNormalization") and 1 in axes:
        for index in range(1, len(node.input)):
            _bias(walk, node, index, axes[1])


@_rule("Conv")
def _conv(walk: _Walk, node: Any) -> None:
    data, weight = node.input[0], node.input[1]
    group = _attribute(node, "group", 1)
    if group > 1:
        channels, each = walk.count(data, 1), walk.count(weight, 1)
        if channels % each:
            raise ProfileError(
                f"{node.name or node.output[0]!r}: {channels} channels in groups of {each} do not work out"
            )
        _set_attribute(node, "group", channels // each)
    line = walk.of(weight).get(0)
    _bias(walk, node, 2, line)
    walk.set(node.output[0], {} if line is None else {1: line})


@_rule("ConvTranspose")
def _conv_transpose(walk: _Walk, node: Any) -> None:
    data, weight = node.input[0], node.input[1]
    group = _attribute(node, "group", 1)
    line = walk.of(weight).get(1)
    if group > 1:
        made = np.ones(walk.shape(weight)[1], bool) if line is None else line
        if walk.shape(weight)[0] == group:  # depthwise: loses whole groups
            whole = walk.of(weight).get(0, np.ones(group, bool))
            _set_attribute(node, "group", walk.count(data, 1))
            line = np.repeat(whole, len(made)) & np.tile(made, group)
        else:
            line = np.tile(made, group)
    _bias(walk, node, 2, line)
    walk.set(node.output[0], {} if line is None else {1: line})


@_rule("Gemm")
def _gemm(walk: _Walk, node: Any) -> None:
    rows = walk.of(node.input[0]).get(1 if _attribute(node, "transA", 0) else 0)
    line = walk.of(node.input[1]).get(0 if _attribute(node, "transB", 0) else 1)
    _bias(walk, node, 2, line)
    walk.set(node.output[0], {i: a for i, a in ((0, rows), (1, line)) if a is not None})


@_rule("MatMul")
def _matmul(walk: _Walk, node: Any) -> None:
    left, right = node.input
    rank = max(len(walk.shape(left)), len(walk.shape(right)))
    axes: Axes = {}
    for name, inner in ((left, -1), (right, -2)):
        shape = walk.shape(name)
        for axis, line in walk.of(name).items():
            if (len(shape) > 1 and axis == len(shape) + inner) or len(shape) == 1:
                continue  # summed over
            axes[axis + rank - len(shape)] = line
    walk.set(node.output[0], axes)


@_rule(
    *[
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Pow",
        "Max",
        "Min",
        "Sum",
        "Mean",
        "Mod",
        "And",
        "Or",
        "Xor",
        "Equal",
        "Greater",
        "Less",
        "GreaterOrEqual",
        "LessOrEqual",
        "Where",
        "PRelu",
    ]
)
def _elementwise(walk: _Walk, node: Any) -> None:
    shapes = [walk.shape(name) for name in node.input]
    rank = max(map(len, shapes))
    axes: Axes = {}
    for name, shape in zip(node.input, shapes, strict=True):
        for axis, line in walk.of(name).items():
            place = axis + rank - len(shape)
            if place in axes and not np.array_equal(axes[place], line):
                raise ProfileError(
                    f"cannot narrow {node.op_type} {node.output[0]!r}: its inputs keep different channels"
                )
            axes[place] = line
    for name, shape in zip(node.input, shapes, strict=True):
        if name in walk._arrays:  # a constant without a name in the network follows what it meets
            own = {i: axes[i + rank - len(shape)] for i in range(len(shape)) if i + rank - len(shape) in axes}
            walk.set(name, {i: line for i, line in own.items() if shape[i] == len(line)})
    walk.set(node.output[0], axes)


@_rule("Concat")
def _concat(walk: _Walk, node: Any) -> None:
    rank = len(walk.shape(node.input[0]))
    axis = _attribute(node, "axis") % rank
    axes: Axes = {}
    for name in node.input:
        axes |= {i: line for i, line in walk.of(name).items() if i != axis}
    axes[axis] = np.concatenate([walk.of(n).get(axis, np.ones(walk.shape(n)[axis], bool)) for n in node.input])
    walk.set(node.output[0], axes)


@_rule("Split")
def _split(walk: _Walk, node: Any) -> None:
    axes = walk.of(node.input[0])
    axis = _attribute(node, "axis", 0) % len(walk.shape(node.input[0]))
    if axis not in axes:
        for name in node.output:
            walk.set(name, axes)
        return
    sizes = [walk.shape(name)[axis] for name in node.output]
    lines = np.split(axes[axis], np.cumsum(sizes)[:-1])
    for name, line in zip(node.output, lines, strict=True):
        walk.set(name, {**axes, axis: line})
    _set_attribute(node, "num_outputs", None)
    walk.replace(node, 1, [int(line.sum()) for line in lines])


@_rule("Slice")
def _slice(walk: _Walk, node: Any) -> None:
    data = node.input[0]
    shape, old = walk.shape(data), walk.of(data)
    starts, ends = walk.value(node, 1).tolist(), walk.value(node, 2).tolist()
    places = walk.value(node, 3).tolist() if len(node.input) > 3 and node.input[3] else list(range(len(starts)))
    steps = walk.value(node, 4).tolist() if len(node.input) > 4 and node.input[4] else [1] * len(starts)
    axes, changed = dict(old), False
    for i, place in enumerate(places):
        axis = place % len(shape)
        if axis not in old:
            continue
        chosen = np.arange(shape[axis])[starts[i] : ends[i] : steps[i]]
        line = old[axis]
        axes[axis] = line[chosen]
        ranks = (np.cumsum(line) - 1)[chosen[line[chosen]]]
        gaps = set(np.diff(ranks).tolist())
        if len(gaps) > 1 or steps[i] < 0:
            raise ProfileError(f"cannot narrow Slice {node.output[0]!r}: what is kept of it is not a slice any more")
        first = int(ranks[0]) if len(ranks) else 0
        starts[i], ends[i] = first, int(ranks[-1]) + 1 if len(ranks) else first
        steps[i] = gaps.pop() if gaps else 1
        changed = True
    if changed:
        for index, values in ((1, starts), (2, ends), (3, places), (4, steps)):
            walk.replace(node, index, values)
    walk.set(node.output[0], axes)


@_rule("Gather")
def _gather(walk: _Walk, node: Any) -> None:
    data, indices = node.input
    axis = _attribute(node, "axis", 0) % len(walk.shape(data))
    chosen = walk.shape(indices)
    old = walk.of(data)
    axes = {i if i < axis else i + len(chosen) - 1: line for i, line in old.items() if i != axis}
    if axis in old:
        line, wanted = old[axis], walk.value(node, 1) % walk.shape(data)[axis]
        ranks = np.cumsum(line) - 1
        if wanted.ndim > 1 or (wanted.ndim == 0 and not line[wanted]):
            raise ProfileError(f"cannot narrow Gather {node.output[0]!r}: it picks a channel that is removed")
        keep = line[wanted]
        name = f"{node.output[0]}::1"
        walk.constants[name] = np.asarray(ranks[wanted if wanted.ndim == 0 else wanted[keep]], np.int64)
        node.input[1] = name
        if wanted.ndim:
            axes[axis] = keep
    walk.set(node.output[0], axes)


@_rule("Transpose")
def _transpose(walk: _Walk, node: Any) -> None:
    rank = len(walk.shape(node.input[0]))
    order = list(_attribute(node, "perm", range(rank - 1, -1, -1)))
    walk.set(node.output[0], {order.index(axis): line for axis, line in walk.of(node.input[0]).items()})


@_rule("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def _reshape(walk: _Walk, node: Any) -> None:
    new = walk.shape(node.output[0])
    axes = reshaped(walk.of(node.input[0]), walk.shape(node.input[0]), new)
    if axes is None:
        raise ProfileError(f"cannot narrow {node.op_type} {node.output[0]!r}: what is kept does not fit the new shape")
    walk.set(node.output[0], axes)
    if node.op_type == "Reshape":
        walk.replace(node, 1, [walk.count(node.output[0], i) for i in range(len(new))])


@_rule("Expand")
def _expand(walk: _Walk, node: Any) -> None:
    rank = len(walk.shape(node.output[0]))
    shift = rank - len(walk.shape(node.input[0]))
    walk.set(node.output[0], {axis + shift: line for axis, line in walk.of(node.input[0]).items()})
    walk.replace(node, 1, [walk.count(node.output[0], i) for i in range(rank)])


@_rule(
    *[
        "ReduceMean",
        "ReduceSum",
        "ReduceMax",
        "ReduceMin",
        "ReduceProd",
        "ReduceL1",
        "ReduceL2",
        "ReduceSumSquare",
        "ReduceLogSumExp",
    ]
)
def _reduce(walk: _Walk, node: Any) -> None:
    rank = len(walk.shape(node.input[0]))
    given = _attribute(node, "axes")
    if given is None:
        given = walk.value(node, 1).tolist() if len(node.input) > 1 and node.input[1] else range(rank)
    gone = {axis % rank for axis in given}
    axes = {axis: line for axis, line in walk.of(node.input[0]).items() if axis not in gone}
    if not _attribute(node, "keepdims", 1):
        left = [axis for axis in range(rank) if axis not in gone]
        axes = {left.index(axis): line for axis, line in axes.items()}
    walk.set(node.output[0], axes)


@_rule("Resize")
def _resize(walk: _Walk, node: Any) -> None:
    walk.set(node.output[0], walk.of(node.input[0]))
    if len(node.input) > 3 and node.input[3]:
        walk.replace(node, 3, [walk.count(node.output[0], i) for i in range(len(walk.shape(node.output[0])))])


@_rule("Pad")
def _pad(walk: _Walk, node: Any) -> None:
    """Padding adds channels that no operation made; which of them stay is decided by what they are added to.

    ``groups.pads`` says so, in the order of execution.
    """
    old, shape = walk.of(node.input[0]), walk.shape(node.input[0])
    pads = walk.value(node, 1).tolist()
    places = walk.value(node, 3).tolist() if len(node.input) > 3 and node.input[3] else list(range(len(shape)))
    axes, half = dict(old), len(places)
    for i, place in enumerate(places):
        axis, amounts = place % len(shape), (pads[i], pads[i + half])
        if not any(amounts):
            continue
        known = walk.pads and (walk.pads[0][0], walk.pads[0][1], len(walk.pads[0][2]) - walk.pads[0][1])
        if known == (len(shape) - 1 - axis, *amounts):
            _, before, line = walk.pads.pop(0)
            whole = old.get(axis, np.ones(shape[axis], bool))
            axes[axis] = np.concatenate([line[:before], whole, line[before:]])
            pads[i], pads[i + half] = int(line[:before].sum()), int(line[before:].sum())
        elif axis in old:
            raise ProfileError(f"cannot narrow Pad {node.output[0]!r}: the channel groups do not know this padding")
    walk.set(node.output[0], axes)
    if pads != walk.value(node, 1).tolist():
        walk.replace(node, 1, pads)
