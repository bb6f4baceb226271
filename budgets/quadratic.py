"""A cost that is quadratic in the keep ratios, once and for all: value, gradient, torch.

    F(alpha) = alpha' A alpha + B' alpha + c,        dF/dalpha = 2 A alpha + B      (A symmetric)

FLOPs, parameters and every linear model on the physics features have this form, so fitting ends with one (K, K) matrix
and evaluating costs one matrix-vector product however many operations the network has.
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
    """``alpha' A alpha + B' alpha + c``: ``A`` (K, K) symmetric, ``B`` (K,), ``c`` a number, all in the cost's unit."""

    A: Floats
    B: Floats
    c: float
    _torch: dict[tuple[torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __call__(self, alpha: ArrayLike) -> Floats:
        """Value at keep ratios (..., K), shape (...)."""
        x = np.asarray(alpha, np.float64)
        return np.einsum("...k,...k->...", x @ self.A + self.B, x) + self.c

    def gradient(self, alpha: ArrayLike) -> Floats:
        """Exact gradient at keep ratios (..., K), shape (..., K)."""
        return np.asarray(alpha, np.float64) @ self._twice + self.B

    def value(self, alpha: torch.Tensor) -> torch.Tensor:
        """Differentiable value at keep ratios (..., K), shape (...)."""
        A, B = self.tensors(alpha.dtype, alpha.device)  # noqa: N806
        return ((alpha @ A + B) * alpha).sum(-1) + self.c

    def tensors(self, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """``A`` and ``B`` as tensors, converted once for each dtype and device."""
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

    @property
    def monotone(self) -> bool:
        """Every coefficient of ``A`` and ``B`` is non-negative, so F cannot fall when a keep ratio in [0, 1] grows."""
        return bool((self.A >= 0).all() and (self.B >= 0).all())
