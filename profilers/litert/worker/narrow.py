"""Any configuration of a network from the one LiteRT file that was converted: the flatbuffer itself made narrower.

Converting a network takes ten seconds and more, rewriting its file some milliseconds. `Template` takes the file as the
object tree that the flatbuffer compiler generates (``ModelT``); weights are recognised by their content, since the
converter folds batch norms into them and keeps no names. From the kept indices of every parameter, one walk over the
operators finds which indices of every tensor survive on which axis. What is not understood is refused by name.

Needs NumPy only: it runs in the environment of the converter, where dsa_hw is not installed.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["CannotNarrowError", "Lines", "Template", "reshaped"]

Array = NDArray[Any]
Line = NDArray[np.bool_]
"""Which indices of one axis survive."""
Lines = dict[int, Line]
"""The narrowed axes of one tensor; an axis that is not there survives whole."""

# TensorType of the LiteRT schema, which never renumbers
_TYPES = {0: "<f4", 1: "<f2", 2: "<i4", 3: "u1", 4: "<i8", 6: "?", 7: "<i2", 9: "i1"}


class CannotNarrowError(Exception):
    """The file cannot be narrowed; the message says where and why."""


class Template:
    """A converted network from which any configuration can be made.

    ``codes`` names the operators by their number in the schema, ``state`` has the network's own tensors.
    """

    def __init__(self, model: Any, codes: Mapping[int, str], state: Mapping[str, Array]) -> None:
        if len(model.subgraphs) != 1:
            raise CannotNarrowError(f"the file has {len(model.subgraphs)} subgraphs; only one is understood")
        self.model = model
        self.kinds = [codes.get(model.operatorCodes[o.opcodeIndex].builtinCode, "?") for o in self.graph.operators]
        self.shapes = [tuple(int(n) for n in t.shape) if t.shape is not None else () for t in self.graph.tensors]
        self.arrays = {i: a for i in range(len(self.shapes)) if (a := self._array(i)) is not None}
        self.uses = Counter(int(i) for o in self.graph.operators for i in o.inputs)
        self.sources: dict[int, tuple[str, dict[int, int]]] = {}
        for operator, kind in zip(self.graph.operators, self.kinds, strict=True):
            if kind in _WEIGHTED:
                index = int(operator.inputs[1])
                if index in self.arrays and (found := _source(self.arrays[index], kind, state)):
                    self.sources[index] = found

    @property
    def graph(self) -> Any:
        """The one subgraph."""
        return self.model.subgraphs[0]

    def _array(self, index: int) -> Array | None:
        tensor = self.graph.tensors[index]
        data = self.model.buffers[tensor.buffer].data
        if data is None or not len(data) or tensor.type not in _TYPES:
            return None
        return np.frombuffer(bytes(data), _TYPES[tensor.type]).reshape(self.shapes[index])

    def make(
        self, slices: Mapping[str, Mapping[int, Sequence[int]]], pads: Sequence[tuple[int, Sequence[bool]]]
    ) -> Any:
        """The object tree of one configuration; the template stays as it is.

        ``slices`` has the kept indices of every changed tensor by axis; ``pads`` the paddings of channels in the order
        of execution: how many channels come before, and which of the padded ones stay.
        """
        from . import rules  # the rules need the walk, and the walk the rules

        walk = Walk(self, slices, pads)
        for operator, kind in zip(walk.operators, self.kinds, strict=True):
            rules.visit(walk, operator, kind)
        return walk.finished()


class Walk:
    """One pass over the operators for one configuration, on copies of whatever changes."""

    def __init__(
        self,
        template: Template,
        slices: Mapping[str, Mapping[int, Sequence[int]]],
        pads: Sequence[tuple[int, Sequence[bool]]],
    ) -> None:
        self._template = template
        self._slices = slices
        self.pads = [(before, np.asarray(line, bool)) for before, line in pads]
        self.operators = [copy.copy(o) for o in template.graph.operators]
        self._tensors = [copy.copy(t) for t in template.graph.tensors]
        self._buffers = list(template.model.buffers)
        self._lines: dict[int, Lines] = {}

    def of(self, index: int) -> Lines:
        """Narrowed axes of an activation."""
        return self._lines.get(int(index), {})

    def shape(self, index: int) -> tuple[int, ...]:
        """Dense shape of a tensor."""
        return self._template.shapes[int(index)]

    def constant(self, index: int) -> Array | None:
        """The dense values of a tensor that is in the file; None for what is computed."""
        return self._template.arrays.get(int(index))

    def value(self, operator: Any, position: int, kind: str) -> Array:
        """The constant at input ``position``, which must be one."""
        found = self.constant(operator.inputs[position])
        if found is None:
            raise CannotNarrowError(f"{kind} {self.name(operator)}: its input {position} is computed, not constant")
        return found

    def name(self, operator: Any) -> str:
        """What an operator is called: the last part of its output, since the converter writes whole stack traces."""
        text = self._template.graph.tensors[int(operator.outputs[0])].name
        text = text.decode() if isinstance(text, bytes) else str(text)
        return repr(text.rpartition(".")[2][-60:])

    def cuts(self, index: int) -> Lines | None:
        """Narrowed axes of a weight, by the parameter that it came from; None where it came from none."""
        found = self._template.sources.get(int(index))
        if found is None:
            return None
        name, axes = found
        kept = self._slices.get(name, {})
        shape = self.shape(index)
        lines = {axis: np.isin(np.arange(shape[axis]), kept[old]) for axis, old in axes.items() if old in kept}
        return {axis: line for axis, line in lines.items() if not line.all()}

    def set(self, index: int, lines: Lines) -> None:
        """Remember the narrowed axes of an output; lines that keep everything are dropped."""
        lines = {axis: line for axis, line in lines.items() if not line.all()}
        if any(not line.any() for line in lines.values()):
            raise CannotNarrowError(f"tensor {index} would keep nothing")
        self._lines[int(index)] = lines
        if lines:
            self._tensors[int(index)].shape = self._narrowed(index, lines)
            self._tensors[int(index)].shapeSignature = None

    def count(self, index: int, axis: int) -> int:
        """New length of an axis."""
        line = self.of(index).get(axis)
        return self.shape(index)[axis] if line is None else int(line.sum())

    def _narrowed(self, index: int, lines: Lines) -> Array:
        return np.asarray([int(lines[i].sum()) if i in lines else n for i, n in enumerate(self.shape(index))], np.int32)

    def cut(self, operator: Any, position: int, lines: Lines) -> None:
        """Narrow the constant at input ``position``."""
        array = self.constant(operator.inputs[position])
        assert array is not None
        for axis, line in lines.items():
            array = np.compress(line, array, axis=axis)
        if lines:
            self.replace(operator, position, array)

    def replace(self, operator: Any, position: int, array: Array) -> None:
        """Give the operator a constant of its own: the old one may serve others, who keep other channels."""
        old = int(operator.inputs[position])
        tensor = self._tensors[old]
        array = np.ascontiguousarray(array, _TYPES[tensor.type])
        buffer = copy.copy(self._template.model.buffers[tensor.buffer])
        buffer.data = np.frombuffer(array.tobytes(), np.uint8)
        index = old
        if self._template.uses[old] > 1:
            index = len(self._tensors)
            tensor = copy.copy(tensor)
            text = tensor.name if isinstance(tensor.name, bytes) else str(tensor.name).encode()
            tensor.name = text + b"::%d" % index  # quantisers tell tensors apart by name
            self._tensors.append(tensor)
            inputs = np.array(operator.inputs)
            inputs[position] = index
            operator.inputs = inputs
        tensor.shape = np.asarray(array.shape, np.int32)
        tensor.buffer = len(self._buffers)
        self._buffers.append(buffer)

    def finished(self) -> Any:
        """The new object tree, without the buffers that nothing uses any more."""
        if self.pads:
            raise CannotNarrowError(f"{len(self.pads)} paddings of channels were not found in the file")
        graph = copy.copy(self._template.graph)
        for index in graph.outputs:
            if self.of(index):
                raise CannotNarrowError(f"output {int(index)} would lose channels")
        graph.operators, graph.tensors = self.operators, self._tensors
        used = {int(i) for o in self.operators for i in (*o.inputs, *o.outputs)}
        used |= {int(i) for i in (*graph.inputs, *graph.outputs)}
        for i, tensor in enumerate(self._tensors):
            if i not in used:
                tensor.buffer = 0  # by the format's rule always empty
        model = copy.copy(self._template.model)
        model.subgraphs = [graph]
        model.buffers = self._buffers
        needed = {t.buffer for t in self._tensors} | {m.buffer for m in model.metadata or []}
        for i in range(1, len(self._buffers)):
            if i not in needed and self._buffers[i].data is not None:
                self._buffers[i] = copy.copy(self._buffers[i])
                self._buffers[i].data = None
        return model


# Operators with a weight at input 1, and how the weight of the network lies in the file: axes of the network's tensor
# in the order of the file. The output channel, which batch norm scales, comes first in the network's tensor.
_WEIGHTED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV")


def _source(array: Array, kind: str, state: Mapping[str, Array]) -> tuple[str, dict[int, int]] | None:
    """The parameter that a weight came from, and for each axis of the weight the axis of the parameter.

    Equal up to a factor per output channel (a folded batch norm).
    """
    for name, tensor in state.items():
        if tensor.ndim < 2 or tensor.size != array.size or tensor.dtype.kind != "f":
            continue
        rank = tensor.ndim
        out = 0
        if kind == "DEPTHWISE_CONV_2D":
            order = [*range(1, rank), 0]
        elif kind == "TRANSPOSE_CONV":
            order, out = [1, *range(2, rank), 0], 1
        else:
            order = [0, *range(2, rank), 1]
        turned = tensor.transpose(order)
        long = [i for i, n in enumerate(turned.shape) if n > 1]
        place = [i for i, n in enumerate(array.shape) if n > 1]
        if [turned.shape[i] for i in long] != [array.shape[i] for i in place]:
            continue
        axis = order.index(out)
        mine = np.moveaxis(turned, axis, 0).reshape(turned.shape[axis], -1)
        theirs = np.moveaxis(array.reshape(turned.shape), axis, 0).reshape(mine.shape)
        if _proportional(mine.astype(np.float64), theirs.astype(np.float64)):
            return name, {p: order[i] for p, i in zip(place, long, strict=True)}
    return None


def _proportional(a: Array, b: Array) -> bool:
    """Whether every row of ``b`` is a multiple of that row of ``a``, and not all of them zero; both (n, m)."""
    strength = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    live = strength > 0
    if not live.any():
        return False
    cosine = np.abs((a * b).sum(axis=1)[live]) / strength[live]
    if a.shape[1] == 1:  # any two numbers are proportional: one input channel needs equal factors as well
        ratio = (b[live] / a[live])[:, 0]
        return bool(np.ptp(ratio) <= 1e-4 * np.abs(ratio).max())
    return bool((cosine > 1 - 1e-6).all())


def reshaped(lines: Lines, old: tuple[int, ...], new: tuple[int, ...]) -> Lines | None:
    """Narrowed axes after reshaping ``old`` to ``new``; None where what survives is no longer a box.

    The surviving elements are marked in an array of the old shape; reshaped, each new axis keeps the indices with any
    survivor, and the survivors are a box exactly if they are as many as the product of the kept lengths.
    """
    marks = np.ones((1,) * len(old), bool)
    for axis, line in lines.items():
        marks = marks & line.reshape([-1 if i == axis else 1 for i in range(len(old))])
    marks = np.broadcast_to(marks, old).reshape(new)
    found = [np.atleast_1d(marks.any(axis=tuple(j for j in range(len(new)) if j != i))) for i in range(len(new))]
    if np.prod([int(line.sum()) for line in found], dtype=np.int64) != int(marks.sum()):
        return None
    return dict(enumerate(found))
