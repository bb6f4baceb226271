"""Fixtures for tests of profilers: rules that a busy machine passes, and a small network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from profilers.measuring.rules import MeasuringRules
from tests.fakes import litert_env
from tests.fakes.machine import Tiny


@pytest.fixture
def users_cache(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the cache folder of the user, which has the real environment of the LiteRT worker."""
    if litert_env.CACHE is None:
        monkeypatch.delenv("DSA_HW_CACHE")
    else:
        monkeypatch.setenv("DSA_HW_CACHE", litert_env.CACHE)


@pytest.fixture
def lenient() -> MeasuringRules:
    """Rules that pass on any machine: these tests are about what is done, not about how fast."""
    return MeasuringRules(
        precision=0.5, worst=1e6, tolerance=1e6, waiting=1e6, least_runs=2, least_visits=1, visit=1e-4, warm_in=1e-5
    )


@pytest.fixture
def tiny() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A small network and its inputs."""
    torch.manual_seed(0)
    return Tiny().eval(), (torch.randn(1, 3, 16, 16),)
