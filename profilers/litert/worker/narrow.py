"""Make configurations by narrowing one converted LiteRT file.

Converting a network takes ten seconds and more; rewriting its file takes milliseconds. `TfliteTemplate` takes the file
as the object tree that the flatbuffer compiler generates (``ModelT``). Weights are recognised by their content, since
the converter folds batch norms into them and keeps no names. From the kept indices of every parameter, one pass over
the operators finds which indices of every tensor are kept on which axis. An operator without a rule is an error that
names it.

Needs NumPy only: it runs in the environment of the converter, where dsa_hw is not installed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .masks import CannotNarrowError
from .rules import visit
from .walk import TYPES, TfliteWalk

__all__ = ["TfliteTemplate"]

Array = NDArray[Any]


class TfliteTemplate:
    """A converted network from which any configuration can be made.

    Args:
        model: The object tree of the file.
        codes: Names of the operators by their number in the schema.
        state: The parameters and buffers of the network, by name.
    """

    def __init__(self, model: Any, codes: Mapping[int, str], state: Mapping[str, Array]) -> None:
        if len(model.subgraphs) != 1:
            raise CannotNarrowError(f"the file has {len(model.subgraphs)} subgraphs, only 1 is supported")
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
        if data is None or not len(data) or tensor.type not in TYPES:
            return None
        return np.frombuffer(bytes(data), TYPES[tensor.type]).reshape(self.shapes[index])

    def make(
        self, slices: Mapping[str, Mapping[int, Sequence[int]]], pads: Sequence[tuple[int, Sequence[bool]]]
    ) -> Any:
        """Return the object tree of one configuration; the template does not change.

        Args:
            slices: The kept indices of every narrowed parameter, by axis.
            pads: Paddings of channels in the order of execution: the number of channels added in front, and which of
                the added channels are kept.

        Raises:
            CannotNarrowError: An operator is not supported.
        """
        walk = TfliteWalk(self, slices, pads)
        for operator, kind in zip(walk.operators, self.kinds, strict=True):
            visit(walk, operator, kind)
        return walk.finished()


# Operators with a weight at input 1.
_WEIGHTED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV")


def _source(array: Array, kind: str, state: Mapping[str, Array]) -> tuple[str, dict[int, int]] | None:
    """Return the parameter that a weight holds, and the parameter's axis for each axis of the weight.

    Both must be equal up to one factor per output channel (a folded batch norm).
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
    """Return whether every row of ``b`` is a multiple of that row of ``a``, and not all are zero; both (n, m)."""
    strength = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    live = strength > 0
    if not live.any():
        return False
    cosine = np.abs((a * b).sum(axis=1)[live]) / strength[live]
    if a.shape[1] == 1:  # any two numbers are proportional, so that the factors must be equal too
        ratio = (b[live] / a[live])[:, 0]
        return bool(np.ptp(ratio) <= 1e-4 * np.abs(ratio).max())
    return bool((cosine > 1 - 1e-6).all())
