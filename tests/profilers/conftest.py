"""Fixtures for tests of profilers: rules that need little time, and a small network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from profilers.measuring.rules import MeasuringRules
from profilers.targets import Target
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
def lenient(monkeypatch: pytest.MonkeyPatch) -> MeasuringRules:
    """Rules that end after one round of few copies: these tests are about what is done, not about how fast."""
    monkeypatch.setattr(Target, "cache", 2**16)
    return MeasuringRules(precision=0.5, least_blocks=1, most_blocks=1, rounds=1, least_seconds=0.0)


@pytest.fixture
def tiny() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A small network and its inputs."""
    torch.manual_seed(0)
    return Tiny().eval(), (torch.randn(1, 3, 16, 16),)
