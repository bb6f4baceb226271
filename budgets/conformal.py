"""Conformal calibration of relative residuals: bounds with a stated coverage, at every size of network.

Let ``r_i = y_i / f_i(x_i) - 1`` be the relative residual of a model f_i that was not fitted to configuration i. The
residuals of a model depend on the cost: their mean m(u) and spread s(u) at u = log f(x) are estimated
(``budgets.residual_shape``) and the scores are ``q_i = (r_i - m_i(u_i)) / s_i(u_i)``. Score i gives the bound

    B_i(x) = f_i(x) (1 + m_i(u) + q_i s_i(u)),        u = log f_i(x)

(normalised scores; Papadopoulos et al. 2008, Lei et al. 2018). Where m and s are constant, it is f_i(x) y_i / f_i(x_i).

* **split**: one model f, m and s from the cross-validated residuals of its training data, and the scores of n
  calibration configurations. The bound is the ceil((n + 1) c)-th smallest B_i(x). If calibration and test
  configurations are exchangeable, P(y <= bound) >= c, and at most c + 1 / (n + 1) without ties (Vovk; Lei et al.).
* **jackknife+** (Barber et al. 2021): f_i is fitted without configuration i, m_i and s_i are those of the other
  residuals, and the bound is the ceil((n + 1) c)-th smallest B_i(x). No configuration is spent on calibration. Their
  proof compares configurations only through the order of scores, so it holds for ratios and for a one-sided bound:
  P(y <= bound) >= 1 - 2 (1 - c), and about c in practice.
* **CV+**: the same with models that leave out a fold; P >= 1 - 2 (1 - c) - sqrt(2 / n).

The theorems are about a procedure, and a choice among estimators by cross-validation is part of it: where configuration
i contributed to choosing an estimator that suits it, ``r_i`` is too close to 0 and the bound too low. So
``choose(rows)`` returns the estimator that is chosen without the errors of the configurations left out. This removes
the direct effect. An indirect effect remains: the errors of the *other* configurations, which choose the estimator and
give m_i and s_i, come from fits that included i. Repeating the whole cross-validation for each i would remove it too,
at n times the cost; docs/benchmarks/cost-models.md has the coverage that was measured. Split calibration needs neither,
since its configurations have no part in the choice or in the shape.

All three bounds are about configurations drawn like the measured ones. A configuration that an allocator chose
*because* its predicted cost is low is not such a draw (the winner's curse). The bound guides the allocator; the
measurement of the result is the guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.model_selection import KFold

from budgets.regression import CostRegressor
from budgets.residual_shape import ResidualShape
from dsa_hw.errors import ProfileError
from dsa_hw.utils.arrays import Floats

__all__ = ["METHODS", "Calibration", "calibrate", "fit_rows"]

METHODS: Final = ("jackknife+", "cv+", "split")


# Bounds are computed in pieces of at most this many (row, model, residual) entries: 16 MB.
_PIECE: Final = 2_000_000


@dataclass(frozen=True, eq=False)
class Calibration:
    """What bounds are computed from.

    Attributes:
        method: "jackknife+", "cv+" or "split".
        scores: (n,) normalised residuals ``q_i``; residuals ``r_i`` where there is no shape.
        models: The models that predicted; none was fitted to the configurations whose scores it has.
        owner: (n,) index of the model of each score.
        shape: Mean and spread of the residuals by predicted cost; None for the same at every cost.
    """

    method: str
    scores: Floats
    models: tuple[CostRegressor, ...]
    owner: NDArray[np.intp]
    shape: ResidualShape | None = None

    def guarantee(self, confidence: float) -> float:
        """Return the least coverage by theorem at this ``confidence``.

        The configurations must be exchangeable. Where they had a part in choosing the estimator or in the shape of the
        residuals, the theorem covers only ``"split"``; see the module.
        """
        if self.method == "split":
            return confidence
        bound = 2 * confidence - 1
        return max(0.0, bound - (math.sqrt(2 / len(self.scores)) if self.method == "cv+" else 0.0))

    def rank(self, confidence: float) -> int:
        """Return ceil((n + 1) c), the number of the order statistic that is the bound.

        Raises:
            ProfileError: There are too few configurations for this ``confidence``.
        """
        if not 0 < confidence < 1:
            raise ProfileError(f"`confidence` must lie strictly between 0 and 1, e.g. 0.9; got {confidence!r}.")
        n = len(self.scores)
        # (n + 1) c may be an integer that rounding errors put slightly above it.
        rank = math.ceil((n + 1) * confidence - 1e-9)
        if rank > n:
            raise ProfileError(
                f"A confidence of {confidence:g} needs at least {math.ceil(confidence / (1 - confidence) - 1e-9)} "
                f"calibration configurations; got {n}. Use at most {n / (n + 1):.3f}, or measure more."
            )
        return rank

    def upper(self, alpha: Floats, confidence: float) -> tuple[Floats, NDArray[np.intp]]:
        """Return the upper bound at keep ratios (n, K), shape (n,).

        The second value is the index of the score that attains it, (n,).
        """
        return self._order(alpha, self.rank(confidence))

    def lower(self, alpha: Floats, confidence: float) -> tuple[Floats, NDArray[np.intp]]:
        """Return the lower bound, the floor((n + 1)(1 - c))-th smallest.

        The second value is the index of the score that attains it, (n,).
        """
        return self._order(alpha, len(self.scores) + 1 - self.rank(confidence))

    def _order(self, alpha: Floats, rank: int) -> tuple[Floats, NDArray[np.intp]]:
        pieces = np.array_split(alpha, self._pieces(len(alpha)))
        bounds = np.concatenate([self._bounds(np.stack([model.at(x) for model in self.models], -1))[0] for x in pieces])
        index = np.argpartition(bounds, rank - 1, axis=-1)[:, rank - 1]
        return np.take_along_axis(bounds, index[:, None], -1)[:, 0], index

    def _pieces(self, rows: int) -> int:
        return 1 + rows * len(self.models) * (1 if self.shape is None else len(self.shape.logs)) // _PIECE

    def _bounds(self, costs: Floats) -> tuple[Floats, Floats]:
        """Return the bound of each score and its derivative by the model's cost, each (m, n).

        ``costs`` (m, J) are those of the J models.
        """
        if self.shape is None:
            factor = np.broadcast_to(1 + self.scores, (len(costs), len(self.scores)))
            return costs[:, self.owner] * factor, factor
        # A cost that is not positive has no logarithm; the shape is constant below the cheapest configuration.
        mean, spread, mean_slope, spread_slope = (
            part[:, self.owner] for part in self.shape(np.log(np.maximum(costs, np.finfo(float).tiny)))
        )
        factor = 1 + mean + self.scores * spread
        # u = log f, so d(f factor(u)) / df = factor + factor'(u).
        return costs[:, self.owner] * factor, factor + mean_slope + self.scores * spread_slope

    def upper_gradient(self, alpha: Floats, confidence: float) -> Floats:
        """Return the gradient of ``upper_value`` at (n, K), shape (n, K).

        It is that of the bound which attains it, with the dependence of mean and spread on the cost.
        """
        rank = self.rank(confidence)
        bounds, slopes = self._bounds(np.stack([model.smooth(alpha) for model in self.models], -1))
        index = np.argpartition(bounds, rank - 1, axis=-1)[:, rank - 1]
        rows = [
            slopes[row, i] * self.models[self.owner[i]].slope(alpha[row : row + 1])[0] for row, i in enumerate(index)
        ]
        return np.array(rows)

    def upper_value(self, alpha: torch.Tensor, confidence: float) -> torch.Tensor:
        """Return the upper bound at keep ratios (..., K), differentiable, shape (...).

        It is ``upper`` where the models' ``value`` is their ``predict``: everywhere, except between blocks of channels
        and with boosted trees.
        """
        rows = alpha.reshape(-1, alpha.shape[-1])
        parts = [self._upper_rows(part, confidence) for part in rows.tensor_split(self._pieces(len(rows)))]
        return torch.cat(parts).reshape(alpha.shape[:-1])

    def _upper_rows(self, alpha: torch.Tensor, confidence: float) -> torch.Tensor:
        costs = torch.stack([model.value(alpha) for model in self.models], -1)
        scores = torch.as_tensor(self.scores, dtype=alpha.dtype, device=alpha.device)
        owner = torch.as_tensor(self.owner, device=alpha.device)
        if self.shape is None:
            bounds = costs[:, owner] * (1 + scores)
        else:
            mean, spread = self.shape.value(costs.clamp_min(torch.finfo(alpha.dtype).tiny).log())
            bounds = costs[:, owner] * (1 + mean[:, owner] + scores * spread[:, owner])
        return bounds.kthvalue(self.rank(confidence), dim=-1).values


def calibrate(
    estimator: CostRegressor,
    alpha: Floats,
    y: Floats,
    *,
    method: str = "jackknife+",
    anchor: tuple[Floats, Floats] | None = None,
    weights: Floats | None = None,
    calibration: tuple[Floats, Floats] | None = None,
    choose: Callable[[NDArray[np.intp]], CostRegressor] | None = None,
    by_cost: bool = True,
    seed: int = 0,
) -> Calibration:
    """Calibrate a fitted estimator.

    Args:
        estimator: Fitted to the training data.
        alpha: (n, K) keep ratios of the training data.
        y: (n,) costs of the training data.
        method: "jackknife+", "cv+" or "split".
        anchor: Keep ratios and costs that are part of every fit and of no score, since they are not drawn at random.
        weights: Weights of the n rows and then of the anchor's rows in the fits; equal by default.
        calibration: Keep ratios and costs that were not fitted; required for "split", unused otherwise.
        choose: ``choose(rows)`` returns the estimator that is chosen without the errors of these rows; None where the
            data had no part in choosing ``estimator``.
        by_cost: Whether mean and spread of the residuals may depend on the cost. Otherwise the bound covers with the
            confidence on average over all sizes, but less or more at some.
        seed: Of the folds.

    Raises:
        ProfileError: The method is unknown, or "split" has no calibration data.
    """
    if method not in METHODS:
        raise ProfileError(f"Unknown calibration {method!r}. Available calibrations: {', '.join(METHODS)}.")
    if method == "split" and (calibration is None or len(calibration[1]) == 0):
        raise ProfileError(
            "Split calibration needs held-out configurations, and the profile has none. Profile with --holdout 20."
        )
    count = len(y) if method == "jackknife+" else min(10, len(y))
    logs, residuals, owner, models = np.empty(len(y)), np.empty(len(y)), np.empty(len(y), np.intp), []
    for number, (kept, left) in enumerate(KFold(count, shuffle=True, random_state=seed).split(alpha)):
        template = estimator if choose is None else choose(left)
        model = fit_rows(template, alpha, y, kept, anchor, weights)
        logs[left], residuals[left] = _residuals(model, alpha[left], y[left])
        owner[left] = number
        models.append(model)
    if method == "split":
        assert calibration is not None
        # The residuals of the training data give the shape, those of the calibration data the scores.
        shape = ResidualShape(logs, residuals, np.full(len(y), -1, np.intp), 1) if by_cost else None
        at, scores = _residuals(estimator, *calibration)
        return _scored(method, scores, at, (estimator,), np.zeros(len(scores), np.intp), shape)
    shape = ResidualShape(logs, residuals, owner, len(models)) if by_cost else None
    return _scored(method, residuals, logs, tuple(models), owner, shape)


def _residuals(model: CostRegressor, alpha: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return predicted log costs and relative residuals of configurations, each (n,)."""
    predicted = model.predict(alpha)
    return np.log(np.maximum(predicted, np.finfo(float).tiny)), y / predicted - 1


