"""Conformal calibration of relative residuals: bounds with a stated coverage.

Let ``s_i = y_i / f_i(x_i)`` be the ratio of a measured cost to the prediction of a model f_i that was not fitted to it.

* **split**: one model, and the ratios of n calibration configurations that it was not fitted to. The bound is
  ``q f(x)`` with q the ceil((n + 1) c)-th smallest ratio. If calibration and test configurations are exchangeable,
  P(y <= q f(x)) >= c, and at most c + 1 / (n + 1) without ties (Vovk; Lei et al. 2018).
* **jackknife+** (Barber et al. 2021): f_i is fitted without configuration i, and the bound is the ceil((n + 1) c)-th
  smallest of ``s_i f_i(x)`` over i. No configuration is spent on calibration. Their proof compares y_i with f_ij(x_i)
  only through the order of scores, so it holds for ratios and for a one-sided bound: P(y <= bound) >= 1 - 2 (1 - c),
  and about c in practice.
* **CV+**: the same with models that leave out a fold; P >= 1 - 2 (1 - c) - sqrt(2 / n).

The theorems are about a procedure, and a choice among estimators by cross-validation is part of it: where configuration
i contributed to choosing an estimator that suits it, ``s_i`` is too close to 1 and the bound too low. So
``choose(rows)`` returns the estimator that is chosen without the errors of the configurations left out. This removes
the direct effect. An indirect effect remains: the errors of the *other* configurations come from fits that included i.
Repeating the whole cross-validation for each i would remove it too, at n times the cost;
docs/benchmarks/cost-models.md compares the two. Split calibration needs neither, since its configurations have no part
in the choice.

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
from dsa_hw.errors import ProfileError
from dsa_hw.utils.arrays import Floats

__all__ = ["METHODS", "Calibration", "calibrate", "fit_rows"]

METHODS: Final = ("jackknife+", "cv+", "split")


@dataclass(frozen=True, eq=False)
class Calibration:
    """What bounds are computed from.

    Attributes:
        method: "jackknife+", "cv+" or "split".
        ratios: (n,) measured cost over predicted cost, ``s_i``.
        models: The models that predicted; none was fitted to the configurations whose ratios it has.
        owner: (n,) index of the model of each ratio.
    """

    method: str
    ratios: Floats
    models: tuple[CostRegressor, ...]
    owner: NDArray[np.intp]

    def guarantee(self, confidence: float) -> float:
        """Return the least coverage by theorem at this ``confidence``.

        The configurations must be exchangeable. Where the estimator was chosen with them, the theorem covers only
        ``"split"``; see the module.
        """
        if self.method == "split":
            return confidence
        bound = 2 * confidence - 1
        return max(0.0, bound - (math.sqrt(2 / len(self.ratios)) if self.method == "cv+" else 0.0))

    def rank(self, confidence: float) -> int:
        """Return ceil((n + 1) c), the number of the order statistic that is the bound.

        Raises:
            ProfileError: There are too few configurations for this ``confidence``.
        """
        if not 0 < confidence < 1:
            raise ProfileError(f"`confidence` must lie strictly between 0 and 1, e.g. 0.9; got {confidence!r}.")
        n = len(self.ratios)
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

        The second value is the index of the ratio that attains it, (n,).
        """
        return self._order(alpha, self.rank(confidence))

    def lower(self, alpha: Floats, confidence: float) -> tuple[Floats, NDArray[np.intp]]:
        """Return the lower bound, the floor((n + 1)(1 - c))-th smallest.

        The second value is the index of the ratio that attains it, (n,).
        """
        return self._order(alpha, len(self.ratios) + 1 - self.rank(confidence))

    def _order(self, alpha: Floats, rank: int) -> tuple[Floats, NDArray[np.intp]]:
        predictions = np.stack([model.at(alpha) for model in self.models], -1)[:, self.owner] * self.ratios
        index = np.argpartition(predictions, rank - 1, axis=-1)[:, rank - 1]
        return np.take_along_axis(predictions, index[:, None], -1)[:, 0], index

    def upper_gradient(self, alpha: Floats, confidence: float) -> Floats:
        """Return the gradient of ``upper`` at (n, K), shape (n, K).

        It is that of the model which attains the bound.
        """
        _, index = self.upper(alpha, confidence)
        rows = [
            self.ratios[i] * self.models[self.owner[i]].slope(point[None])[0]
            for i, point in zip(index, alpha, strict=True)
        ]
        return np.array(rows)

    def upper_value(self, alpha: torch.Tensor, confidence: float) -> torch.Tensor:
        """Return ``upper`` at keep ratios (..., K), differentiable, shape (...)."""
        predictions = torch.stack([model.value(alpha) for model in self.models], -1)
        ratios = torch.as_tensor(self.ratios, dtype=alpha.dtype, device=alpha.device)
        owner = torch.as_tensor(self.owner, device=alpha.device)
        return (predictions[..., owner] * ratios).kthvalue(self.rank(confidence), dim=-1).values


