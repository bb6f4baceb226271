"""The common keep ratio."""

from __future__ import annotations

import numpy as np
import pytest

from dsa_hw.methods.baselines import uniform
from tests.fakes.problems import Network, problem_of, used


def test_keep_ratios_are_equal_and_use_the_budget_up(network: Network) -> None:
    problem = problem_of(network, share=0.5)
    alpha = uniform(problem).alpha
    assert np.ptp(alpha) == 0.0
    assert used(problem, alpha)[0] == pytest.approx(1.0, abs=1e-9)
