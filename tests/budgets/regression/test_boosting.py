"""Boosting: trees and their smooth surrogate."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from budgets.regression import (
    MonotoneBoosting,
)
from budgets.work_classes import physics_features


def test_the_surrogate_equals_the_trees_where_splits_are_sharp(data: tuple[Any, np.ndarray, np.ndarray]) -> None:
    groups, alpha, y = data
    model = MonotoneBoosting(physics_features(groups), smoothing=1e-9).fit(alpha, y)
    # With vanishing smoothing the surrogate becomes the trees.
    points = np.random.default_rng(3).uniform(0.2, 1, (50, 8))
    np.testing.assert_allclose(model.value(torch.tensor(points)).numpy(), model.predict(points), rtol=1e-9)
    assert "surrogate" in (MonotoneBoosting.__doc__ or "")
