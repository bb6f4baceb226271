"""Fixtures for every test: a cache folder of its own, so that no test reads or writes the user's."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep references of the user out of the tests."""
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path / "cache"))
