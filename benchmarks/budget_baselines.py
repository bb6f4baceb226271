"""What other tools predict latency with, in the form they use, behind one interface: for the comparisons in
docs/guide/cost-models.md.

Each has ``fit(X, y)`` and ``predict(X)`` over keep ratios, with the tuning its authors or common practice give it;
costs are learnt as logarithms where the original minimises relative error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import LinearRegression
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from budgets.regression import BilinearRidge, TopologyQuadratic
from budgets.selection import candidates
from budgets.work_classes import Groups, physics_features

__all__ = ["baselines", "contenders"]

Factory = Callable[[], Any]


def baselines(groups: Groups) -> dict[str, Factory]:
    """FLOPs-linear, and the forms of nn-Meter, LitePred, ECC and a full quadratic."""
    coarse = physics_features(groups, "coarse")
    work = coarse.names.index("work")

    def flops(alpha: np.ndarray) -> np.ndarray:
        return coarse(alpha)[:, [work]]

    def described(alpha: np.ndarray) -> np.ndarray:
        # nn-Meter and LitePred describe a kernel by its widths and by FLOPs and sizes.
        return np.hstack([alpha, coarse(alpha)[:, 1:]])

    return {
        # What most pruning papers assume: ordinary least squares on a constant and FLOPs.
        "FLOPs-linear": lambda: make_pipeline(FunctionTransformer(flops), LinearRegression()),
        "random forest (nn-Meter's form)": lambda: make_pipeline(
            FunctionTransformer(described), _logarithmic(RandomForestRegressor(200, min_samples_leaf=1, random_state=0))
        ),
        "MLP (LitePred's form)": lambda: make_pipeline(
            FunctionTransformer(described),
            StandardScaler(),
            _logarithmic(
                MLPRegressor(
                    hidden_layer_sizes=(64, 64),
                    solver="lbfgs",
                    alpha=0.1,
                    max_iter=500,
                    max_fun=100_000,
                    random_state=0,
                    tol=1e-3,
                ),
                standardise=True,
            ),
        ),
        "bilinear (ECC's form)": lambda: BilinearRidge(coarse),
        "full quadratic": lambda: TopologyQuadratic(),
    }


def contenders(groups: Groups) -> dict[str, Factory]:
    """Ours, by the names of ``budgets.selection.candidates``."""
    ours = candidates(groups)
    ours.pop("flops")  # FLOPs-linear stands beside them already
    return {f"ours: {name}": partial(clone, estimator) for name, estimator in ours.items()}


def _logarithmic(regressor: Any, standardise: bool = False) -> Any:
    if not standardise:
        return TransformedTargetRegressor(regressor, func=np.log, inverse_func=np.exp)
    scaled = TransformedTargetRegressor(regressor, transformer=StandardScaler())
    return TransformedTargetRegressor(scaled, func=np.log, inverse_func=np.exp)
