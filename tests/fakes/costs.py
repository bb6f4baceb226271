"""Costs with known values: quadratics, and functions with kinks and steps as devices have them."""

from __future__ import annotations

import numpy as np
import torch

from dsa_hw.utils.arrays import Floats, Ints


class Quadratic:
    """alpha'A alpha + b'alpha + c with entries >= 0."""

    def __init__(self, a: Floats, b: Floats, c: float = 0.0) -> None:
        self.a, self.b, self.c = a, b, c

    @classmethod
    def random(cls, k: int, rng: np.random.Generator, unit: float = 1.0) -> Quadratic:
        a = rng.exponential(size=(k, k)) * (rng.random((k, k)) < min(1.0, 4 / k)) * np.exp(rng.normal(size=(k, 1)))
        b = rng.exponential(size=k) * np.exp(rng.normal(size=k))
        return cls(a * unit, b * unit, unit * 0.1 * rng.random() * float(a.sum() + b.sum()))

    def value(self, alpha: torch.Tensor) -> torch.Tensor:
        a, b = torch.from_numpy(self.a), torch.from_numpy(self.b)
        return ((alpha @ a) * alpha).sum(-1) + alpha @ b + self.c

    def gradient(self, alpha: Floats) -> Floats:
        return alpha @ (self.a + self.a.T) + self.b

    def at(self, alpha: Floats) -> Floats:
        return self.value(torch.from_numpy(alpha)).numpy()


class Saturating(Quadratic):
    """A concave, increasing function of a quadratic, as a fitted cost may be."""

    def value(self, alpha: torch.Tensor) -> torch.Tensor:
        return super().value(alpha).sqrt() + 0.1 * super().value(alpha)

    def gradient(self, alpha: Floats) -> Floats:
        inner = Quadratic.value(self, torch.from_numpy(alpha)).numpy()
        return np.asarray((0.5 / np.sqrt(inner) + 0.1)[..., None] * super().gradient(alpha))


class Kinked:
    """Linear above an edge and flat below it, as on a device that computes channels in blocks."""

    def __init__(self, k: int, rng: np.random.Generator) -> None:
        self.slopes, self.base = rng.uniform(0.2, 5.0, k), rng.uniform(0.0, 0.4) * k
        self.edges = rng.uniform(0.0, 0.6, k) * (rng.random(k) < 0.6)

    def value(self, alpha: torch.Tensor) -> torch.Tensor:
        above = torch.maximum(alpha, torch.from_numpy(self.edges))
        return self.base + above @ torch.from_numpy(self.slopes)

    def gradient(self, alpha: Floats) -> Floats:
        return self.slopes * (alpha > self.edges)

    def at(self, alpha: Floats) -> float:
        return float(self.value(torch.from_numpy(alpha)))


class Stairs:
    """Time of a device that processes channels in blocks, so that those that fill a block are free."""

    def __init__(self, sizes: Ints, block: int) -> None:
        self.sizes, self.block = torch.from_numpy(sizes), block

    def value(self, alpha: torch.Tensor) -> torch.Tensor:
        return torch.ceil(alpha * self.sizes / self.block - 1e-9).sum(-1).to(torch.float64)

    def gradient(self, alpha: Floats) -> Floats:
        return np.broadcast_to(self.sizes.numpy() / self.block, alpha.shape).astype(np.float64)