def calibrate(
    estimator: CostRegressor,
    alpha: Floats,
    y: Floats,
    *,
    method: str = "jackknife+",
    anchor: tuple[Floats, Floats] | None = None,
    calibration: tuple[Floats, Floats] | None = None,
    choose: Callable[[NDArray[np.intp]], CostRegressor] | None = None,
    seed: int = 0,
) -> Calibration:
    """Calibrate a fitted estimator.

    Args:
        estimator: Fitted to the training data.
        alpha: (n, K) keep ratios of the training data.
        y: (n,) costs of the training data.
        method: "jackknife+", "cv+" or "split".
        anchor: Keep ratios and costs that are part of every fit and of no ratio, since they are not drawn at random.
        calibration: Keep ratios and costs that were not fitted; required for "split", unused otherwise.
        choose: ``choose(rows)`` returns the estimator that is chosen without the errors of these rows; None where the
            data had no part in choosing ``estimator``.
        seed: Of the folds.

    Raises:
        ProfileError: The method is unknown, or "split" has no calibration data.
    """
    if method not in METHODS:
        raise ProfileError(f"Unknown calibration {method!r}. Available calibrations: {', '.join(METHODS)}.")
    if method == "split":
        if calibration is None or len(calibration[1]) == 0:
            raise ProfileError(
                "Split calibration needs held-out configurations, and the profile has none. Profile with --holdout 20."
            )
        ratios = calibration[1] / estimator.predict(calibration[0])
        return Calibration(method, ratios, (estimator,), np.zeros(len(ratios), np.intp))
    folds = list(
        KFold(len(y) if method == "jackknife+" else min(10, len(y)), shuffle=True, random_state=seed).split(alpha)
    )
    ratios, owner, models = np.empty(len(y)), np.empty(len(y), np.intp), []
    for number, (kept, left) in enumerate(folds):
        template = estimator if choose is None else choose(left)
        model = fit_rows(template, alpha, y, kept, anchor)
        ratios[left], owner[left] = y[left] / model.predict(alpha[left]), number
        models.append(model)
    return Calibration(method, ratios, tuple(models), owner)


def fit_rows(
    estimator: CostRegressor,
    alpha: Floats,
    y: Floats,
    kept: NDArray[np.intp],
    anchor: tuple[Floats, Floats] | None,
) -> CostRegressor:
    """Return a copy of ``estimator``, fitted to some rows and the anchor.

    The ``kept`` rows are those of alpha (n, K) and y (n,).
    """
    model = clone(estimator)
    inputs, costs = alpha[kept], y[kept]
    if anchor is not None:
        inputs, costs = np.vstack([inputs, anchor[0]]), np.r_[costs, anchor[1]]
    fitted: CostRegressor = model.fit(inputs, costs)
    return fitted
