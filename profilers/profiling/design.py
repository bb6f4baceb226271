"""Choice of configurations to measure: evenly spread on the grid first, then where a simple model is uncertain."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import qmc

from dsa_hw.channels import ChannelGroups
from dsa_hw.errors import ProfileError
from dsa_hw.utils.arrays import Floats, Ints

__all__ = ["Space", "adaptive", "corners", "spread", "work_of"]

_LEAST_RATIO = 0.1  # allocations rarely use smaller keep ratios


@dataclass(frozen=True, eq=False)
class Space:
    """The widths that are sampled: multiples of the grid from a tenth of the dense width, and the dense width.

    Attributes:
        sizes: The dense width of each group, shape (K,).
        grid: The step of each group's widths, shape (K,).
    """

    sizes: Ints
    grid: Ints

    def __post_init__(self) -> None:
        if self.sizes.ndim != 1 or len(self.sizes) == 0:
            raise ProfileError(
                "This network has no channel groups and so only one configuration. Use measure instead of profile."
            )
        if self.grid.shape != self.sizes.shape or np.any(self.grid < 1):
            raise ProfileError(
                f"`grid` must have a step of at least 1 for each of {len(self.sizes)} groups; got {self.grid.tolist()}."
            )

    @staticmethod
    def of(names: Sequence[str], sizes: Ints, grid: Mapping[str, int]) -> Space:
        """Return the space of groups with a grid by group name; groups without one have step 1."""
        return Space(np.asarray(sizes, np.int64), np.asarray([grid.get(n, 1) for n in names], np.int64))

    @property
    def smallest(self) -> Ints:
        """The narrowest width of each group, shape (K,)."""
        return self.nearest(np.full(len(self.sizes), 0.0))

    def nearest(self, alpha: Floats) -> Ints:
        """Return the widths of the space that are nearest to keep ratios (..., K)."""
        wanted = np.clip(alpha, _LEAST_RATIO, 1) * self.sizes
        steps = np.maximum(np.rint(wanted / self.grid), 1) * self.grid
        # The dense width counts as on the grid. It is used where it is nearer, and where a step would exceed it.
        widths = np.where((steps > self.sizes) | (self.sizes - wanted < np.abs(steps - wanted)), self.sizes, steps)
        return widths.astype(np.int64)


def corners(space: Space) -> Ints:
    """Return dense, smallest, narrow-early and narrow-late, shape (<= 4, K), distinct and in this order."""
    early = np.arange(len(space.sizes)) < len(space.sizes) / 2
    rows = [space.sizes, space.smallest, np.where(early, space.smallest, space.sizes)]
    rows.append(np.where(early, space.sizes, space.smallest))
    return _distinct(np.asarray(rows), ())


def spread(space: Space, n: int, seed: int, avoid: Collection[tuple[int, ...]] = ()) -> Ints:
    """Return distinct configurations that cover the space evenly.

    They come from a scrambled Sobol sequence over K + 1 numbers. With K independent uniform keep ratios all networks
    would cost about the same (sums concentrate), so the additional number s sets the overall size: alpha_k = u_k^p with
    p = log s / log 1/2, whose median is s.

    Args:
        space: The widths to sample.
        n: Number of configurations.
        seed: Seed of the sequence.
        avoid: Configurations to leave out.

    Returns:
        Widths, shape (<= n, K); fewer than n where the space has no more.
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
    measured: Ints,
    values: Floats,
    features: Floats | None,
    pool: Ints,
    pool_features: Floats | None,
) -> Ints:
    """Return the configurations of a pool for which a Gaussian process is most uncertain.

    The process models the logarithm of the cost, because relative errors matter. Its kernel is linear in the logarithm
    of the features and in keep ratios, plus a squared exponential of keep ratios. Its scales maximise the likelihood
    over a small grid. Its variance does not depend on outcomes, so a whole batch is chosen greedily: take the most
    uncertain point, condition on it, repeat.

    Args:
        space: The widths to sample.
        n: Number of configurations.
        measured: Widths of the measured configurations, shape (N, K).
        values: Their costs, shape (N,).
        features: Their positive features, for example `work_of`, shape (N, D); None for keep ratios alone.
        pool: Widths to choose from, shape (P, K).
        pool_features: Their features, shape (P, D).

    Returns:
        Widths, shape (<= n, K).
    """
    if not len(pool) or n <= 0:
        return np.zeros((0, len(space.sizes)), np.int64)
    alpha, other = measured / space.sizes, pool / space.sizes
    linear, other_linear = _standard(alpha, other)
    if features is not None and pool_features is not None:
        physical, other_physical = _standard(np.log(features), np.log(pool_features))
        linear, other_linear = np.hstack([linear, physical]), np.hstack([other_linear, other_physical])
    target = np.log(values) - np.log(values).mean()
    target = target / (target.std() or 1.0)

    def kernel(a: int, b: int, scale: float, share: float) -> Floats:
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


def _standard(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Centre and scale both by the mean and standard deviation of their union."""
    both = np.vstack([a, b])
    mean, scale = both.mean(axis=0), both.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    return (a - mean) / scale, (b - mean) / scale


def _distinct(rows: Ints, avoid: Collection[tuple[int, ...]]) -> Ints:
    seen, kept = set(avoid), []
    for row in rows:
        key = tuple(int(w) for w in row)
        if key not in seen:
            seen.add(key)
            kept.append(row)
    return np.asarray(kept, np.int64).reshape(-1, rows.shape[1])


def work_of(groups: ChannelGroups, widths: Ints) -> Floats:
    """Return FLOPs, weights read and activations written of configurations (N, K), plus 1 each; shape (N, 3)."""
    alpha = widths / groups.sizes
    total = np.ones((len(widths), 3))
    for operation in groups.operations:
        total[:, 0] += sum(term(alpha) for term in operation.flops)
        total[:, 1] += sum(term(alpha) for term in operation.weights)
        if not operation.view:
            total[:, 2] += operation.output(alpha)
    return total
