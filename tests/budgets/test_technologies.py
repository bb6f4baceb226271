"""Technologies: published figures, and tables of the user's own."""

from __future__ import annotations

from typing import Any

import pytest

from budgets import EstimatedEnergyBudget
from budgets.technologies import TECHNOLOGIES, Technology, technology
from dsa_hw.errors import BudgetError

MINE = {"mac": 2.0, "byte": {"dram": 100.0, "large": 10.0, "small": 1.0}, "width": 2}


def test_published_figures() -> None:
    old, new = TECHNOLOGIES["45nm"], TECHNOLOGIES["7nm"]
    assert old.mac == pytest.approx(3.7 + 0.9)
    assert 8 * old.byte["large"] == pytest.approx(100)
    assert 8 * old.byte["dram"] == pytest.approx(1300)
    assert "Horowitz" in old.source
    assert "Jouppi" in new.source
    for kind in ("", "-fp16", "-int8"):
        assert TECHNOLOGIES["7nm" + kind].mac < TECHNOLOGIES["45nm" + kind].mac
    assert TECHNOLOGIES["45nm-int8"].mac < TECHNOLOGIES["45nm-fp16"].mac < old.mac


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("3nm", "45nm-int8"),
        ({"mac": 1}, "'byte'"),
        ({**MINE, "typo": 1}, "'typo'"),
        ({**MINE, "mac": -1}, "mac must be .* got -1"),
        ({**MINE, "byte": {"dram": 1}}, "'large'"),
        ("absent.json", "Cannot read"),
        (3, "got 3"),
    ],
)
def test_a_wrong_technology_is_refused(given: Any, words: str) -> None:
    with pytest.raises(BudgetError, match=words):
        EstimatedEnergyBudget("60%", technology=given)


def test_a_technology_passes_through() -> None:
    mine = Technology("mine", 1.0, {"dram": 1.0, "large": 1.0, "small": 1.0})
    assert technology(mine) is mine
