"""Fixtures for tests of the upper layers: rules that pass on any machine, a small network, a device that is a
formula."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dsa_hw.methods import registry as methods
from dsa_hw.methods.problem import Problem, Proposal
from profilers import MeasuringRules
from tests.fakes.formula import Formula, Net
from tests.fakes.machine import Tiny


@pytest.fixture
def lenient() -> MeasuringRules:
    """Rules that pass on any machine: these tests are about what is done, not about how fast."""
    return MeasuringRules(precision=0.5, least_blocks=2, most_blocks=2, rounds=2, least_seconds=0.0)


@pytest.fixture
def net() -> Net:
    """The network with fixed weights."""
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def example() -> torch.Tensor:
    """Its input."""
    return torch.zeros(1, 3, 16, 16)


@pytest.fixture
def formula() -> Formula:
    """A device that is a formula."""
    return Formula()


@pytest.fixture
def counting() -> Iterator[list[Problem]]:
    """A method "counting" (uniform keep ratios) and the problems that it was asked to solve."""
    methods.available_methods()
    asked: list[Problem] = []

    @methods.register_method("counting")
    def solve(problem: Problem) -> Proposal:
        asked.append(problem)
        return methods.METHODS["uniform"](problem)

    yield asked
    del methods.METHODS["counting"]


@pytest.fixture
def tiny() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A small network and its inputs."""
    torch.manual_seed(0)
    return Tiny().eval(), (torch.randn(1, 3, 16, 16),)
