"""Technologies: published figures, and tables of the user's own."""

from __future__ import annotations

import json
from pathlib import Path
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
        ({"mac": 1}, "byte: is missing"),
        ({**MINE, "typo": 1}, "typo: unknown field; accepted fields: mac, byte"),
        ({**MINE, "mac": -1}, "mac: must be .* got -1"),
        ({**MINE, "mac": float("nan")}, "not JSON data"),
        ({**MINE, "mac": "2"}, "mac: must be a valid number"),
        ({**MINE, "width": 0}, "width: must be greater than 0"),
        ({**MINE, "byte": {"dram": 1e300}}, "byte.dram: must be less"),
        ({**MINE, "byte": {"dram": 1}}, "'large'"),
        ("absent.json", "Cannot read"),
        (3, "got 3"),
    ],
)
def test_a_wrong_technology_is_refused(given: Any, words: str) -> None:
    with pytest.raises(BudgetError, match=words):
        EstimatedEnergyBudget("60%", technology=given)


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b'{"mac": NaN}', b"\xff", b'{"mac": 1, "mac": 2}', b"[]"])
def test_a_file_that_is_no_technology_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(BudgetError, match=r"mine\.json") as caught:
        technology(path)
    assert "\n" not in str(caught.value)
    path.write_text(json.dumps(MINE))
    assert technology(path) == technology(str(path))
    assert (technology(path).name, technology(path).width) == ("mine.json", 2.0)


def test_a_technology_passes_through() -> None:
    mine = Technology("mine", 1.0, {"dram": 1.0, "large": 1.0, "small": 1.0})
    assert technology(mine) is mine
