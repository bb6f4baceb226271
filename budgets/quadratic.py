"""Quadratic cost of the keep ratios: value, gradient, torch.

    F(alpha) = alpha' A alpha + B' alpha + c,        dF/dalpha = 2 A alpha + B      (A symmetric)

FLOPs, parameters and every linear model on the physics features have this form. A fit ends with one (K, K) matrix, and
an evaluation takes one matrix-vector product however many operations the network has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike

from dsa_hw.utils.arrays import Floats

__all__ = ["Quadratic"]


@dataclass(frozen=True, eq=False)
class Quadratic:
    """Quadratic form ``alpha' A alpha + B' alpha + c``.

    Attributes:
        A: (K, K), symmetric, in the unit of the cost.
        B: (K,).
        c: A number.
    """

    A: Floats
    B: Floats
    c: float
    _torch: dict[tuple[torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __call__(self, alpha: ArrayLike) -> Floats:
        """Return the value at keep ratios (..., K), shape (...)."""
        x = np.asarray(alpha, np.float64)
        return np.einsum("...k,...k->...", x @ self.A + self.B, x) + self.c

    def gradient(self, alpha: ArrayLike) -> Floats:
        """Return the exact gradient at keep ratios (..., K), shape (..., K)."""
        return np.asarray(alpha, np.float64) @ self._twice + self.B

    def value(self, alpha: torch.Tensor) -> torch.Tensor:
        """Return the differentiable value at keep ratios (..., K), shape (...)."""
        A, B = self.tensors(alpha.dtype, alpha.device)  # noqa: N806
        return ((alpha @ A + B) * alpha).sum(-1) + self.c

    def tensors(self, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``A`` and ``B`` as tensors, converted once for each dtype and device."""
        key = (dtype, device)
        if key not in self._torch:
            self._torch[key] = (
                torch.as_tensor(self.A, dtype=dtype, device=device),
                torch.as_tensor(self.B, dtype=dtype, device=device),
            )
        return self._torch[key]

    @cached_property
    def _twice(self) -> Floats:
        return 2.0 * self.A
