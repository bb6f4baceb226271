"""Estimators that are linear in features, and so quadratic in alpha."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
import torch
from scipy.optimize import nnls

from budgets.features import FeatureMap
from budgets.quadratic import Quadratic
from budgets.regression.base import CostRegressor
from dsa_hw.errors import ProfileError
from dsa_hw.utils.arrays import Floats

__all__ = ["BilinearRidge", "LinearRegressor", "PerOperationAdditive", "PhysicsNNLS", "TopologyQuadratic"]

# Ratio of the variance of the noise to that of the prior. Times scatter by some percent and coefficients by some tens
# of percent about their prior, so the useful range is about 1e-4 to 1; leave-one-out chooses.
_PENALTIES: Final = tuple(10.0**k for k in np.arange(-5.0, 2.1, 0.5))


class LinearRegressor(CostRegressor):
    """Common part of the linear estimators: F = coef_ @ phi(alpha)."""

    _learnt: ClassVar[tuple[str, ...]] = ("features_", "coef_")

    features_: FeatureMap
    coef_: Floats
    quadratic_: Quadratic

    def _fit(self, alpha: Floats, y: Floats, weights: Floats) -> None:
        self.features_ = self._map(alpha.shape[1])
        root = np.sqrt(weights)
        self.coef_ = self._solve(self.features_(alpha) / y[:, None] * root[:, None], root)
        self._restore()

    def _map(self, size: int) -> FeatureMap:
        return FeatureMap.monomials(size, ()) if self.features is None else self.features

    def _solve(self, design: Floats, target: Floats) -> Floats:
        """Return coefficients (d,) with ``design`` (n, d) @ coefficients near ``target`` (n,).

        The target is the square root of the weights and rows are phi / y times it, so that errors are relative.
        """
        raise NotImplementedError

    def _restore(self) -> None:
        self.quadratic_ = self.features_.combine(self.coef_)

    def _predict(self, alpha: Floats) -> Floats:
        return self.quadratic_(alpha)

    def _gradient(self, alpha: Floats) -> Floats:
        return self.quadratic_.gradient(alpha)

    def _value(self, alpha: torch.Tensor) -> torch.Tensor:
        return self.quadratic_.value(alpha)

    def coefficients(self) -> dict[str, float]:
        """Return the cost of each feature where it is 1 (in the dense network), in the unit of y."""
        return dict(zip(self.features_.names, self.coef_.tolist(), strict=True))


class PhysicsNNLS(LinearRegressor):
    """Non-negative least squares on physics features, the default.

        min_w  sum_i v_i (phi(alpha_i)' w / y_i - 1)^2      subject to w >= 0,      v_i the weights

    phi is quadratic with non-negative coefficients (``budgets.features``) and w >= 0, so F is quadratic and cannot fall
    when a keep ratio grows, also outside the profiled range. With ``features=None`` phi is 1 and the columns of X.
    """

    _monotone: ClassVar[bool] = True

    def _solve(self, design: Floats, target: Floats) -> Floats:
        return _nnls(design, target)


class PerOperationAdditive(LinearRegressor):
    """A speed for each operation, shrunk to the speed of its class.

    With features of granularity ``"operations"``, let ``w0`` be the coefficients if all operations of a class ran at
    one speed (``PhysicsNNLS`` on the class sums, divided by share of work). Then, with u = w / w0,

        min_u  sum_i (sum_j phi_j(alpha_i) w0_j u_j / y_i - 1)^2 + lambda sum_j (u_j - 1)^2,    u >= 0

    which is the posterior mode where the speed of an operation scatters about that of its class with standard deviation
    s and times scatter with e, lambda = (e / s)^2. Lambda is chosen by leave-one-out. F is quadratic and monotone as in
    ``PhysicsNNLS``.
    """

    _monotone: ClassVar[bool] = True
    _learnt: ClassVar[tuple[str, ...]] = ("features_", "coef_", "penalty_")

    penalty_: float

    def _solve(self, design: Floats, target: Floats) -> Floats:
        _, index, share = self.features_.aggregate()
        together = np.zeros((len(design), int(index.max()) + 1))
        np.add.at(together.T, index, (design * share).T)
        prior = _nnls(together, target)[index] * share
        coefficients, self.penalty_ = _shrink(design, target, prior)
        return coefficients


class TopologyQuadratic(LinearRegressor):
    """The paper's F = alpha' A alpha + B' alpha + c.

    A[i, j] is free where groups i and j meet in an operation, and 0 elsewhere.

    Ridge on the monomials (all 1 at alpha = 1, the constant is not penalised), lambda by leave-one-out. The signs are
    free, so F need not be monotone. With ``features=None`` every pair of columns may meet: the full quadratic.
    """

    _learnt: ClassVar[tuple[str, ...]] = ("features_", "coef_", "penalty_")

    penalty_: float

    def _map(self, size: int) -> FeatureMap:
        if self.features is None:
            return FeatureMap.monomials(size, ((i, j) for i in range(size) for j in range(i, size)))
        return FeatureMap.monomials(size, self.features.pairs())

    def _solve(self, design: Floats, target: Floats) -> Floats:
        coefficients, self.penalty_ = _ridge(design, target)
        return coefficients


class BilinearRidge(TopologyQuadratic):
    """ECC's bilinear energy model (Yang et al., CVPR 2019).

    It has a constant and a coefficient for each product of groups that meet.

    Ridge as in ``TopologyQuadratic``, without linear terms except for groups that meet no other (image input, logits,
    depthwise only). With ``features=None`` consecutive columns meet, as in ECC's chain of layers.
    """

    def _map(self, size: int) -> FeatureMap:
        if self.features is None:
            pairs: tuple[tuple[int, int], ...] = tuple((i, i + 1) for i in range(size - 1))
        else:
            pairs = self.features.pairs()
        alone = set(range(size)) - {k for pair in pairs for k in pair}
        return FeatureMap.monomials(size, pairs, sorted(alone))


def _nnls(design: Floats, target: Floats) -> Floats:
    """Solve non-negative least squares.

    Columns are scaled to unit norm, so that the active-set test does not depend on the scale of the features.
    """
    norm = np.linalg.norm(design, axis=0)
    norm[norm == 0] = 1.0
    try:
        solution = nnls(design / norm, target)[0]
    except RuntimeError as error:
        raise ProfileError(f"Non-negative least squares did not converge on {len(design)} rows: {error}.") from error
    return np.asarray(solution / norm, np.float64)


def _shrink(design: Floats, target: Floats, prior: Floats) -> tuple[Floats, float]:
    """Solve ``argmin_{w >= 0} |design w - target|^2 + lambda |w / prior - 1|^2``.

    Lambda is chosen by leave-one-out; w = 0 where the prior is 0. The penalty is a block of extra rows, so it stays a
    non-negative least squares problem. On its active set S the solution is a ridge, whose leave-one-out residual is
    e_i / (1 - h_ii), h the diagonal of Z_S (Z_S'Z_S + lambda I)^-1 Z_S'.
    """
    used = prior > 0
    scaled = design[:, used] * prior[used]
    d = scaled.shape[1]
    best: tuple[float, float, Floats] | None = None
    for penalty in _PENALTIES:
        root = np.sqrt(penalty)
        u = _nnls(np.vstack([scaled, root * np.eye(d)]), np.r_[target, np.full(d, root)])
        active = scaled[:, u > 0]
        hat = np.einsum(
            "ij,ji->i", active, np.linalg.solve(active.T @ active + penalty * np.eye(active.shape[1]), active.T)
        )
        error = float(np.mean(((scaled @ u - target) / np.maximum(1 - hat, 1e-9)) ** 2))
        if best is None or error < best[0]:
            best = (error, penalty, u)
    assert best is not None
    coefficients = np.zeros(len(prior))
    coefficients[used] = best[2] * prior[used]
    return coefficients, best[1]


def _ridge(design: Floats, target: Floats) -> tuple[Floats, float]:
    """Solve ``argmin |design w - target|^2 + lambda |w[1:]|^2 s^2``.

    Lambda is chosen by leave-one-out; column 0 is the free constant.

    There may be thousands of monomials and a few dozen rows, so solve in the rows (the kernel trick): project the
    constant out of rows and target, then w = Z'(ZZ' + lambda I)^-1 r; from one eigendecomposition of ZZ' every lambda
    costs n^2.
    """
    constant, rest = design[:, 0], design[:, 1:]
    unit = constant / np.linalg.norm(constant)
    z, r = rest - np.outer(unit, unit @ rest), target - unit * (unit @ target)
    eigenvalues, vectors = np.linalg.eigh(z @ z.T)
    eigenvalues = np.maximum(eigenvalues, 0.0)
    scale = max(float(eigenvalues.mean()), np.finfo(float).tiny)
    rotated = vectors.T @ r
    best: tuple[float, float, Floats] | None = None
    for penalty in _PENALTIES:
        shrink = eigenvalues / (eigenvalues + penalty * scale)
        residual = r - vectors @ (shrink * rotated)
        # The projected-out constant has leverage unit_i^2 of its own.
        hat = np.einsum("ij,j,ij->i", vectors, shrink, vectors) + unit**2
        error = float(np.mean((residual / np.maximum(1 - hat, 1e-9)) ** 2))
        if best is None or error < best[0]:
            best = (error, penalty, vectors @ (rotated / (eigenvalues + penalty * scale)))
    assert best is not None
    slopes = z.T @ best[2]
    intercept = float(unit @ (target - rest @ slopes)) / float(np.linalg.norm(constant))
    return np.r_[intercept, slopes], best[1]
