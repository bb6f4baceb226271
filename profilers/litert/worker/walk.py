"""One pass over the operators of a LiteRT file.

It finds the kept indices of every tensor and builds the new file.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .masks import CannotNarrowError, NarrowedAxes

if TYPE_CHECKING:
    from .narrow import TfliteTemplate

__all__ = ["TYPES", "TfliteWalk"]

Array = NDArray[Any]

TYPES = {0: "<f4", 1: "<f2", 2: "<i4", 3: "u1", 4: "<i8", 6: "?", 7: "<i2", 9: "i1"}
"""NumPy types by ``TensorType`` of the LiteRT schema, whose numbers never change."""


class TfliteWalk:
    """The state of one pass over the operators for one configuration.

    What changes is a copy.
    """

    def __init__(
        self,
        template: TfliteTemplate,
        slices: Mapping[str, Mapping[int, Sequence[int]]],
        pads: Sequence[tuple[int, Sequence[bool]]],
    ) -> None:
        self._template = template
        self._slices = slices
        self.pads = [(before, np.asarray(mask, bool)) for before, mask in pads]
        self.operators = [copy.copy(o) for o in template.graph.operators]
        self._tensors = [copy.copy(t) for t in template.graph.tensors]
        self._buffers = list(template.model.buffers)
        self._masks: dict[int, NarrowedAxes] = {}

    def of(self, index: int) -> NarrowedAxes:
        """Return the narrowed axes of an activation."""
        return self._masks.get(int(index), {})

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the dense shape of a tensor."""
        return self._template.shapes[int(index)]

    def constant(self, index: int) -> Array | None:
        """Return the dense values of a stored tensor; None if it is computed."""
        return self._template.arrays.get(int(index))

    def value(self, operator: Any, position: int, kind: str) -> Array:
        """Return the constant at input ``position``; a computed input is an error."""
        found = self.constant(operator.inputs[position])
        if found is None:
            raise CannotNarrowError(f"{kind} {self.name(operator)}: its input {position} is computed, not constant")
        return found

    def name(self, operator: Any) -> str:
        """Return a short name of an operator.

        It is the end of its output's name, which has a whole stack trace.
        """
        text = self._template.graph.tensors[int(operator.outputs[0])].name
        text = text.decode() if isinstance(text, bytes) else str(text)
        return repr(text.rpartition(".")[2][-60:])

    def cuts(self, index: int) -> NarrowedAxes | None:
        """Return the narrowed axes of a weight; None if it is no parameter."""
        found = self._template.sources.get(int(index))
        if found is None:
            return None
        name, axes = found
        kept = self._slices.get(name, {})
        shape = self.shape(index)
        masks = {axis: np.isin(np.arange(shape[axis]), kept[old]) for axis, old in axes.items() if old in kept}
        return {axis: mask for axis, mask in masks.items() if not mask.all()}

    def set(self, index: int, masks: NarrowedAxes) -> None:
        """Record the narrowed axes of an output; masks that keep everything are dropped."""
        masks = {axis: mask for axis, mask in masks.items() if not mask.all()}
        if any(not mask.any() for mask in masks.values()):
            raise CannotNarrowError(f"tensor {index} would keep nothing")
        self._masks[int(index)] = masks
        if masks:
            self._tensors[int(index)].shape = self._narrowed(index, masks)
            self._tensors[int(index)].shapeSignature = None

    def count(self, index: int, axis: int) -> int:
        """Return the new length of an axis."""
        mask = self.of(index).get(axis)
        return self.shape(index)[axis] if mask is None else int(mask.sum())

    def _narrowed(self, index: int, masks: NarrowedAxes) -> Array:
        return np.asarray([int(masks[i].sum()) if i in masks else n for i, n in enumerate(self.shape(index))], np.int32)

    def cut(self, operator: Any, position: int, masks: NarrowedAxes) -> None:
        """Narrow the constant at input ``position``."""
        array = self.constant(operator.inputs[position])
        assert array is not None
        for axis, mask in masks.items():
            array = np.compress(mask, array, axis=axis)
        if masks:
            self.replace(operator, position, array)

    def replace(self, operator: Any, position: int, array: Array) -> None:
        """Give the operator a new constant.

        Other operators, which may keep other channels, keep the old one.
        """
        old = int(operator.inputs[position])
        tensor = self._tensors[old]
        array = np.ascontiguousarray(array, TYPES[tensor.type])
        buffer = copy.copy(self._template.model.buffers[tensor.buffer])
        buffer.data = np.frombuffer(array.tobytes(), np.uint8)
        index = old
        if self._template.uses[old] > 1:
            index = len(self._tensors)
            tensor = copy.copy(tensor)
            text = tensor.name if isinstance(tensor.name, bytes) else str(tensor.name).encode()
            tensor.name = text + b"::%d" % index  # quantisers identify tensors by name
            self._tensors.append(tensor)
            inputs = np.array(operator.inputs)
            inputs[position] = index
            operator.inputs = inputs
        tensor.shape = np.asarray(array.shape, np.int32)
        tensor.buffer = len(self._buffers)
        self._buffers.append(buffer)

    def finished(self) -> Any:
        """Return the new object tree, without buffers that are no longer used."""
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
                tensor.buffer = 0  # always empty in this format
        model = copy.copy(self._template.model)
        model.subgraphs = [graph]
        model.buffers = self._buffers
        needed = {t.buffer for t in self._tensors} | {m.buffer for m in model.metadata or []}
        for i in range(1, len(self._buffers)):
            if i not in needed and self._buffers[i].data is not None:
                self._buffers[i] = copy.copy(self._buffers[i])
                self._buffers[i].data = None
        return model
