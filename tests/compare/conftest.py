"""Shared: no test touches the user's references, and only the methods that are needed are imported."""

from __future__ import annotations

from typing import Any

import pytest

from dsa_hw import methods


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(methods, "_HOMES", ("dsa_hw.baselines",))
