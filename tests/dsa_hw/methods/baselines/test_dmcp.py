"""DMCP: the chain's probabilities are those of its draws, and the expected cost goes to the budget."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsa_hw.errors import DsaError, TrainingError
from dsa_hw.methods.baselines.dmcp import MarkovWidths
from dsa_hw.methods.registry import solve
from tests.fakes.problems import Network, problem_of


def chains() -> MarkovWidths:
    found = MarkovWidths(np.array([12, 5]), [np.array([2, 4, 8, 12]), np.array([5])], states=10)
    with torch.no_grad():
        found.theta[0].copy_(torch.tensor([1.0, -0.5, 0.3]))
    return found


def test_probabilities_and_expected_widths_are_those_of_the_draws() -> None:
    one, rng = chains(), np.random.default_rng(0)
    drawn = np.array([one.draw(rng) for _ in range(20_000)])
    assert set(drawn[:, 0]) == {2, 4, 8, 12}
    assert set(drawn[:, 1]) == {5}, "a group with one allowed width"
    ratios = one.ratios().detach().numpy()
    np.testing.assert_allclose(drawn.mean(0) / [12, 5], ratios, atol=0.005)
    rank = np.array([11, 0, 3, 5, 1, 2, 4, 6, 7, 8, 9, 10])
    kept, _ = one.masks([rank, np.arange(5)])
    np.testing.assert_allclose((drawn[:, :1] > rank).mean(0), kept.detach().numpy(), atol=0.012)


def test_states_are_spread_over_the_allowed_widths() -> None:
    (level,) = MarkovWidths(np.array([64]), [np.arange(4, 65)], states=7).levels
    assert (level[0], level[-1], len(level)) == (4, 64, 7)
    assert np.ptp(np.diff(level)) <= 1


def test_expected_cost_goes_to_the_budget(network: Network) -> None:
    problem = problem_of(network, "dmcp", 0.5, options={"warm_up": 0.0, "drawn": 0}, epochs=8)
    history = solve(problem, "dmcp").history
    assert history["cost"].iloc[0] > 0.6
    assert abs(history["cost"].iloc[-5:].mean() - 0.5) < 0.03


@pytest.mark.parametrize("options", [{"states": 1}, {"warm_up": 1.0}, {"tolerance": 0.0}])
def test_options_out_of_range_are_refused(network: Network, options: dict[str, float]) -> None:
    with pytest.raises(DsaError, match="dmcp"):
        solve(problem_of(network, "dmcp", options=options), "dmcp")


def test_data_for_training_are_needed(network: Network) -> None:
    with pytest.raises(TrainingError, match="train"):
        solve(problem_of(network, "uniform", 0.5, train=None), "dmcp")
