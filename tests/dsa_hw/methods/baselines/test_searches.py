"""LeGR and the cross-entropy method: what the search adds, seeds, and the ranking that they use."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from dsa_hw.channels import masked
from dsa_hw.errors import DsaError
from dsa_hw.methods.baselines._limits import Limits
from dsa_hw.methods.baselines._units import Norms, masks_of, ranks
from dsa_hw.methods.registry import solve
from tests.fakes.problems import Network, loader, problem_of, used

both = pytest.mark.parametrize("name", ["legr", "cem"])


@both
def test_best_of_the_search_is_proposed(network: Network, name: str) -> None:
    """The loss of the proposal is the least of the history, and not above that of the start."""
    val = list(loader(32, shuffle=False))
    problem = problem_of(network, name, val=val, options={"steps": 24, "population": 8, "statistics": "stored"})
    if name == "legr":
        problem.options["tournament"] = 4
    proposal = solve(problem, name)
    history = proposal.history
    assert history["best"].is_monotonic_decreasing
    assert proposal.importance is not None
    widths = np.maximum(np.rint(proposal.alpha * problem.groups.sizes).astype(int), 1)
    with masked(problem.model, problem.groups, masks_of(ranks(proposal.importance), widths)):
        losses = [nn.functional.cross_entropy(problem.model(x), y).item() for x, y in val]
    assert np.mean(losses) == pytest.approx(history["loss"].min(), rel=1e-5)
    assert history["loss"].min() <= history["loss"].iloc[0]


@both
def test_result_depends_on_the_seed(network: Network, name: str) -> None:
    found = [solve(problem_of(network, name, seed=seed), name).history["loss"].tolist() for seed in (0, 1)]
    assert found[0] != found[1]


def test_first_candidate_of_legr_is_a_threshold_on_squared_norms(network: Network) -> None:
    model, groups, _ = network
    problem = problem_of(network, options={"steps": 1})
    squares = Norms(model, groups).rms().detach().double().numpy() ** 2
    wanted, _ = Limits(problem).threshold(np.split(squares, groups.offsets[1:-1]))
    np.testing.assert_array_equal(solve(problem, "legr").alpha * groups.sizes, wanted)


@both
def test_importance_of_the_problem_is_the_ranking(network: Network, name: str) -> None:
    wanted = [np.arange(1.0, size + 1) for size in network[1].sizes]
    problem = problem_of(network, name, importance=lambda *_: wanted)
    proposal = solve(problem, name)
    assert proposal.importance is not None
    for found, score in zip(proposal.importance, wanted, strict=True):
        np.testing.assert_array_equal(found, score)
    assert used(problem, proposal.alpha)[0] <= 1.0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("legr", {"tournament": 9, "population": 8}),
        ("legr", {"rate": 0.0}),
        ("cem", {"population": 1}),
        ("cem", {"elite": 2.0}),
    ],
)
def test_options_out_of_range_are_refused(network: Network, name: str, options: dict[str, float]) -> None:
    with pytest.raises(DsaError, match=f"Options of {name} must have"):
        solve(problem_of(network, options=options), name)
