"""Sizes as functions of the keep ratios.

Every size in a network (a dimension of a weight, the elements of an activation) is affine in the keep ratios alpha,
because each element belongs to at most one channel group. FLOPs are products of two such sizes. FLOPs, parameters and
bytes are therefore exact sums of ``Term``, quadratic in alpha.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsa_hw.utils.arrays import Floats

__all__ = ["Count", "Operation", "Term"]


@dataclass(frozen=True, eq=False)
class Count:
    """An affine form ``constant + coefficients @ alpha``; ``coefficients`` has shape (K,)."""

    constant: float
    coefficients: Floats

    def __call__(self, alpha: Floats) -> Floats:
        """Return the value at keep ratios ``alpha``; shapes (..., K) -> (...)."""
        return self.constant + np.asarray(alpha, np.float64) @ self.coefficients

    @property
    def dense(self) -> float:
        """Value at alpha = 1."""
        return self.constant + float(self.coefficients.sum())


@dataclass(frozen=True, eq=False)
class Term:
    """The product of ``scale`` and at most two ``factors``: a term of a quadratic cost."""

    scale: float
    factors: tuple[Count, ...]

    def __call__(self, alpha: Floats) -> Floats:
        """Return the value at keep ratios ``alpha``; shapes (..., K) -> (...)."""
        value = np.full(np.shape(alpha)[:-1], self.scale, np.float64)
        for factor in self.factors:
            value = value * factor(alpha)
        return value


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation of the traced network, with its sizes as functions of the keep ratios.

    Attributes:
        name: Unique name in the trace.
        kind: ATen name without namespace and overload ("conv2d", "linear", "batch_norm", "add", ...).
        module: Name of the module that calls it.
        flops: FLOPs as in ``torch.utils.flop_counter`` (2 per multiply-add); empty where that counts none.
        weights: Elements of each parameter or buffer that it reads.
        inputs: Elements of each activation that it reads.
        output: Elements that it writes.
        view: Whether it moves no data (reshape, transpose, slice, ...).
        depthwise: Whether it is a depthwise convolution.
        itemsize: Bytes per element of its output.
        images: First dimension of its output, the batch.
    """

    name: str
    kind: str
    module: str
    flops: tuple[Term, ...]
    weights: tuple[Term, ...]
    inputs: tuple[Count, ...]
    output: Count
    view: bool
    depthwise: bool
    itemsize: int
    images: int = 1
