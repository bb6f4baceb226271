"""A GPU library that picks the fastest of several algorithms for each operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from budgets.features import FeatureMap
from budgets.kernels import ALGORITHMS, SHAPE, THREE_BY_THREE, Algorithm, between, whole
from budgets.regression.base import CostRegressor
from budgets.regression.linear import _nnls
from dsa_hw.errors import ProfileError
from dsa_hw.utils.arrays import Bools, Floats

__all__ = ["FastestKernel"]

# Streaming multiprocessors of GPUs from a Jetson Nano to an H100.
_PROCESSORS: Final = (1, 2, 8, 16, 28, 40, 46, 58, 72, 80, 108, 132)
_ROUNDS: Final = 12
# FLOPs in the time of one byte, where the search starts: 12 on an A100, 25 on a T4 (fp32, from their data sheets).
_BALANCE: Final = 16.0


class FastestKernel(CostRegressor):
    """Physics features, and for each operation the fastest of several algorithms.

        F = w' phi(alpha) + sum_o min_a v_a' psi_oa(alpha),      w, v >= 0

    phi are features as in ``PhysicsNNLS``, without the multiply-adds of the operations o in ``shapes``. psi_oa are the
    waves times reads, the waves, and the transformed elements of operation o with algorithm a (``budgets.kernels``).
    All rise with every keep ratio and so does their minimum: F is monotone.

    For a given choice of algorithms F is linear, and w, v solve non-negative least squares as in ``PhysicsNNLS``. For
    given w, v the choice is the minimum. `fit` alternates between the two, starting from the algorithms' FLOPs and
    bytes, for each of some usual numbers of processors, and keeps the solution with the lowest error. An algorithm
    without a cost per read is not used.

    ``predict`` has the steps of tiles and waves. ``value`` and ``gradient`` belong to the continuous function in which
    each number of tiles or waves x is max(1, x + 1/2) instead of ceil(x): the same on average, and monotone. Their
    derivatives are exact, and one-sided where a maximum or the fastest algorithm changes.

    Args:
        features: phi; None for 1 and the columns of X.
        shapes: What `budgets.kernels.kernel_shapes` returns: four features for each operation, affine in alpha. None
            for no operation.
        sizes: See `CostRegressor`.
        outside: See `CostRegressor`.
    """

    _monotone: ClassVar[bool] = True
    _learnt: ClassVar[tuple[str, ...]] = ("features_", "coef_", "kernels_", "processors_")
    blocks = None

    features_: FeatureMap
    coef_: Floats
    kernels_: Floats
    processors_: int

    def __init__(
        self,
        features: FeatureMap | None = None,
        *,
        shapes: FeatureMap | None = None,
        sizes: ArrayLike | None = None,
        outside: str = "extrapolate",
    ) -> None:
        """Store the parameters; `fit` checks them."""
        self.features = features
        self.shapes = shapes
        self.sizes = sizes
        self.outside = outside

    def _fit(self, alpha: Floats, y: Floats, weights: Floats) -> None:
        self.features_ = FeatureMap.monomials(alpha.shape[1], ()) if self.features is None else self.features
        if self.shapes is not None and self.shapes.size != alpha.shape[1]:
            raise ProfileError(f"X has {alpha.shape[1]} channel groups, but `shapes` has {self.shapes.size}.")
        self._restore()
        shapes, root = self._shapes(alpha), np.sqrt(weights)
        scale = root / y
        phi = self.features_(alpha) * scale[:, None]
        best: tuple[float, int, Floats, Floats] | None = None
        for processors in _PROCESSORS if self.shapes is not None else (1,):
            psi = _features(shapes, processors, whole)
            speeds, before = _start(processors), None
            for _ in range(_ROUNDS):
                choice = self._cheapest(psi, speeds)[1]
                if before is not None and (choice == before).all():
                    break
                before = choice
                # (n, algorithm, feature): the work of the operations that use each algorithm.
                used = np.stack([(psi[a] * (choice == a)[..., None]).sum(1) for a in range(len(ALGORITHMS))], 1)
                design = np.hstack([phi, used.reshape(len(y), -1) * scale[:, None]])
                found = _nnls(design, root)
                coef, speeds = found[: phi.shape[1]], found[phi.shape[1] :].reshape(len(ALGORITHMS), -1)
                error = float(np.sum((phi @ coef + self._cheapest(psi, speeds)[0].sum(1) * scale - root) ** 2))
                if best is None or error < best[0]:
                    best = (error, processors, coef, speeds)
        assert best is not None
        _, self.processors_, self.coef_, self.kernels_ = best

    def _restore(self) -> None:
        size = self.features_.size
        columns = 0 if self.shapes is None else len(self.shapes)
        self._constant, self._matrix = np.zeros(columns), np.zeros((columns, size))
        self._three: Bools = np.zeros(columns // len(SHAPE), bool)
        learnt = getattr(self, "kernels_", None)  # None in the first fit
        if learnt is not None and not (learnt.shape == (len(ALGORITHMS), 3) and self.processors_ >= 1):
            raise ProfileError(f"`kernels_` must have shape ({len(ALGORITHMS)}, 3), and `processors_` be at least 1.")
        if self.shapes is None:
            return
        if self.shapes.pairs() or columns % len(SHAPE):
            raise ProfileError(f"`shapes` must have {len(SHAPE)} affine features for each operation.")
        origin = np.zeros(size)
        self._constant = self.shapes(origin) * self.shapes.dense
        self._matrix = self.shapes.jacobian(origin) * self.shapes.dense[:, None]
        self._three = np.array(self.shapes.classes[:: len(SHAPE)]) == THREE_BY_THREE

    def _shapes(self, alpha: Floats) -> Floats:
        """Return the shapes of the operations, (n, operations, 4)."""
        return (alpha @ self._matrix.T + self._constant).reshape(len(alpha), -1, len(SHAPE))

    def _cheapest(self, psi: list[Floats], speeds: Floats) -> tuple[Floats, NDArray[np.intp]]:
        """Return the cost of each operation and the number of its fastest algorithm, each (n, operations)."""
        costs = np.stack([p @ v for p, v in zip(psi, speeds, strict=True)])
        costs = np.where(self._usable(speeds)[:, None, :], costs, np.inf)
        choice = costs.argmin(0)
        return np.take_along_axis(costs, choice[None], 0)[0], choice

    def _usable(self, speeds: Floats) -> Bools:
        """Return which algorithms an operation can use, (algorithms, operations).

        Only a 3x3 convolution has a choice. Where no algorithm has a cost per read, the last one counts.
        """
        usable = np.outer(speeds[:, 0] > 0, self._three)
        usable[-1] |= ~usable.any(0)
        return usable

    def _predict(self, alpha: Floats) -> Floats:
        psi = _features(self._shapes(alpha), self.processors_, whole)
        return np.asarray(self.features_(alpha) @ self.coef_ + self._cheapest(psi, self.kernels_)[0].sum(1), np.float64)

    def _smooth(self, alpha: Floats) -> Floats:
        psi = _features(self._shapes(alpha), self.processors_, between)
        return np.asarray(self.features_(alpha) @ self.coef_ + self._cheapest(psi, self.kernels_)[0].sum(1), np.float64)

    def _gradient(self, alpha: Floats) -> Floats:
        gradient = self.features_.combine(self.coef_).gradient(alpha)
        shapes = self._shapes(alpha)
        choice = self._cheapest(_features(shapes, self.processors_, between), self.kernels_)[1]
        slopes = [
            _slope(shapes, algorithm, self.processors_, speeds)
            for algorithm, speeds in zip(ALGORITHMS, self.kernels_, strict=True)
        ]
        chosen = np.take_along_axis(np.stack(slopes), choice[None, ..., None], 0)[0]
        return np.asarray(gradient + chosen.reshape(len(alpha), -1) @ self._matrix, np.float64)

    def _value(self, alpha: torch.Tensor) -> torch.Tensor:
        def tensor(array: Floats) -> torch.Tensor:
            return torch.as_tensor(array, dtype=alpha.dtype, device=alpha.device)

        total = self.features_.value(alpha) @ tensor(self.coef_)
        shapes = alpha @ tensor(self._matrix).T + tensor(self._constant)
        images, side, reads, outputs = shapes.unflatten(-1, (-1, len(SHAPE))).unbind(-1)
        costs = []
        for algorithm, (a, b, c), usable in zip(
            ALGORITHMS, self.kernels_.tolist(), self._usable(self.kernels_), strict=True
        ):
            # Positions do not depend on the keep ratios of a network.
            per_image = tensor(algorithm.positions(side.detach().double().cpu().numpy(), whole))
            rows = tensor(whole((images * per_image).detach().double().cpu().numpy() / algorithm.rows))
            tiles = algorithm.products * rows * _between(outputs / algorithm.channels)
            cost = _between(tiles / self.processors_) * (a * reads + b)
            if algorithm.transforms:
                cost = cost + c * (images * per_image * (reads / 9 + outputs) + reads / 9 * outputs)
            costs.append(torch.where(torch.as_tensor(usable, device=alpha.device), cost, torch.inf))
        return total + torch.stack(costs).min(0).values.sum(-1)

    def algorithms(self, X: ArrayLike) -> NDArray[np.intp]:  # noqa: N803
        """Return the number in `budgets.kernels.ALGORITHMS` of each operation's algorithm at X, (n, operations)."""
        psi = _features(self._shapes(self._check(X)), self.processors_, whole)
        return self._cheapest(psi, self.kernels_)[1]

    def coefficients(self) -> dict[str, float]:
        """Return the cost of each feature where it is 1, in the unit of y."""
        found = dict(zip(self.features_.names, self.coef_.tolist(), strict=True))
        for algorithm, speeds in zip(ALGORITHMS, self.kernels_.tolist(), strict=True):
            for name, speed in zip(("wave and read", "wave", "transformed element"), speeds, strict=True):
                found[f"{algorithm.name}: {name}"] = speed
        return found


