"""Honest bounds: conformal calibration of relative residuals.

Let ``s_i = y_i / f_i(x_i)`` be the ratio of a measured cost to a prediction by a model f_i that has not seen it.

* **split**: one model, ratios on n calibration configurations that it was not fitted to. The bound is ``q f(x)`` with q
  the ceil((n + 1) c)-th smallest ratio. If calibration and test configurations are exchangeable, P(y <= q f(x)) >= c,
  and at most c + 1 / (n + 1) without ties (Vovk; Lei et al. 2018).
* **jackknife+** (Barber et al. 2021): f_i is fitted without configuration i and the bound is the ceil((n + 1) c)-th
  smallest of ``s_i f_i(x)`` over i. No configuration is spent on calibration. Their tournament argument compares y_i
  with f_ij(x_i) only through the order of scores, so it holds for ratios and for a one-sided bound: P(y <= bound) >= 1
  - 2 (1 - c), and about c in practice.
* **CV+**: the same with models that leave out a fold; P >= 1 - 2 (1 - c) - sqrt(2 / n).

The theorems are about a procedure, and where an estimator is chosen by cross-validation the choice is part of it: if
configuration i helped to elect the estimator that suits it, ``s_i`` is too near 1 and the bound too low. So ``choose``
gives, for the configurations left out, the estimator that is chosen when their errors do not count. That removes the
direct effect. An indirect one stays: the errors of the *other* configurations come from fits that saw i. Repeating the
whole cross-validation for each i would remove this too, at n times the cost; docs/benchmarks/cost-models.md compares
the two. Split calibration needs neither: its configurations have no part in the choice.

All three speak of configurations drawn like the measured ones. A configuration that an allocator has chosen *because*
its predicted cost is low is not such a draw (the winner's curse), so the bound is a guide inside the allocator and the
re-measurement of the result is the guarantee.
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

__all__ = ["Calibration", "calibrate"]

METHODS: Final = ("jackknife+", "cv+", "split")


@dataclass(frozen=True, eq=False)
class Calibration:
    """Ratios ``s_i`` (n,), the models that were not fitted to them, and which model belongs to which ratio (n,)."""

    method: str
    ratios: Floats
    models: tuple[CostRegressor, ...]
    owner: NDArray[np.intp]

    def guarantee(self, confidence: float) -> float:
        """Least coverage that theory promises for exchangeable configurations at this ``confidence``.

        Where the estimator was chosen by the same configurations, only ``"split"`` has it by theorem (see the module).
        """
        if self.method == "split":
            return confidence
        bound = 2 * confidence - 1
        return max(0.0, bound - (math.sqrt(2 / len(self.ratios)) if self.method == "cv+" else 0.0))

    def rank(self, confidence: float) -> int:
        """ceil((n + 1) c), the order statistic that bounds."""
        if not 0 < confidence < 1:
            raise ProfileError(f"confidence={confidence!r} must lie strictly between 0 and 1, for example 0.9")
        n = len(self.ratios)
        # Guard against (n + 1) c being an integer that floating point puts a hair above.
        rank = math.ceil((n + 1) * confidence - 1e-9)
        if rank > n:
            raise ProfileError(
                f"confidence={confidence:g} needs at least {math.ceil(confidence / (1 - confidence) - 1e-9)} "
                f"calibration configurations, there are {n}; ask for at most {n / (n + 1):.3f} or measure more"
            )
        return rank

    def upper(self, alpha: Floats, confidence: float) -> tuple[Floats, NDArray[np.intp]]:
        """Bound at keep ratios (n, K), shape (n,), and the ratio that attains it."""
        return self._order(alpha, self.rank(confidence))

    def lower(self, alpha: Floats, confidence: float) -> tuple[Floats, NDArray[np.intp]]:
        """Bound from below: the mirror image, the floor((n + 1)(1 - c))-th smallest."""
        return self._order(alpha, len(self.ratios) + 1 - self.rank(confidence))

    def _order(self, alpha: Floats, rank: int) -> tuple[Floats, NDArray[np.intp]]:
        predictions = np.stack([model.at(alpha) for model in self.models], -1)[:, self.owner] * self.ratios
        index = np.argpartition(predictions, rank - 1, axis=-1)[:, rank - 1]
        return np.take_along_axis(predictions, index[:, None], -1)[:, 0], index

    def upper_gradient(self, alpha: Floats, confidence: float) -> Floats:
        """Gradient of ``upper`` (n, K), shape (n, K): that of the model which attains the bound, almost everywhere."""
        _, index = self.upper(alpha, confidence)
        rows = [
            self.ratios[i] * self.models[self.owner[i]].slope(point[None])[0]
            for i, point in zip(index, alpha, strict=True)
        ]
        return np.array(rows)

    def upper_value(self, alpha: torch.Tensor, confidence: float) -> torch.Tensor:
        """``upper`` as a differentiable function of keep ratios (..., K), shape (...)."""
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
    """Calibrate a fitted ``estimator`` on the training data alpha (n, K), y (n,); ``"split"`` uses ``calibration``
    rows.

    ``anchor`` rows are part of every fit and of no ratio (they are not drawn like the others). ``choose(rows)`` is the
    estimator that would be used if these rows had no say; None means that ``estimator`` was not chosen by the data.
    """
    if method not in METHODS:
        raise ProfileError(f"calibration={method!r}: there are {', '.join(METHODS)}")
    if method == "split":
        if calibration is None or len(calibration[1]) == 0:
            raise ProfileError(
                "split calibration needs configurations that were not fitted to; the profile has no hold-out rows"
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
    """Return a copy of ``estimator``, fitted to the ``kept`` rows of alpha (n, K) and y (n,) and to the anchor."""
    model = clone(estimator)
    inputs, costs = alpha[kept], y[kept]
    if anchor is not None:
        inputs, costs = np.vstack([inputs, anchor[0]]), np.r_[costs, anchor[1]]
    fitted: CostRegressor = model.fit(inputs, costs)
    return fitted
