"""Methods by name."""

from __future__ import annotations

import numpy as np
import pytest

from dsa_hw.errors import DsaError
from dsa_hw.methods import registry
from dsa_hw.methods.problem import Problem, Proposal
from tests.fakes.problems import Network, problem_of


def test_dsa_is_first_and_the_others_are_in_alphabetical_order() -> None:
    first, *others = registry.available_methods()
    assert first == "dsa"
    assert others == sorted(others)


def test_registered_method_is_solved_by_its_name(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "METHODS", dict(registry.METHODS))

    @registry.register_method("half")
    def half(problem: Problem) -> Proposal:
        return Proposal(np.full(len(problem.groups), 0.5), problem.model)

    assert (registry.solve(problem_of(network), "half").alpha == 0.5).all()
    assert "half" in registry.available_methods()


def test_unknown_method_is_refused_with_the_nearest_name(network: Network) -> None:
    with pytest.raises(DsaError, match=r"Unknown method 'unifrom'\. Did you mean 'uniform'"):
        registry.solve(problem_of(network), "unifrom")