def _start(processors: int) -> Floats:
    """Return the speeds at which the search starts, (algorithms, 3): FLOPs, and bytes as FLOPs."""
    return np.array(
        [
            [processors * a.rows * a.channels * a.flops, 0.0, 8 * a.products * _BALANCE if a.transforms else 0.0]
            for a in ALGORITHMS
        ]
    )


def _features(shapes: Floats, processors: int, up: Callable[[Floats], Floats]) -> list[Floats]:
    """Return psi of each algorithm, (n, operations, 3), for shapes (n, operations, 4); ``up`` rounds up."""
    images, side, reads, outputs = np.moveaxis(shapes, -1, 0)
    found = []
    for algorithm in ALGORITHMS:
        positions = images * algorithm.positions(side, whole)
        tiles = algorithm.products * whole(positions / algorithm.rows) * up(outputs / algorithm.channels)
        waves = up(tiles / processors)
        inputs = reads / 9
        transformed = positions * (inputs + outputs) + inputs * outputs if algorithm.transforms else 0 * reads
        found.append(np.stack([waves * reads, waves, transformed], -1))
    return found


def _slope(shapes: Floats, algorithm: Algorithm, processors: int, speeds: Floats) -> Floats:
    """Return the derivatives of an algorithm's cost by images, side, reads and outputs, (n, operations, 4).

    With t = max(1, outputs / channels + 1/2) and waves w = max(1, g t + 1/2), g = products rows / processors,

        cost = w (a reads + b) + c (positions (inputs + outputs) + inputs outputs),      dw / doutputs = g / channels

    with inputs = reads / 9, where neither maximum is 1. Whole rows and patches have derivative 0.
    """
    images, side, reads, outputs = np.moveaxis(shapes, -1, 0)
    a, b, c = speeds if algorithm.transforms else (*speeds[:2], 0.0)
    per_image = algorithm.positions(side, whole)
    positions = images * per_image
    each = algorithm.products * whole(positions / algorithm.rows) / processors
    tiles = between(outputs / algorithm.channels)
    steep = (outputs / algorithm.channels >= 0.5) & (each * tiles >= 0.5)
    return np.stack(
        [
            c * per_image * (reads / 9 + outputs),
            np.zeros_like(reads),
            a * between(each * tiles) + c * (positions + outputs) / 9,
            (a * reads + b) * steep * each / algorithm.channels + c * (positions + reads / 9),
        ],
        -1,
    )


def _between(x: torch.Tensor) -> torch.Tensor:
    # torch.where, because a clamp halves the derivative at its corner.
    return torch.where(x >= 0.5, x + 0.5, 1.0)
