"""Fixtures for every test: a cache folder of its own, so that no test reads or writes the user's; shared data files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes depends on what else the machine does. Tests of times are marked ``speed``.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the sittings of the user out of the tests."""
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """Return the path of a file that is not part of the repository, or skip the test (mark it ``needs_data``)."""
    folder = Path(os.environ.get("DSA_HW_DATA", Path(__file__).parents[2] / "shared/data"))

    def find(name: str) -> Path:
        if not (folder / name).exists():
            pytest.skip(f"{name} is not in {folder}: set DSA_HW_DATA to the folder with the shared data")
        return folder / name

    return find
