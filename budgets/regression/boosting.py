"""Gradient boosting on a physical model, with a smooth surrogate."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit
from sklearn import config_context
from sklearn.base import clone
from sklearn.tree import DecisionTreeRegressor

from budgets.blocks import Blocks
from budgets.features import FeatureMap
from budgets.regression.base import CostRegressor
from budgets.regression.linear import PhysicsNNLS
from dsa_hw.errors import ProfileError
from dsa_hw.utils.arrays import Floats

__all__ = ["MonotoneBoosting", "ResidualBoosting"]

# Rows are evaluated in pieces of at most this many (row, leaf, split) entries: 40 MB.
_PIECE: Final = 5_000_000


class _Boosting(CostRegressor):
    """Common part: ``F = base^p exp(b + r * sum of trees on the features)``."""

    _power: ClassVar[float]
    _learnt: ClassVar[tuple[str, ...]] = (
        *("features_", "base_", "floor_", "bias_", "scale_"),
        *("leaf_", "feature_", "threshold_", "sign_"),
    )

    features_: FeatureMap
    base_: CostRegressor
    floor_: float
    bias_: float
    scale_: Floats
    leaf_: Floats
    feature_: NDArray[np.intp]
    threshold_: Floats
    sign_: Floats

    def __init__(
        self,
        features: FeatureMap | None = None,
        *,
        base: CostRegressor | None = None,
        trees: int = 100,
        learning_rate: float = 0.1,
        max_depth: int = 3,
        min_samples_leaf: int = 3,
        smoothing: float = 0.25,
        sizes: ArrayLike | None = None,
        blocks: Blocks | None = None,
        outside: str = "extrapolate",
    ) -> None:
        """Store the parameters; `fit` checks them."""
        super().__init__(features, sizes=sizes, blocks=blocks, outside=outside)
        self.base = base
        self.trees = trees
        self.learning_rate = learning_rate
        self.max_depth = max_depth
        self.min_samples_leaf = min_samples_leaf
        self.smoothing = smoothing

    def _fit(self, alpha: Floats, y: Floats, weights: Floats) -> None:
        for name in ("trees", "learning_rate", "max_depth", "min_samples_leaf", "smoothing"):
            if not getattr(self, name) > 0:
                raise ProfileError(f"`{name}` must be more than 0; got {getattr(self, name)!r}.")
        # The constant feature cannot split; it is kept so that indices are those of the map.
        self.features_ = FeatureMap.monomials(alpha.shape[1], ()) if self.features is None else self.features
        base = PhysicsNNLS(self.features) if self.base is None else clone(self.base)
        self.base_ = base.fit(alpha, y, weights)
        # A base that predicts 0 has no logarithm; it is replaced by a thousandth of the smallest cost seen.
        self.floor_ = 1e-3 * float(y.min())
        phi = self.features_(alpha)
        spread = phi.std(0)
        self.scale_ = self.smoothing * np.where(spread > 0, spread, 1.0)
        target = np.log(y) - self._power * np.log(np.maximum(self.base_.at(alpha), self.floor_))
        self.bias_ = float(np.average(target, weights=weights))
        residual = target - self.bias_
        paths: list[tuple[float, list[tuple[int, float, float]]]] = []
        # Trees use float32. Convert and check once instead of for each tree, which would take most of the time.
        single = np.ascontiguousarray(phi, np.float32)
        with config_context(assume_finite=True, skip_parameter_validation=True):
            for seed in range(self.trees):
                tree = DecisionTreeRegressor(
                    max_depth=self.max_depth,
                    min_samples_leaf=min(self.min_samples_leaf, len(y) // 2),
                    monotonic_cst=np.ones(phi.shape[1], np.int8) if self.monotone else None,
                    random_state=seed,
                ).fit(single, residual, sample_weight=weights, check_input=False)
                found = _paths(tree.tree_, self.learning_rate)
                paths += found
                residual = residual - _leaves(phi, *_padded(found, self.max_depth)).sum(-1)
        self.leaf_, self.feature_, self.threshold_, self.sign_ = _padded(paths, self.max_depth)

    def _predict(self, alpha: Floats) -> Floats:
        phi = self.features_(alpha)
        pieces = np.array_split(phi, 1 + phi.shape[0] * self.feature_.size // _PIECE)
        sums = [_leaves(x, self.leaf_, self.feature_, self.threshold_, self.sign_).sum(-1) for x in pieces]
        scale = np.maximum(self.base_.at(alpha), self.floor_) ** self._power
        return np.asarray(scale * np.exp(self.bias_ + np.concatenate(sums)), np.float64)

    def _smooth(self, alpha: Floats) -> Floats:
        gates = self._gates(self.features_(alpha))
        soft = np.exp(self.bias_ + (self.leaf_ * gates.prod(-1)).sum(-1))
        return np.asarray(np.maximum(self.base_.at(alpha), self.floor_) ** self._power * soft, np.float64)

    def _gates(self, phi: Floats) -> Floats:
        """Return the soft splits at features (n, d), shape (n, leaves, depth)."""
        scaled = self.sign_ * (phi[:, self.feature_] - self.threshold_) / self.scale_[self.feature_]
        return np.where(self.sign_ == 0, 1.0, expit(scaled))

    def _gradient(self, alpha: Floats) -> Floats:
        phi = self.features_(alpha)
        gates = self._gates(phi)
        weights = self.leaf_ * gates.prod(-1)
        # d prod / dx_f = prod * sum over the path's splits on f of sign (1 - gate) / tau
        slopes = weights[..., None] * (self.sign_ * (1 - gates) / self.scale_[self.feature_])
        by_feature = np.zeros(phi.shape)
        np.add.at(by_feature.T, self.feature_.ravel(), slopes.reshape(len(phi), -1).T)
        soft = np.einsum("nd,ndk->nk", by_feature, self.features_.jacobian(alpha))
        # dF / F = p dbase / base + d(sum of soft trees); the first is 0 where the floor holds.
        base = self.base_.at(alpha)[:, None]
        steep = np.where(base > self.floor_, self._power * self.base_.slope(alpha) / np.maximum(base, self.floor_), 0.0)
        value = np.maximum(base, self.floor_) ** self._power * np.exp(self.bias_ + weights.sum(-1, keepdims=True))
        return np.asarray(value * (steep + soft), np.float64)

    def _value(self, alpha: torch.Tensor) -> torch.Tensor:
        def tensor(array: Floats) -> torch.Tensor:
            return torch.as_tensor(array, dtype=alpha.dtype, device=alpha.device)

        index = torch.as_tensor(self.feature_, device=alpha.device)
        phi = self.features_.value(alpha)
        scaled = tensor(self.sign_) * (phi[..., index] - tensor(self.threshold_)) / tensor(self.scale_[self.feature_])
        gates = torch.where(tensor(self.sign_) == 0, torch.ones((), dtype=alpha.dtype), torch.sigmoid(scaled))
        soft = torch.exp(self.bias_ + (tensor(self.leaf_) * gates.prod(-1)).sum(-1))
        return self.base_.value(alpha).clamp_min(self.floor_) ** self._power * soft


class MonotoneBoosting(_Boosting):
    """Monotone boosting: ``F = base^0.9 exp(b + trees)`` with non-decreasing trees.

    Features are non-decreasing in alpha (or are the columns of X with ``features=None``), each tree is non-decreasing
    in every feature, the base (``PhysicsNNLS(features)`` by default) is monotone, and so is F. The power below 1 leaves
    the trees a rising residual, so that they can also correct the base downwards without falling. The trees are
    ``DecisionTreeRegressor(monotonic_cst=1)``, whose ``tree_`` is public and can be written to JSON, unlike the trees
    of histogram boosting.

    ``predict`` is the trees: piecewise constant corrections, of gradient 0 almost everywhere. ``gradient`` and
    ``value`` therefore belong to a **smooth surrogate**, not to ``predict``: each split's step is replaced by a sigmoid
    of width ``smoothing`` standard deviations of its feature,

        tree(x) = sum_leaves v_l prod_{splits on the path} sigmoid(+-(x_f - t) / tau_f)

    A soft split is (1 - s) L + s R with R >= L everywhere below it, so the surrogate is non-decreasing as well. Outside
    the profiled range the trees are constant, so F follows its base.
    """

    _monotone: ClassVar[bool] = True
    _power: ClassVar[float] = 0.9


class ResidualBoosting(_Boosting):
    """Boosting without constraint: ``F = base exp(b + trees)``.

    For costs that can fall with a keep ratio, and for hundreds of rows.

    Gradients are those of a smooth surrogate, as in ``MonotoneBoosting``. F need not be monotone.
    """

    _monotone: ClassVar[bool] = False
    _power: ClassVar[float] = 1.0


def _paths(tree: object, rate: float) -> list[tuple[float, list[tuple[int, float, float]]]]:
    """Return the leaves of a tree: value times ``rate``, and the path to it.

    A path is the (feature, threshold, sign) of each split.
    """
    left, right = tree.children_left, tree.children_right  # type: ignore[attr-defined]
    feature, threshold, value = tree.feature, tree.threshold, tree.value  # type: ignore[attr-defined]
    found: list[tuple[float, list[tuple[int, float, float]]]] = []
    stack: list[tuple[int, list[tuple[int, float, float]]]] = [(0, [])]
    while stack:
        node, path = stack.pop()
        if left[node] == -1:
            found.append((rate * float(value[node].ravel()[0]), path))
            continue
        split = (int(feature[node]), float(threshold[node]))
        stack += [(int(left[node]), [*path, (*split, -1.0)]), (int(right[node]), [*path, (*split, 1.0)])]
    return found


def _padded(
    paths: list[tuple[float, list[tuple[int, float, float]]]], depth: int
) -> tuple[Floats, NDArray[np.intp], Floats, Floats]:
    """Leaves (L,), features, thresholds and signs (L, depth); sign 0 marks padding."""
    leaf = np.array([value for value, _ in paths])
    feature, threshold, sign = (
        np.zeros((len(paths), depth), np.intp),
        np.zeros((len(paths), depth)),
        np.zeros((len(paths), depth)),
    )
    for row, (_, path) in enumerate(paths):
        for column, (f, t, s) in enumerate(path):
            feature[row, column], threshold[row, column], sign[row, column] = f, t, s
    return leaf, feature, threshold, sign


def _leaves(phi: Floats, leaf: Floats, feature: NDArray[np.intp], threshold: Floats, sign: Floats) -> Floats:
    """Return the value of each leaf where its path is taken, else 0: (n, L).

    A split sends x <= t to the left (sign -1).
    """
    right = phi[:, feature] > threshold
    taken = np.where(sign == 0, True, right == (sign > 0)).all(-1)
    return np.where(taken, leaf, 0.0)
