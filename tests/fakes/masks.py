"""Three small groups, a non-linear loss of their masks, and its expectation by enumeration of all masks."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from dsa_hw.methods.dsa.relaxation import Layout

SIZES = (4, 3, 1)
LAYOUT = Layout(SIZES)


def importances(layout: Layout, seed: int) -> Tensor:
    rng = np.random.default_rng(seed)
    return layout.pad([np.exp(rng.normal(size=size)) for size in layout.sizes])


def loss(masks: Tensor, seed: int = 0) -> Tensor:
    """A smooth, strongly non-linear function of masks (N, K, C_max) -> (N,)."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.cat(list(LAYOUT.split(masks)), -1).to(torch.float64)
    first = torch.randn(flat.shape[-1], 6, generator=generator, dtype=torch.float64)
    second = torch.randn(6, generator=generator, dtype=torch.float64)
    return torch.nn.functional.softplus(torch.tanh(flat @ first) @ second + 0.3 * flat[..., 0] * flat[..., 5])


def all_masks() -> Tensor:
    """Every mask of LAYOUT, (2^8, K, C_max)."""
    rows = [
        LAYOUT.pad(torch.tensor(bits, dtype=torch.float64).split(SIZES))
        for bits in itertools.product((0.0, 1.0), repeat=sum(SIZES))
    ]
    return torch.stack(rows)


EVERY = all_masks()


def expected_loss(p: Tensor) -> Tensor:
    """E[L] by enumeration; differentiable in p (K, C_max)."""
    valid = LAYOUT.valid()
    chance = torch.where(EVERY > 0, p, 1.0 - p)
    return (torch.where(valid, chance, 1.0).prod(-1).prod(-1) * loss(EVERY)).sum()
