"""Sizes as functions of the keep ratios.

Every size in a network (a dimension of a weight, the elements of an activation) is affine in the keep ratios,
because each element belongs to at most one channel group. Work is a product of two such sizes. So FLOPs,
parameters and bytes are sums of ``Term``: exact, and quadratic in alpha.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Count", "Operation", "Term"]


@dataclass(frozen=True, eq=False)
class Count:
    """An affine form ``constant + coefficients @ alpha``; ``coefficients`` has shape (K,)."""

    constant: float
    coefficients: NDArray[np.float64]

    def __call__(self, alpha: NDArray[np.float64]) -> NDArray[np.float64]:
        """Value at keep ratios ``alpha`` (..., K), shape (...)."""
        return self.constant + np.asarray(alpha, np.float64) @ self.coefficients

    @property
    def dense(self) -> float:
        """Value at alpha = 1."""
        return self.constant + float(self.coefficients.sum())


@dataclass(frozen=True, eq=False)
class Term:
    """``scale * product(factors)`` with at most two factors: a monomial of a quadratic cost."""

    scale: float
    factors: tuple[Count, ...]

    def __call__(self, alpha: NDArray[np.float64]) -> NDArray[np.float64]:
        """Value at keep ratios ``alpha`` (..., K), shape (...)."""
        value = np.full(np.shape(alpha)[:-1], self.scale, np.float64)
        for factor in self.factors:
            value = value * factor(alpha)
        return value


@dataclass(frozen=True, eq=False)
class Operation:
    """One node of the traced network with its sizes as functions of the keep ratios.

    ``kind`` is the ATen name without namespace and overload ("conv2d", "linear", "batch_norm", "add", ...).
    ``flops`` follows ``torch.utils.flop_counter`` (2 per multiply-add) and is empty where that counts nothing.
    ``weights`` are the parameter elements it reads, ``inputs`` and ``output`` the activation elements it reads
    and writes. ``view`` says that it moves no data (reshape, transpose, slice, ...).
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
