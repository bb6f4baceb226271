"""Networks and a fitted cost that the tests of the methods share."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import budgets
from dsa_hw.profiles import Profile
from tests.fakes.problems import Network, dead_branch_network, mixed_network


@pytest.fixture(scope="session")
def network() -> Network:
    """A network with residual, depthwise and plain layers."""
    return mixed_network()


@pytest.fixture(scope="session")
def dead_branch() -> Network:
    """A network with a branch that has no effect."""
    return dead_branch_network()


@pytest.fixture(scope="session")
def latency(network: Network) -> budgets.CostModel:
    """A cost fitted to a noisy profile: time by FLOPs and parameters, and some overhead."""
    groups, rng = network[1], np.random.default_rng(0)
    widths = np.vstack([np.rint(rng.uniform(0.2, 1.0, (60, len(groups))) * groups.sizes), groups.sizes]).astype(int)
    ratios = widths / groups.sizes
    seconds = 1e-4 + 1e-10 * budgets.flops(groups)(ratios) + 1e-8 * budgets.params(groups)(ratios)
    frame = pd.DataFrame(widths, columns=list(groups.names))
    frame["seconds"] = seconds * np.exp(0.01 * rng.normal(size=len(frame)))
    frame["low"], frame["high"], frame["runs"] = 0.99 * frame.seconds, 1.01 * frame.seconds, 100
    frame["split"] = ["train"] * 40 + ["holdout"] * 20 + ["dense"]
    profile = Profile(frame, groups.names, groups.sizes, "made up/cpu", fingerprint=groups.fingerprint)
    return budgets.fit(profile, groups)
