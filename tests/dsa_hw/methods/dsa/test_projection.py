"""Projection of keep ratios: optimality conditions, and costs with kinks."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit

from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.dsa.projection import Box, project, project_logits
from tests.fakes.costs import Kinked, Quadratic


def test_projection_stops_at_a_kink_below_which_nothing_is_saved() -> None:
    """The nearest point does not lie below a kink."""
    rng, beyond, runs = np.random.default_rng(0), 0, 100
    for _ in range(runs):
        k = int(rng.integers(2, 40))
        cost, least, alpha = Kinked(k, rng), np.full(k, 0.05), rng.uniform(0.1, 1.0, k)
        limit = cost.at(least) + rng.uniform(0.05, 0.9) * (cost.at(np.ones(k)) - cost.at(least))
        found = project(alpha, CostSet([cost], np.ones(k), [limit]), least)
        assert (1 - 1e-6) * limit <= cost.at(found) <= limit
        beyond += bool(((found < cost.edges - 0.02) & (alpha > cost.edges)).any())
    assert beyond <= 0.02 * runs


def test_projection_meets_its_optimality_conditions() -> None:
    rng = np.random.default_rng(0)
    for k in (1, 3, 40):
        cost = Quadratic.random(k, rng)
        costs, box = CostSet([cost], np.ones(k)), Box(np.zeros(k))
        y = rng.normal(size=k)
        limit = 0.93 * cost.at(expit(y)) / cost.at(np.ones(k))
        z, mu = project_logits(costs, y, np.array([limit]), box, np.ones_like)
        alpha = expit(z)
        pull = mu[0] * cost.gradient(alpha) / cost.at(np.ones(k)) * alpha * (1 - alpha)
        assert np.abs(y - z).max() <= 1.0
        np.testing.assert_allclose(y - z, pull, atol=1e-8)
        assert cost.at(alpha) / cost.at(np.ones(k)) == pytest.approx(limit, rel=1e-10)
