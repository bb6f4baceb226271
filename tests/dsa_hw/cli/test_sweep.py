"""``dsa-hw sweep``, on a target whose times are a formula."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from budgets import LatencyBudget
from dsa_hw.cli.main import main
from dsa_hw.cli.sweep import _front_text
from tests.dsa_hw.cli.test_compare import QUICK
from tests.dsa_hw.cli.test_options import documented_keys


def test_points_are_certified_and_infeasible_budgets_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", *QUICK, "--method", "uniform", "--out", str(tmp_path)]
    assert main([*words, "--budgets", "latency=50%..80%:2", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert set(content) == documented_keys("sweep")
    assert [(p["asked"], p["verdict"]) for p in content["points"]] == [("80%", "MET"), ("50%", "MET")]
    assert all(p["measured"] <= p["limit"] for p in content["points"])
    assert main([*words, "--budgets", "latency=80%", "latency=0.1%"]) == 2, "the budgets of a sweep do not change"
    assert "contains results of a run with different settings (budgets=" in capsys.readouterr().err
    words[-1] = str(tmp_path / "other")
    assert main([*words, "--budgets", "latency=80%", "latency=0.1%"]) == 3
    met, infeasible, saved = capsys.readouterr().out.splitlines()
    assert met.startswith("     80%: ")
    assert f", MET, accuracy {100 * content['points'][0]['accuracy']:.1f}%" in met
    assert infeasible.startswith("    0.1%: ")
    assert "cannot be met" in infeasible
    assert saved.startswith(f"saved: {tmp_path / 'other' / 'front.csv'}")


def test_line_has_cost_share_of_the_limit_and_verdict() -> None:
    row = {"asked": "5 ms", "measured": 4.9e-3, "limit": 5e-3, "utilisation": 0.98, "verdict": "INCONCLUSIVE"}
    table = pd.DataFrame([{**row, "accuracy": float("nan")}])
    table.attrs["infeasible"] = {}
    assert _front_text(table, LatencyBudget("5ms")) == "    5 ms: 4.9 ms, 98.0% of 5 ms, INCONCLUSIVE"
