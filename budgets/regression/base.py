"""Base class of the cost estimators."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data

from budgets.blocks import Blocks
from budgets.features import FeatureMap
from dsa_hw.errors import ProfileError
from dsa_hw.utils.arrays import Floats

__all__ = ["CostRegressor"]

OUTSIDE: Final = ("extrapolate", "clip", "refuse")


class CostRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Cost F(alpha) fitted to measurements.

    It follows scikit-learn's conventions: the constructor stores, ``fit`` validates, learnt attributes end in ``_``.
    Costs are times or energies, so ``y`` must be positive, and errors are relative: a fit minimises the squares of
    ``F(x) / y - 1``.

    Args:
        features: A `FeatureMap`, or None for features that do not depend on a network (see each class).
        sizes: None where X holds keep ratios; (K,) group sizes where X holds widths (X is then divided by them, and
            ``gradient`` is the derivative by width).
        blocks: None, or the `Blocks` of channels that the device computes: F is then a function of their columns, and
            ``features`` are of those columns. ``predict`` has steps; ``value`` and ``gradient`` belong to the chords.
        outside: Beyond the range of each column seen in ``fit``, ``"extrapolate"`` uses the formula as it is,
            ``"clip"`` moves the point to the border of the range (so the gradient there is 0), ``"refuse"`` raises
            ``ProfileError``.
    """

    # Attributes learnt by fit, beyond range and features, that make up a saved model (budgets.serialization).
    _learnt: ClassVar[tuple[str, ...]] = ()
    _monotone: ClassVar[bool] = False

    @property
    def monotone(self) -> bool:
        """Whether F cannot fall when a keep ratio grows."""
        return self._monotone and not (self.blocks is not None and self.blocks.narrow)

    def __init__(
        self,
        features: FeatureMap | None = None,
        *,
        sizes: ArrayLike | None = None,
        blocks: Blocks | None = None,
        outside: str = "extrapolate",
    ) -> None:
        """Store the parameters; `fit` checks them."""
        self.features = features
        self.sizes = sizes
        self.blocks = blocks
        self.outside = outside

    def fit(self, X: ArrayLike, y: ArrayLike, weights: ArrayLike | None = None) -> Self:  # noqa: N803
        """Fit to keep ratios (or widths) X (n, K) and positive costs y (n,).

        ``weights`` (n,) are inverse variances of the relative errors, up to a common factor; equal by default. They are
        not scikit-learn's ``sample_weight``: a weight of 2 is not the same as two rows, which would also count twice
        where a penalty is chosen by leave-one-out.
        """
        alpha, cost = self._validate(X, y)
        scaled = np.ones(len(cost)) if weights is None else np.asarray(weights, np.float64)
        if scaled.shape != cost.shape or not (np.isfinite(scaled) & (scaled > 0)).all():
            raise ProfileError(f"`weights` must be {cost.size} finite numbers above 0; got shape {scaled.shape}.")
        # Equal weights become exactly 1, and so have no effect on any rounding.
        self._fit(alpha, cost, scaled / scaled.max())
        return self

    def predict(self, X: ArrayLike) -> Floats:  # noqa: N803
        """Return the cost at X (n, K), shape (n,)."""
        return self.at(self._check(X))

    def gradient(self, X: ArrayLike) -> Floats:  # noqa: N803
        """Return the exact derivative of the cost by X (n, K), shape (n, K).

        It is 0 in directions that were clipped.
        """
        slope = self.slope(self._check(X))
        return slope if self.sizes is None else slope / np.asarray(self.sizes, np.float64)

    def at(self, alpha: Floats) -> Floats:
        """Return the cost at keep ratios (n, K), without validation.

        They must be finite float64. For inner loops.
        """
        inside = self._inside(alpha)
        return self._predict(inside if self.blocks is None else self.blocks(inside))

    def smooth(self, alpha: Floats) -> Floats:
        """Return what ``value`` returns at keep ratios (n, K), without validation.

        It is the cost whose gradient is ``slope``. For inner loops.
        """
        inside = self._inside(alpha)
        return self._smooth(inside if self.blocks is None else self.blocks.smooth(inside))

    def slope(self, alpha: Floats) -> Floats:
        """Return the gradient of ``smooth`` at keep ratios (n, K), without validation.

        They must be finite float64. For inner loops.
        """
        inside = self._inside(alpha)
        if self.blocks is None:
            slope = self._gradient(inside)
        else:
            slope = self.blocks.slope(inside, self._gradient(self.blocks.smooth(inside)))
        return slope if inside is alpha else np.where(alpha == inside, slope, 0.0)

    def value(self, alpha: torch.Tensor) -> torch.Tensor:
        """Return the differentiable cost at keep ratios (..., K), shape (...).

        With ``sizes``, at widths.
        """
        check_is_fitted(self)
        if alpha.shape[-1] != self.n_features_in_:
            raise ProfileError(
                f"{type(self).__name__} was fitted to {self.n_features_in_} channel groups; got {alpha.shape[-1]}."
            )
        if self.sizes is not None:
            alpha = alpha / torch.as_tensor(np.asarray(self.sizes, np.float64), dtype=alpha.dtype, device=alpha.device)
        if self.outside != "extrapolate":
            self._inside(alpha.detach().double().cpu().numpy())  # raises where outside="refuse" and a point is
        if self.outside == "clip":
            low, high = (
                torch.as_tensor(edge, dtype=alpha.dtype, device=alpha.device) for edge in (self.low_, self.high_)
            )
            alpha = torch.minimum(torch.maximum(alpha, low), high)
        return self._value(alpha if self.blocks is None else self.blocks.value(alpha))

    # Subclasses implement these, for keep ratios inside the range (with blocks: for their columns).
    def _fit(self, alpha: Floats, y: Floats, weights: Floats) -> None:
        raise NotImplementedError

    def _predict(self, alpha: Floats) -> Floats:
        raise NotImplementedError

    def _smooth(self, alpha: Floats) -> Floats:
        return self._predict(alpha)

    def _gradient(self, alpha: Floats) -> Floats:
        raise NotImplementedError

    def _value(self, alpha: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _restore(self) -> None:
        """Recompute what depends on the learnt attributes only, after loading."""

    def _validate(self, X: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:  # noqa: N803
        if self.outside not in OUTSIDE:
            raise ProfileError(f"`outside` must be one of {', '.join(OUTSIDE)}; got {self.outside!r}.")
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)  # noqa: N806
        cost = np.asarray(y, np.float64)
        self._not_negative(X)
        if not (cost > 0).all():
            raise ProfileError(f"Costs must be positive; {(cost <= 0).sum()} of {cost.size} are not.")
        features = self.features
        if self.blocks is not None and len(self.blocks.sizes) != self.n_features_in_:
            raise ProfileError(
                f"X has {self.n_features_in_} channel groups, but `blocks` has {len(self.blocks.sizes)}."
            )
        columns = self.n_features_in_ if self.blocks is None else self.blocks.columns
        if features is not None and features.size != columns:
            found = f"{self.n_features_in_} channel groups" if self.blocks is None else f"{columns} columns of blocks"
            raise ProfileError(f"X has {found}, but `features` has {features.size}.")
        alpha = self._ratios(X)
        self.low_, self.high_ = alpha.min(0), alpha.max(0)
        return (alpha if self.blocks is None else self.blocks(alpha)), cost

    def _check(self, X: ArrayLike) -> Floats:  # noqa: N803
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)  # noqa: N806
        self._not_negative(X)
        return self._ratios(X)

    def _not_negative(self, X: Any) -> None:  # noqa: N803
        if (X < 0).any():
            raise ProfileError(
                f"Negative values in data passed to {type(self).__name__}: keep ratios and widths must be at least 0."
            )

    def _ratios(self, X: Any) -> Floats:  # noqa: N803
        alpha = X if self.sizes is None else X / np.asarray(self.sizes, np.float64)
        return np.asarray(alpha, np.float64)

    def _inside(self, alpha: Floats) -> Floats:
        if self.outside == "extrapolate":
            return alpha
        if self.outside == "clip":
            return np.clip(alpha, self.low_, self.high_)
        # A width divided by a size must not be refused for a rounding error of float32.
        slack = 1e-6
        beyond = (alpha < self.low_ - slack) | (alpha > self.high_ + slack)
        if beyond.any():
            k = int(np.argmax(beyond.reshape(-1, alpha.shape[-1]).any(0)))
            raise ProfileError(
                f"The keep ratio of channel group {k} is outside the profiled range [{self.low_[k]:.3g}, "
                f"{self.high_[k]:.3g}]. Measure configurations there, or use outside='clip' or 'extrapolate'."
            )
        return alpha

    def __sklearn_tags__(self) -> Tags:
        """Return tags that say that costs and keep ratios are positive."""
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.target_tags.positive_only = True
        return tags