def _scored(
    method: str,
    residuals: Floats,
    logs: Floats,
    models: tuple[CostRegressor, ...],
    owner: NDArray[np.intp],
    shape: ResidualShape | None,
) -> Calibration:
    """Return the calibration with the residuals as scores, normalised where there is a shape."""
    if shape is not None:
        rows = np.arange(len(logs))
        mean, spread = (
            part[rows, owner] for part in shape(np.broadcast_to(logs[:, None], (len(logs), len(models))))[:2]
        )
        residuals = (residuals - mean) / spread
    return Calibration(method, residuals, models, owner, shape)


def fit_rows(
    estimator: CostRegressor,
    alpha: Floats,
    y: Floats,
    kept: NDArray[np.intp],
    anchor: tuple[Floats, Floats] | None,
    weights: Floats | None = None,
) -> CostRegressor:
    """Return a copy of ``estimator``, fitted to some rows and the anchor.

    The ``kept`` rows are those of alpha (n, K) and y (n,). ``weights`` are of the n rows and then of the anchor's.
    """
    inputs, costs, rows = alpha[kept], y[kept], kept
    if anchor is not None:
        inputs, costs = np.vstack([inputs, anchor[0]]), np.r_[costs, anchor[1]]
        rows = np.r_[kept, np.arange(len(y), len(y) + len(anchor[1]))]
    fitted: CostRegressor = clone(estimator).fit(inputs, costs, None if weights is None else weights[rows])
    return fitted
