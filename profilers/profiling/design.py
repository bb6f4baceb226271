"""Which configurations to measure: spread evenly, on the grid, hold-out first; then where a cheap model knows least."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import qmc

from dsa_hw.errors import ProfileError

__all__ = ["Space", "adaptive", "corners", "spread"]

Widths = NDArray[np.int64]

_LEAST_RATIO = 0.1  # keep ratios below this are outside what allocation asks for


@dataclass(frozen=True, eq=False)
class Space:
    """The widths that are sampled: for group k the multiples of ``grid[k]`` from a tenth of C_k up, and C_k itself."""

    sizes: Widths
    grid: Widths

    def __post_init__(self) -> None:
        if self.sizes.ndim != 1 or len(self.sizes) == 0:
            raise ProfileError("this network has no channel group, so there is only one configuration; use measure")
        if self.grid.shape != self.sizes.shape or np.any(self.grid < 1):
            raise ProfileError(
                f"a grid of at least 1 per group is needed, got {self.grid.tolist()} for {len(self.sizes)} groups"
            )

    @staticmethod
    def of(names: Sequence[str], sizes: Widths, grid: Mapping[str, int]) -> Space:
        """From the grid by group name."""
        return Space(np.asarray(sizes, np.int64), np.asarray([grid.get(n, 1) for n in names], np.int64))

    @property
    def smallest(self) -> Widths:
        """The narrowest width of each group, shape (K,)."""
        return self.nearest(np.full(len(self.sizes), 0.0))

    def nearest(self, alpha: NDArray[np.float64]) -> Widths:
        """Keep ratios (..., K) -> the nearest widths of the space."""
        wanted = np.clip(alpha, _LEAST_RATIO, 1) * self.sizes
        steps = np.maximum(np.rint(wanted / self.grid), 1) * self.grid
        # The dense width counts as on the grid; it wins where it is nearer, and where a step would go beyond it.
        widths = np.where((steps > self.sizes) | (self.sizes - wanted < np.abs(steps - wanted)), self.sizes, steps)
        return widths.astype(np.int64)


def corners(space: Space) -> Widths:
    """Dense, smallest, and narrow-early / narrow-late, shape (<= 4, K) without repetition; the dense one first."""
    early = np.arange(len(space.sizes)) < len(space.sizes) / 2
    rows = [space.sizes, space.smallest, np.where(early, space.smallest, space.sizes)]
    rows.append(np.where(early, space.sizes, space.smallest))
    return _distinct(np.asarray(rows), ())


def spread(space: Space, n: int, seed: int, avoid: Collection[tuple[int, ...]] = ()) -> Widths:
    """``n`` distinct configurations that cover the space evenly, shape (<= n, K); fewer where there are no more.

    A scrambled Sobol sequence over K + 1 numbers. Rounding K independent uniform keep ratios would make all networks
    cost about the same (sums concentrate), so the extra number s sets the overall size: alpha_k = u_k^p with
    p = log s / log 1/2, whose median is s.
    """
    found: list[tuple[int, ...]] = []
    taken = set(avoid)
    sampler = qmc.Sobol(len(space.sizes) + 1, rng=np.random.default_rng(seed))
    for _ in range(8):  # doubling keeps the sequence balanced; small spaces are exhausted by then
        if len(found) >= n:
            break
        points = sampler.random(max(sampler.num_generated, 64))
        size = np.clip(points[:, :1], 0.02, 0.98)
        ratios = points[:, 1:] ** (np.log(size) / np.log(0.5))
        alpha = _LEAST_RATIO + (1 - _LEAST_RATIO) * ratios
        for row in _distinct(space.nearest(alpha), taken):
            found.append(tuple(row.tolist()))
            taken.add(found[-1])
    return np.asarray(found[:n], np.int64).reshape(-1, len(space.sizes))


def adaptive(
    space: Space,
    n: int,
    measured: Widths,
    seconds: NDArray[np.float64],
    features: NDArray[np.float64] | None,
    pool: Widths,
    pool_features: NDArray[np.float64] | None,
) -> Widths:
    """The ``n`` configurations of ``pool`` (P, K) about which a Gaussian process knows least, shape (<= n, K).

    The process models log seconds (relative error is what counts) at ``measured`` (N, K), with a linear kernel on
    the logarithm of physics ``features`` (N, D) and on keep ratios, plus a squared exponential on those. Scales by
    maximum likelihood over a small grid. Its variance does not depend on outcomes, so a whole batch is chosen greedily:
    take the most uncertain point, condition on it, repeat.
    """
    if not len(pool) or n <= 0:
        return np.zeros((0, len(space.sizes)), np.int64)
    alpha, other = measured / space.sizes, pool / space.sizes
    linear, other_linear = _standard(alpha, other)
    if features is not None and pool_features is not None:
        physical, other_physical = _standard(np.log(features), np.log(pool_features))
        linear, other_linear = np.hstack([linear, physical]), np.hstack([other_linear, other_physical])
    target = np.log(seconds) - np.log(seconds).mean()
    target = target / (target.std() or 1.0)

    def kernel(a: int, b: int, scale: float, share: float) -> NDArray[np.float64]:
        x, y = (alpha, other)[a], (alpha, other)[b]
        u, v = (linear, other_linear)[a], (linear, other_linear)[b]
        distance = ((x[:, None, :] - y[None, :, :]) ** 2).mean(axis=2)
        return (1 - share) * (1 + u @ v.T / u.shape[1]) + share * np.exp(-distance / (2 * scale**2))

    noise = 1e-3
    best, chosen = -np.inf, (0.3, 0.3)
    for scale in (0.1, 0.2, 0.4, 0.8):
        for share in (0.02, 0.1, 0.3, 0.6):
            gram = kernel(0, 0, scale, share) + noise * np.eye(len(alpha))
            factor = np.linalg.cholesky(gram)
            half = np.linalg.solve(factor, target)
            likelihood = -0.5 * float(half @ half) - float(np.log(np.diag(factor)).sum())
            if likelihood > best:
                best, chosen = likelihood, (scale, share)
    factor = np.linalg.cholesky(kernel(0, 0, *chosen) + noise * np.eye(len(alpha)))
    explained = np.linalg.solve(factor, kernel(0, 1, *chosen))
    covariance = kernel(1, 1, *chosen) - explained.T @ explained
    picked: list[int] = []
    for _ in range(min(n, len(pool))):
        variance = np.diag(covariance).copy()
        variance[picked] = -np.inf
        i = int(np.argmax(variance))
        picked.append(i)
        column = covariance[:, i : i + 1]
        covariance = covariance - column @ column.T / (covariance[i, i] + noise)
    return pool[picked]


def _standard(a: NDArray[np.float64], b: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both centred and scaled by the mean and deviation of their union."""
    both = np.vstack([a, b])
    mean, scale = both.mean(axis=0), both.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    return (a - mean) / scale, (b - mean) / scale


def _distinct(rows: Widths, avoid: Collection[tuple[int, ...]]) -> Widths:
    seen, kept = set(avoid), []
    for row in rows:
        key = tuple(int(w) for w in row)
        if key not in seen:
            seen.add(key)
            kept.append(row)
    return np.asarray(kept, np.int64).reshape(-1, rows.shape[1])
