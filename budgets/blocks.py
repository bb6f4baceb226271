"""Effective widths on devices that compute whole blocks of channels.

With blocks of b, a tensor of w channels costs like n b channels, n = ceil(w / b). For a group with C channels the cost
is a function of three columns, each a share of the dense width:

* whole: e = n b / C, with n >= 1. 24 channels cost like 32 where b = 16.
* partial: 1 at the dense width where C is not a multiple of b, else 0. Some kernels need whole blocks, and a slower one
  takes their place (ONNX Runtime: a depthwise convolution of 58 channels takes about 6 times as long as one of 64).
* narrow (with ``narrow=True``): 1 where w < b <= C, else 0. Reading less than a block may cost more than reading one.

Steps have no useful gradient. Between the widths that use their blocks fully (multiples of b, and C) each column is
therefore replaced by its chord in `smooth`, `slope` and `value`: there a cost is continuous, monotone and
differentiable almost everywhere, and at those widths it is the same. The other widths cost as much as the next multiple
of b, so nothing is lost by leaving them out (`steps`).

    e(w) = max(w, b) + max(0, w - floor(C / b) b) (ceil(C / b) b - C) / (C - floor(C / b) b)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np
import torch
from numpy.typing import ArrayLike

from dsa_hw.errors import ProfileError
from dsa_hw.utils.arrays import Floats, Ints

__all__ = ["Blocks"]

# A width that is a keep ratio times a size is a multiple of a block up to rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Blocks:
    """Map of keep ratios (..., K) to the columns whole, partial, narrow, (..., 3 K).

    Attributes:
        block: Number of channels of a block.
        sizes: (K,) units of the groups.
        channels: (K,) channels that a unit has in one tensor; 1 by default.
        narrow: Whether the columns "narrow" are used; otherwise they are 0. With them a cost can fall when a width
            grows to one block.
    """

    block: int
    sizes: tuple[int, ...]
    channels: tuple[int, ...] = ()
    narrow: bool = False

    def __post_init__(self) -> None:
        """Check block and sizes."""
        object.__setattr__(self, "channels", self.channels or (1,) * len(self.sizes))
        if self.block < 1 or min(self.sizes, default=0) < 1 or min(self.channels) < 1:
            raise ProfileError(
                f"Blocks and groups must have at least 1 channel; got blocks of {self.block} in groups of {self.sizes}."
            )
        if len(self.channels) != len(self.sizes):
            raise ProfileError(f"`channels` must have {len(self.sizes)} entries; got {len(self.channels)}.")

    def __copy__(self) -> Blocks:
        """Return the object itself, which is immutable."""
        return self

    def __deepcopy__(self, memo: object) -> Blocks:
        """Return the object itself, which is immutable."""
        return self

    @property
    def columns(self) -> int:
        """Number of columns, 3 K."""
        return 3 * len(self.sizes)

    @cached_property
    def _total(self) -> Floats:
        """Channels of the groups, (K,)."""
        return np.array(self.sizes, np.float64) * np.array(self.channels)

    @cached_property
    def _parts(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Ratio of one block, ratio and extra slope of the last partial block, its steepness; each (K,)."""
        total = self._total
        full = np.floor(total / self.block) * self.block
        partial = (full > 0) & (full < total)
        rest = np.where(partial, total - full, 1.0)
        extra = np.where(partial, (full + self.block - total) / rest, 0.0)
        return self.block / total, full / total, extra, np.where(partial, total / rest, 0.0)

    @property
    def steps(self) -> Ints:
        """Steps of the widths that use their blocks fully, (K,).

        It is 1 for a group whose widths all cost the same: one of less than a block, or of one block unless less may
        cost more (``narrow``).
        """
        whole = np.array([self.block // gcd(self.block, c) for c in self.channels], np.int64)
        return np.where(self._total + self.narrow > self.block, whole, 1)

    def __call__(self, alpha: ArrayLike) -> Floats:
        """Return the columns at keep ratios (..., K), shape (..., 3 K): steps."""
        x = np.asarray(alpha, np.float64)
        least, _, _, steep = self._parts
        count = np.maximum(np.ceil(x * self._total / self.block - _ROUNDING), 1.0)
        partial = (x >= 1 - _ROUNDING) & (steep > 0)
        narrow = (x < least * (1 - _ROUNDING)) & (least <= 1) & self.narrow
        return np.concatenate([count * least, partial, narrow], -1)

    def smooth(self, alpha: ArrayLike) -> Floats:
        """Return the columns at keep ratios (..., K), shape (..., 3 K): chords."""
        x = np.asarray(alpha, np.float64)
        least, begin, extra, steep = self._parts
        last = np.maximum(x - begin, 0.0)
        return np.concatenate([np.maximum(x, least) + last * extra, last * steep, np.zeros_like(x)], -1)

    def slope(self, alpha: ArrayLike, gradient: Floats) -> Floats:
        """Return the gradient by keep ratios (..., K) from that by columns (..., 3 K).

        It is the chain rule for `smooth`. At a corner the derivative is that of the upper side.
        """
        x = np.asarray(alpha, np.float64)
        least, begin, extra, steep = self._parts
        whole, partial, _ = np.split(gradient, 3, -1)
        last = x >= begin
        return np.asarray(whole * ((x >= least) + last * extra) + partial * (last * steep), np.float64)

    def value(self, alpha: torch.Tensor) -> torch.Tensor:
        """Return `smooth` of a tensor (..., K), differentiable, shape (..., 3 K)."""
        parts = (torch.as_tensor(part, dtype=alpha.dtype, device=alpha.device) for part in self._parts)
        least, begin, extra, steep = parts
        last = torch.where(alpha >= begin, alpha - begin, 0.0)
        whole = torch.where(alpha >= least, alpha, least) + last * extra
        return torch.cat([whole, last * steep, torch.zeros_like(alpha)], -1)
