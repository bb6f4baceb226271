"""Choice among candidates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from budgets.regression import PhysicsNNLS, TopologyQuadratic
from budgets.selection import candidates, compare_candidates
from dsa_hw.errors import ProfileError

Factory = Callable[..., Any]


def test_choice_is_by_cross_validation_with_a_preference_for_the_first(network: Factory, cost: Factory) -> None:
    groups = network(size=6, operations=20, seed=9)
    rng = np.random.default_rng(0)
    alpha = rng.uniform(0.2, 1, (60, 6))
    clean = cost(groups, alpha, 0.8)
    found = candidates(groups)
    # Operations differ widely and there is no noise: the finer model is clearly better.
    assert (
        compare_candidates({k: found[k] for k in ("physics", "per operation")}, alpha, clean).chosen == "per operation"
    )
    # The full quadratic has the lowest training error and a bad cross-validated one.
    noisy = cost(groups, alpha) * np.exp(0.03 * rng.normal(size=60))
    overfit = {"physics": found["physics"], "full": TopologyQuadratic()}
    result = compare_candidates(overfit, alpha, noisy)
    assert result.chosen == "physics"
    mape = result.table["mape"].to_dict()
    assert mape["full"] > mape["physics"]
    # Equal candidates: the first stays.
    twins = {"a": PhysicsNNLS(found["physics"].features), "b": PhysicsNNLS(found["physics"].features)}
    assert compare_candidates(twins, alpha, noisy).chosen == "a"
    with pytest.raises(ProfileError, match="No candidates"):
        compare_candidates({}, alpha, noisy)
