"""Which indices of a tensor's axes are kept, and what a reshape does to that.

Shared by the narrowing of LiteRT files and of ONNX graphs. Needs NumPy only: it also runs in the environment of the
converter, where dsa_hw is not installed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["CannotNarrowError", "KeepMask", "NarrowedAxes", "reshaped"]

KeepMask = NDArray[np.bool_]
"""Which indices of one axis are kept."""
NarrowedAxes = dict[int, KeepMask]
"""The narrowed axes of one tensor; an axis that is missing is kept whole."""


class CannotNarrowError(Exception):
    """The file cannot be narrowed; the message says where and why."""


def reshaped(axes: NarrowedAxes, old: tuple[int, ...], new: tuple[int, ...]) -> NarrowedAxes | None:
    """Return the narrowed axes after a reshape.

    None where the kept elements are no longer a box. The kept elements are marked in an array of the old shape. After
    the reshape, each new axis keeps the indices that have a marked element. The marked elements are a box exactly if
    their number is the product of the kept lengths.

    Args:
        axes: The narrowed axes of the tensor before the reshape.
        old: The dense shape before the reshape.
        new: The dense shape after it.
    """
    marks = np.ones((1,) * len(old), bool)
    for axis, mask in axes.items():
        marks = marks & mask.reshape([-1 if i == axis else 1 for i in range(len(old))])
    marks = np.broadcast_to(marks, old).reshape(new)
    found = [np.atleast_1d(marks.any(axis=tuple(j for j in range(len(new)) if j != i))) for i in range(len(new))]
    if np.prod([int(mask.sum()) for mask in found], dtype=np.int64) != int(marks.sum()):
        return None
    return dict(enumerate(found))
