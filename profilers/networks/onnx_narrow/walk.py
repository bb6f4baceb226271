"""One pass over an ONNX graph: the kept indices of every tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dsa_hw.errors import ProfileError
from dsa_hw.utils.arrays import Ints
from profilers.litert.worker.masks import NarrowedAxes

if TYPE_CHECKING:
    from profilers.networks.onnx_narrow.template import OnnxTemplate

__all__ = ["OnnxWalk"]


class OnnxWalk:
    """The state of one pass over the graph for one configuration.

    Nodes are changed in place.

    Attributes:
        axes: The narrowed axes of every tensor seen so far, by name.
        constants: New constants that nodes refer to, by name.
        pads: Paddings of channels in the order of execution: the axis counted from the last, the number of channels
            added in front, and which of the added channels are kept.
    """

    def __init__(self, template: OnnxTemplate, kept: Sequence[Ints]) -> None:
        self._arrays = template.arrays
        self._shapes = template.shapes
        self.axes: dict[str, NarrowedAxes] = {}
        self.constants: dict[str, NDArray[Any]] = {}
        mask = template.groups.flat_mask(kept)
        self.pads = [(pad.position // 2, pad.before, mask[units]) for pad, units in template.groups.pads]
        slices = template.groups.slices(kept)
        for name, (source, position) in template.sources.items():
            cuts = slices.get(source)
            if cuts:
                axes = {i: cuts[axis] for i, axis in enumerate(position) if axis in cuts}
                shape = self._shapes[name]
                self.axes[name] = {i: np.isin(np.arange(shape[i]), indices) for i, indices in axes.items()}

    def of(self, name: str) -> NarrowedAxes:
        """Return the narrowed axes of a tensor."""
        return self.axes.get(name, {})

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the dense shape of a tensor."""
        if name not in self._shapes:
            raise ProfileError(f"Cannot narrow the exported network: the shape of {name!r} is unknown.")
        return self._shapes[name]

    def is_constant(self, name: str) -> bool:
        """Return whether a tensor is stored in the graph."""
        return name in self._arrays

    def value(self, node: Any, index: int) -> NDArray[Any]:
        """Return the constant at input ``index``; a computed input is an error."""
        name = node.input[index]
        if name not in self._arrays:
            raise ProfileError(
                f"Cannot narrow the exported network at {node.op_type} {node.output[0]!r}: input {name!r} is not a "
                "constant."
            )
        return self._arrays[name]

    def count(self, name: str, axis: int) -> int:
        """Return the new length of an axis."""
        mask = self.of(name).get(axis)
        return self.shape(name)[axis] if mask is None else int(mask.sum())

    def set(self, name: str, axes: NarrowedAxes) -> None:
        """Record the narrowed axes of an output; masks that keep everything are dropped."""
        self.axes[name] = {axis: mask for axis, mask in axes.items() if not mask.all()}

    def replace(self, node: Any, index: int, value: Iterable[int]) -> None:
        """Give the node a constant of its own, since other nodes may use the old one."""
        name = f"{node.output[0]}::{index}"
        self.constants[name] = np.asarray(list(value), np.int64)
        while len(node.input) <= index:
            node.input.append("")
        node.input[index] = name
