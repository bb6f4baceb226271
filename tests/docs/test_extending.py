"""The code blocks of docs/development/extending.md run, and what they add works."""

from __future__ import annotations

from typing import Any

import pytest

from dsa_hw import Verdict
from dsa_hw.methods import registry
from profilers.targets import base
from tests.docs.blocks import ROOT
from tests.docs.test_guide import run


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the blocks of the page define; their registrations end with the test."""
    registry.available_methods()  # fills the registry before it is copied
    monkeypatch.setattr(registry, "METHODS", dict(registry.METHODS))
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    found: dict[str, Any] = {}
    assert run(ROOT / "docs" / "development" / "extending.md", found) == []
    return found


def test_added_method_and_cost_meet_their_budgets(names: dict[str, Any]) -> None:
    small, dense = (sum(p.numel() for p in network.parameters()) for network in (names["light"].model, names["model"]))
    assert small <= 4000 < dense  # WeightMemoryBudget("4kB", bits=8): a byte per parameter
    assert [names[n].certificate.verdict for n in ("random", "light")] == [Verdict.MET, Verdict.MET]


def test_added_target_runs_the_network(names: dict[str, Any]) -> None:
    target = base.resolve("torchscript/cpu")
    loaded = target.load(names["model"], names["example_inputs"])
    expected = names["model"](*names["example_inputs"])
    names["torch"].testing.assert_close(loaded.once(), expected)
    assert loaded.run(3).shape == (3,)
    assert target.describe() == {"torchscript": names["torch"].__version__}
