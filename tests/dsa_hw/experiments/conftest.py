"""Only the methods that are needed are imported."""

from __future__ import annotations

import pytest

from dsa_hw.methods import registry as methods


@pytest.fixture(autouse=True)
def baselines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out DSA, whose import takes seconds."""
    monkeypatch.setattr(methods, "_HOMES", ("dsa_hw.methods.baselines",))
