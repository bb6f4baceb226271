"""The Gaussian process on residuals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from budgets.regression import (
    GPResidual,
    PhysicsNNLS,
)
from budgets.work_classes import physics_features


def test_the_process_learns_residuals_of_physics(network: Callable[..., Any], cost: Callable[..., Any]) -> None:
    groups = network(size=4, operations=12, seed=3)
    phi = physics_features(groups)
    rng = np.random.default_rng(0)
    alpha, unseen = rng.uniform(0.2, 1, (120, 4)), rng.uniform(0.25, 0.95, (300, 4))

    def wavy(x: np.ndarray) -> np.ndarray:
        return cost(groups, x) * (1 + 0.1 * np.sin(4 * x.sum(-1)))

    base, model = PhysicsNNLS(phi).fit(alpha, wavy(alpha)), GPResidual(phi).fit(alpha, wavy(alpha))
    error = [np.abs(m.predict(unseen) / wavy(unseen) - 1).mean() for m in (base, model)]
    assert error[1] < 0.5 * error[0]
    # Far from the data the correction is gone and the base remains.
    far = np.full((1, 4), 50.0)
    np.testing.assert_allclose(model.predict(far), model.base_.predict(far), rtol=1e-9)
