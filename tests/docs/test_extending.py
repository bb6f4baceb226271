"""The code blocks of docs/development/extending.md run, and what they add works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from profilers.targets import base

PAGE = Path(__file__).parents[2] / "docs" / "development" / "extending.md"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the blocks of the page define; their registrations end with the test."""
    from dsa_hw.methods import registry

    registry.available_methods()  # fill both registries before they are copied
    monkeypatch.setattr(registry, "METHODS", dict(registry.METHODS))
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    found: dict[str, Any] = {}
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE), 1):
        exec(compile(block, f"extending.md, block {number}", "exec"), found)
    return found


def test_added_method_and_cost_meet_their_budgets(names: dict[str, Any]) -> None:
    smaller = sum(
        p.numel() for p in names["result"].model.parameters()
    )  # 8-bit weights under WeightMemoryBudget("4kB")
    assert smaller <= 4000 < sum(p.numel() for p in names["model"].parameters())
    assert "MET" in str(names["result"].certificate)


def test_added_target_runs_the_network(names: dict[str, Any]) -> None:
    target = base.resolve("torchscript/cpu")
    loaded = target.load(names["model"], names["example_inputs"])
    expected = names["model"](*names["example_inputs"])
    names["torch"].testing.assert_close(loaded.once(), expected)
    assert loaded.run(3).shape == (3,)
    assert target.describe() == {"torchscript": names["torch"].__version__}
