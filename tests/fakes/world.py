"""A device with known physics: what networks truly cost, what a model believes, and noisy readings in between."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import budgets
from budgets.quadratic import Quadratic
from dsa_hw.pipeline.constraints import Constraint
from dsa_hw.pipeline.reading import Reading


class World:
    """K groups; the truth is a quadratic in the widths, the belief another one that is systematically wrong.

    The truth has besides: a saw-tooth (up to 15 % of the group's share off the grid), and an error of each
    configuration by itself of ``rough``. Readings have a relative noise of ``noise`` (standard deviation).
    """

    def __init__(self, seed: int, error: float = 0.2, noise: float = 0.005, rough: float = 0.01) -> None:
        self.rng = rng = np.random.default_rng(seed)
        groups = int(rng.integers(3, 25))
        self.sizes = rng.choice([32, 64, 128, 256], groups)
        self.grid = np.full(groups, int(rng.choice([4, 8, 16])))
        self.noise, self.rough = noise, rough
        square, line = rng.exponential(1.0, (groups, groups)), rng.exponential(1.0, groups)
        square = np.where(np.abs(np.subtract.outer(np.arange(groups), np.arange(groups))) <= 1, square, 0.0)
        self.belief = _quadratic(square + square.T, line)
        # Every coefficient is off by itself, and all of them together, so that the total is off by up to ``error``.
        off = 1 + error * rng.uniform(-1, 1)
        self.truth = _quadratic(
            off * (square + square.T) * rng.uniform(0.8, 1.2, square.shape), off * line * rng.uniform(0.8, 1.2, groups)
        )
        self.waves = rng.normal(0, 25, (6, groups)), rng.uniform(0, 2 * np.pi, 6)
        self.measured = 0

    def true(self, widths: NDArray[np.int64]) -> float:
        alpha = widths / self.sizes
        rest = (widths % self.grid) / self.grid
        tooth = 1 + 0.15 * float(np.mean(np.where((rest > 0) & (widths < self.sizes), rest, 0.0)))
        wave = float(np.sin(self.waves[0] @ alpha + self.waves[1]).mean()) * np.sqrt(2.0)
        return float(self.truth(alpha)) * tooth * (1 + self.rough * wave)

    def read(self, widths: NDArray[np.int64]) -> Reading:
        value = self.true(widths) * (1 + self.noise * self.rng.normal())
        return Reading(value, value * (1 - 2 * self.noise), value * (1 + 2 * self.noise), 100, "median")

    def measure(self, widths: NDArray[np.int64]) -> tuple[list[Reading], list[Reading]]:
        self.measured += 1
        return [self.read(widths)], [self.read(self.sizes)]

    def constraint(self, share: float, relative: bool) -> Constraint:
        dense = float(self.belief(np.ones(self.sizes.size)))
        limit = float(share * (dense if relative else self.true(self.sizes)))
        amount = f"{100 * float(share)!r}%" if relative else f"{limit!r}s"
        meter: Any = SimpleNamespace(exact=False, title="world", environment={})
        return Constraint(budgets.LatencyBudget(amount), _Cost(self.belief), dense, limit, meter, self.grid)


def _quadratic(square: NDArray[np.float64], line: NDArray[np.float64]) -> Quadratic:
    total = square.sum() + line.sum()
    return Quadratic(0.01 * square / total, 0.009 * line / total, 0.001)


class _Cost:
    def __init__(self, quadratic: Quadratic) -> None:
        self.value, self.gradient = quadratic.value, quadratic.gradient
