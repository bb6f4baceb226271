"""How a GPU runs a convolution: algorithms, tiles and waves.

A GPU library has several algorithms for a convolution and picks one by its shape. Each cuts the output into tiles of
``rows`` positions and ``channels`` output channels. A processor computes one tile at a time and adds up ``reads``
products for each of its outputs, so

    tiles = products * ceil(positions / rows) * ceil(outputs / channels)
    waves = ceil(tiles / processors)
    time  = waves (a reads + b) + c * transformed                              a, b, c >= 0, one set per algorithm

``positions`` are the output positions, for Winograd algorithms in whole patches of each image, and ``transformed`` are
the patches of inputs, outputs and weights that a Winograd algorithm writes to memory and reads again. A shape is four
numbers of an operation: images, side (of a square output image), reads (input channels times kernel area) and outputs
(channels).

The tile sizes are those in the names of cuDNN 8.9's kernels on an A100 and a T4 (``docs/benchmarks/other-devices.md``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from budgets.features import FeatureMap
from budgets.work_classes import Groups, work_class
from dsa_hw.channels.counts import Count, Operation, Term
from dsa_hw.utils.arrays import Floats

__all__ = ["ALGORITHMS", "ANY", "SHAPE", "THREE_BY_THREE", "Algorithm", "between", "kernel_shapes", "whole"]

SHAPE: Final = ("images", "side", "reads", "outputs")
#: Class of the shapes that every algorithm can compute, and of those that only the direct one can.
THREE_BY_THREE, ANY = "3x3", "any"
# A size that is a keep ratio times a number of channels is whole up to rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Algorithm:
    """A way to compute a convolution.

    Attributes:
        name: For reports.
        rows: Positions of a tile.
        channels: Output channels of a tile.
        patch: Height and width of the patches that each image is cut into; (1, 1) for none.
        counted: Positions that a patch counts as.
        products: Matrix products, one for each element of a transformed patch.
        flops: FLOPs per tile, read and output, at which the search for the speeds starts.
        transforms: Whether transformed patches pass through memory.
    """

    name: str
    rows: int
    channels: int
    patch: tuple[int, int] = (1, 1)
    counted: int = 1
    products: int = 1
    flops: float = 2.0
    transforms: bool = False

    def positions(self, side: Floats, up: Callable[[Floats], Floats]) -> Floats:
        """Return the positions per image, in whole patches; ``up`` rounds up."""
        if self.patch == (1, 1):
            return side**2
        return self.counted * up(side / self.patch[0]) * up(side / self.patch[1])


# F(4x4, 3x3) multiplies 36 times for 16 outputs, F(2x2, 3x3) 16 times for 4, instead of 9 times for each.
ALGORITHMS: Final = (
    Algorithm("Winograd 4x4", 128, 128, (4, 4), products=36, flops=2 / 9, transforms=True),
    Algorithm("Winograd 2x2", 128, 32, (8, 16), counted=128, flops=2 * 4 / 9),
    Algorithm("direct", 128, 64),
)


def whole(x: Floats) -> Floats:
    """Round up to whole numbers from 1."""
    return np.maximum(np.ceil(x - _ROUNDING), 1.0)


def between(x: Floats) -> Floats:
    """Return the continuous function max(1, x + 1/2), from which `whole` differs by at most 1/2, and by 0 on average.

    Its slope is 1 from x = 1/2 on.
    """
    return np.maximum(x + 0.5, 1.0)


def kernel_shapes(groups: Groups) -> tuple[FeatureMap | None, tuple[str, ...]]:
    """Return the shapes of a network's convolutions and matrix products, and the names of those operations.

    The map has four features for each operation, in the order of `SHAPE`, and their class is the class of the shape.
    None where the network has no such operation.
    """
    terms: dict[str, list[Term]] = {}
    classes: dict[str, str] = {}
    names: list[str] = []
    for operation in groups.operations:
        if operation.view or operation.depthwise or len(operation.flops) != 1 or len(operation.flops[0].factors) != 2:
            continue
        sizes = _shape(operation, len(groups.names))
        if sizes is None:
            continue
        kind, counts = sizes
        for column, count in zip(SHAPE, counts, strict=True):
            terms[f"{operation.name}: {column}"] = [Term(1.0, (count,))]
            classes[f"{operation.name}: {column}"] = kind
        names.append(operation.name)
    return (FeatureMap.from_terms(terms, len(groups.names), classes) if names else None), tuple(names)


def _shape(operation: Operation, size: int) -> tuple[str, tuple[Count, ...]] | None:
    """Return the class of an operation's shape and its sizes; None where one is 0."""
    term = operation.flops[0]
    made, read = term.factors
    if min(made.dense, read.dense, operation.output.dense, term.scale) <= 0:
        return None
    positions = operation.output.dense / made.dense
    area = term.scale / (2 * positions)  # of the kernel
    steps = sum(count.dense for count in operation.inputs[:1]) / (read.dense * positions)  # stride times stride
    winograd = work_class(operation) == "spatial" and round(area) == 9 and 0.5 < steps < 2
    images = max(min(operation.images, positions), 1.0)
    fixed = np.zeros(size)
    reads = Count(area * read.constant, area * np.asarray(read.coefficients, np.float64))
    counts = (Count(images, fixed), Count(float(np.sqrt(positions / images)), fixed), reads, made)
    return (THREE_BY_THREE if winograd else ANY), counts
