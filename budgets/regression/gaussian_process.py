"""A Gaussian process on the relative residuals of a physical model."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import clone

from budgets.blocks import Blocks
from budgets.features import FeatureMap
from budgets.regression.base import CostRegressor
from budgets.regression.linear import PhysicsNNLS
from dsa_hw.utils.arrays import Floats

__all__ = ["GPResidual"]

_LENGTHS: Final = tuple(2.0**k for k in np.arange(-2.0, 4.1, 0.5))
_NOISES: Final = tuple(10.0**k for k in np.arange(-3.0, 3.1, 0.5))


class GPResidual(CostRegressor):
    """``base(alpha) * (1 + g(alpha))`` with a Gaussian process g.

    g is fitted to the relative residuals of ``base``.

    Kernel: squared exponential in ``z_k = alpha_k sqrt(s_k)``, s_k the share of group k in the base's gradient at the
    mean of the data, so that groups without cost do not count in distances. Its length, and the ratio of noise to
    signal, maximise the marginal likelihood on a grid, with the variance of the signal in closed form:

        r ~ N(0, v (K + eta I)),   v = r'(K + eta I)^-1 r / n,   minimise  n log v + log det(K + eta I)

    and ``g(alpha) = k(z, Z) (K + eta I)^-1 r``. The noise of a row with weight v is eta / v. g returns to 0 away from
    the data, so outside the profiled range the prediction returns to the base's. Not monotone. ``base=None`` means
    ``PhysicsNNLS(features)``.
    """

    _learnt: ClassVar[tuple[str, ...]] = ("base_", "scale_", "points_", "dual_", "length_", "noise_")

    base_: CostRegressor
    scale_: Floats
    points_: Floats
    dual_: Floats
    length_: float
    noise_: float

    def __init__(
        self,
        features: FeatureMap | None = None,
        *,
        base: CostRegressor | None = None,
        sizes: ArrayLike | None = None,
        blocks: Blocks | None = None,
        outside: str = "extrapolate",
    ) -> None:
        """Store the parameters; `fit` checks them."""
        super().__init__(features, sizes=sizes, blocks=blocks, outside=outside)
        self.base = base

    def _fit(self, alpha: Floats, y: Floats, weights: Floats) -> None:
        base = PhysicsNNLS(self.features) if self.base is None else clone(self.base)
        self.base_ = base.fit(alpha, y, weights)
        predicted = self.base_.at(alpha)
        # A base that predicts 0 has no relative residual; the smallest positive cost seen is the scale then.
        residual = y / np.maximum(predicted, y.min() * 1e-3) - 1
        centre = alpha.mean(0)
        share = np.abs(self.base_.slope(centre[None])[0] * centre)
        total = share.sum()
        share = share / total if total > 0 else np.full(len(share), 1 / len(share))
        self.scale_ = np.sqrt(share)
        self.points_ = alpha * self.scale_
        distance = _squared_distance(self.points_, self.points_)
        spread = np.sqrt(max(float(np.median(distance[~np.eye(len(y), dtype=bool)])), 1e-12))
        best: tuple[float, float, float, Floats] | None = None
        # With V = diag(weights), (K + eta V^-1)^-1 = V^1/2 (V^1/2 K V^1/2 + eta I)^-1 V^1/2: one eigendecomposition.
        root = np.sqrt(weights)
        for relative in _LENGTHS:
            kernel = np.exp(-0.5 * distance / (relative * spread) ** 2) * np.outer(root, root)
            eigenvalues, vectors = np.linalg.eigh(kernel)
            eigenvalues, rotated = np.maximum(eigenvalues, 0.0), vectors.T @ (root * residual)
            for noise in _NOISES:
                total_variance = eigenvalues + noise
                variance = max(float(np.mean(rotated**2 / total_variance)), np.finfo(float).tiny)
                loss = len(y) * np.log(variance) + float(np.log(total_variance).sum())
                if best is None or loss < best[0]:
                    best = (loss, relative * spread, noise, root * (vectors @ (rotated / total_variance)))
        assert best is not None
        _, self.length_, self.noise_, self.dual_ = best

    def _predict(self, alpha: Floats) -> Floats:
        return self.base_.at(alpha) * (1 + self._kernel(alpha) @ self.dual_)

    def _gradient(self, alpha: Floats) -> Floats:
        # d/dz_k k(z, z_i) = k(z, z_i) (z_i - z)_k / length^2, and dz_k / dalpha_k = scale_k.
        weighted = self._kernel(alpha) * self.dual_
        slope = (
            (weighted @ self.points_ - weighted.sum(-1, keepdims=True) * (alpha * self.scale_))
            * self.scale_
            / self.length_**2
        )
        residual = weighted.sum(-1, keepdims=True)
        gradient = self.base_.slope(alpha) * (1 + residual) + self.base_.at(alpha)[:, None] * slope
        return np.asarray(gradient, np.float64)

    def _value(self, alpha: torch.Tensor) -> torch.Tensor:
        def tensor(array: Floats) -> torch.Tensor:
            return torch.as_tensor(array, dtype=alpha.dtype, device=alpha.device)

        difference = (alpha * tensor(self.scale_))[..., None, :] - tensor(self.points_)
        kernel = torch.exp(-0.5 * (difference**2).sum(-1) / self.length_**2)
        return self.base_.value(alpha) * (1 + kernel @ tensor(self.dual_))

    def _kernel(self, alpha: Floats) -> Floats:
        distance = _squared_distance(alpha * self.scale_, self.points_)
        return np.asarray(np.exp(-0.5 * distance / self.length_**2), np.float64)


def _squared_distance(a: Floats, b: Floats) -> Floats:
    difference = a[:, None, :] - b[None, :, :]
    return np.einsum("ijk,ijk->ij", difference, difference)
