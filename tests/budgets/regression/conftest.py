"""Data that the estimators are fitted to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def data(network: Callable[..., Any], cost: Callable[..., Any]) -> tuple[Any, np.ndarray, np.ndarray]:
    """Channel groups, keep ratios (40, 8) and costs (40,)."""
    groups = network(size=8, operations=40, seed=1)
    alpha = np.random.default_rng(0).uniform(0.2, 1, (40, 8))
    return groups, alpha, cost(groups, alpha, spread=0.2) * np.exp(0.01 * np.random.default_rng(1).normal(size=40))
