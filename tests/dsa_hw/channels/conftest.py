"""Fixtures for the tests of channel groups."""

from __future__ import annotations

import pytest
import torch

from tests.fakes.proving import Small


@pytest.fixture
def small() -> Small:
    """A small network with fixed weights."""
    torch.manual_seed(0)
    return Small()
