"""Linear estimators recover costs of their own form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from budgets.regression import (
    BilinearRidge,
    PhysicsNNLS,
    TopologyQuadratic,
)
from budgets.selection import candidates
from budgets.work_classes import physics_features


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), size=st.integers(2, 10))
def test_physics_recovers_a_physical_cost(network: Callable[..., Any], seed: int, size: int) -> None:
    groups = network(size=size, operations=3 * size, seed=seed)
    phi = physics_features(groups)
    rng = np.random.default_rng(seed)
    truth = phi.combine(rng.uniform(0, 1, len(phi)))
    alpha = rng.uniform(0.1, 1, (60, size))
    model = PhysicsNNLS(phi).fit(alpha, truth(alpha))
    unseen = rng.uniform(0.1, 1, (60, size))
    np.testing.assert_allclose(model.predict(unseen), truth(unseen), rtol=1e-6)
    assert (model.coef_ >= 0).all()


def test_quadratic_and_bilinear_recover_their_own_form(network: Callable[..., Any]) -> None:
    groups = network(size=5, operations=12, seed=2)
    phi = physics_features(groups)
    rng = np.random.default_rng(0)
    alpha, unseen = rng.uniform(0.1, 1, (400, 5)), rng.uniform(0.1, 1, (50, 5))
    for kind in (TopologyQuadratic, BilinearRidge):
        own = kind(phi)._map(5)
        truth = own.combine(rng.uniform(0.5, 1, len(own)))
        model = kind(phi).fit(alpha, truth(alpha))
        np.testing.assert_allclose(model.predict(unseen), truth(unseen), rtol=2e-4)


def test_per_operation_beats_classes_where_operations_differ(
    network: Callable[..., Any], cost: Callable[..., Any]
) -> None:
    groups = network(size=6, operations=20, seed=9)
    rng = np.random.default_rng(0)
    alpha, unseen = rng.uniform(0.2, 1, (60, 6)), rng.uniform(0.2, 1, (400, 6))
    y, truth = cost(groups, alpha, 0.8), cost(groups, unseen, 0.8)
    found = candidates(groups)
    error = {
        name: np.abs(found[name].fit(alpha, y).predict(unseen) / truth - 1).mean()
        for name in ("physics", "per operation")
    }
    assert error["per operation"] < 0.5 * error["physics"]
