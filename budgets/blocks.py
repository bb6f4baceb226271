"""Effective widths on devices that compute whole blocks of channels.

With blocks of b, a group of C channels at width w costs like ceil(w / b) b channels. At multiples of b nothing changes.
Less than one block costs one block, and the last, partial block of a group whose size is not a multiple of b costs a
full one (24 channels cost like 32 where b = 16). In between, the effective width is interpolated, so that a cost stays
continuous, monotone, and differentiable almost everywhere:

    e(w) = max(w, b) + max(0, w - floor(C / b) b) (ceil(C / b) b - C) / (C - floor(C / b) b)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike

from dsa_hw.errors import ProfileError
from dsa_hw.utils.arrays import Floats

__all__ = ["Blocks"]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Effective keep ratios e(alpha C) / C for blocks of channels.

    ``block`` is the number of channels of a block, ``sizes`` (K,) those of the groups.
    """

    block: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check block and sizes."""
        if self.block < 1 or min(self.sizes, default=0) < 1:
            raise ProfileError(
                f"Blocks and groups must have at least 1 channel; got blocks of {self.block} in groups of {self.sizes}."
            )

    def __copy__(self) -> Blocks:
        """Return the object itself, which is immutable."""
        return self

    def __deepcopy__(self, memo: object) -> Blocks:
        """Return the object itself, which is immutable."""
        return self

    @cached_property
    def _parts(self) -> tuple[Floats, Floats, Floats]:
        """Least ratio, ratio at the last partial block, its extra slope; each (K,)."""
        sizes = np.array(self.sizes, np.float64)
        full = np.floor(sizes / self.block) * self.block
        partial = (full > 0) & (full < sizes)
        extra = np.where(partial, (full + self.block - sizes) / np.where(partial, sizes - full, 1.0), 0.0)
        return self.block / sizes, full / sizes, extra

    def __call__(self, alpha: ArrayLike) -> Floats:
        """Return the effective keep ratios of keep ratios (..., K), shape (..., K)."""
        x = np.asarray(alpha, np.float64)
        least, begin, extra = self._parts
        return np.maximum(x, least) + np.maximum(x - begin, 0.0) * extra

    def slope(self, alpha: ArrayLike) -> Floats:
        """Return the derivative of each effective keep ratio, (..., K).

        At a corner it is that of the upper side.
        """
        x = np.asarray(alpha, np.float64)
        least, begin, extra = self._parts
        return (x >= least) + (x >= begin) * extra

    def value(self, alpha: torch.Tensor) -> torch.Tensor:
        """Return the effective keep ratios of a tensor (..., K), differentiable."""
        least, begin, extra = (torch.as_tensor(p, dtype=alpha.dtype, device=alpha.device) for p in self._parts)
        return torch.where(alpha >= least, alpha, least) + torch.where(alpha >= begin, alpha - begin, 0.0) * extra
