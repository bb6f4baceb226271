"""Feature maps: closed-form Jacobian, torch and NumPy alike, monotone, exact on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from budgets.features import FeatureMap
from budgets.work_classes import physics_features
from dsa_hw.channels.counts import Count, Term
from dsa_hw.errors import ProfileError


@pytest.mark.parametrize("granularity", ["coarse", "classes", "operations"])
def test_jacobian_torch_and_quadratic_agree(network: Callable[..., Any], granularity: str) -> None:
    groups = network(size=7, operations=40, seed=5)
    phi = physics_features(groups, granularity)
    rng = np.random.default_rng(1)
    alpha = rng.uniform(0.1, 1, (3, 7))
    step = 1e-5
    numeric = np.stack([(phi(alpha + step * e) - phi(alpha - step * e)) / (2 * step) for e in np.eye(7)], -1)
    np.testing.assert_allclose(phi.jacobian(alpha), numeric, rtol=1e-6, atol=1e-10)
    np.testing.assert_allclose(phi.value(torch.tensor(alpha)).numpy(), phi(alpha), rtol=1e-12)
    weights = rng.uniform(0, 1, len(phi))
    form = phi.combine(weights)
    np.testing.assert_allclose(form(alpha), phi(alpha) @ weights, rtol=1e-12)
    np.testing.assert_allclose(form.gradient(alpha), np.einsum("d,ndk->nk", weights, phi.jacobian(alpha)), rtol=1e-10)
    np.testing.assert_array_equal(form.A, form.A.T)
    assert (form.A >= 0).all()
    assert (form.B >= 0).all()


def test_no_feature_falls_when_a_keep_ratio_grows(network: Callable[..., Any]) -> None:
    phi = physics_features(network(size=9, operations=40, seed=8), "operations")
    rng = np.random.default_rng(2)
    low = rng.uniform(0, 1, (20_000, 9))
    high = low + rng.uniform(0, 1, low.shape) * (1 - low)
    assert (phi(high) >= phi(low)).all()


def test_pairs_are_the_groups_that_meet(network: Callable[..., Any]) -> None:
    groups = network(size=6, operations=25, seed=11)
    met = set()
    for operation in groups.operations:
        for term in operation.flops:
            if len(term.factors) == 2:
                left, right = (set(np.flatnonzero(factor.coefficients).tolist()) for factor in term.factors)
                met |= {(min(i, j), max(i, j)) for i in left for j in right}
    assert set(physics_features(groups).pairs()) == met


def test_round_trip_is_bitwise(network: Callable[..., Any]) -> None:
    phi = physics_features(network(size=6, operations=25, seed=4), "operations")
    again = FeatureMap.from_dict(json.loads(json.dumps(phi.to_dict())))
    assert phi.same(again)
    assert phi.classes == again.classes
    alpha = np.random.default_rng(0).uniform(0, 1, (10, 6))
    assert np.array_equal(phi(alpha), again(alpha))


def test_terms_that_are_negative_or_cubic_are_refused() -> None:
    with pytest.raises(ProfileError, match="negative size"):
        FeatureMap.from_terms({"x": [Term(1.0, (Count(2.0, np.array([-1.0])),))]}, 1)
    with pytest.raises(ProfileError, match="at most two"):
        FeatureMap.from_terms({"x": [Term(1.0, (Count(1.0, np.ones(1)),) * 3)]}, 1)
