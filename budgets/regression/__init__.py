"""Cost estimators: scikit-learn regressors over keep ratios."""

from __future__ import annotations

from budgets.regression.base import CostRegressor
from budgets.regression.boosting import MonotoneBoosting, ResidualBoosting
from budgets.regression.fastest_kernel import FastestKernel
from budgets.regression.gaussian_process import GPResidual
from budgets.regression.linear import BilinearRidge, PerOperationAdditive, PhysicsNNLS, TopologyQuadratic

__all__ = [
    "BilinearRidge",
    "CostRegressor",
    "FastestKernel",
    "GPResidual",
    "MonotoneBoosting",
    "PerOperationAdditive",
    "PhysicsNNLS",
    "ResidualBoosting",
    "TopologyQuadratic",
]
