"""``dsa-hw sweep``, on a target whose times are a formula."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from budgets import LatencyBudget
from dsa_hw.cli.main import main
from dsa_hw.cli.sweep import _front_table
from tests.dsa_hw.cli.test_compare import QUICK
from tests.dsa_hw.cli.test_options import documented_keys
from tests.fakes.outputs import printed_json


def test_points_are_certified_and_infeasible_budgets_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", *QUICK, "--method", "uniform", "--out", str(tmp_path)]
    assert main([*words, "--budgets", "latency=50%..80%:2", "--json"]) == 0
    content = printed_json(capsys, "sweep")
    assert set(content) == documented_keys("sweep")
    assert [(p["asked"], p["verdict"]) for p in content["points"]] == [("80%", "MET"), ("50%", "MET")]
    assert all(p["measured"] <= p["limit"] for p in content["points"])
    assert main([*words, "--budgets", "latency=80%", "latency=0.1%"]) == 2, "the budgets of a sweep do not change"
    assert "contains results of a run with different settings (budgets=" in capsys.readouterr().err
    words[-1] = str(tmp_path / "other")
    assert main([*words, "--budgets", "latency=80%", "latency=0.1%"]) == 3
    head, met, infeasible, saved, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == ["latency", "limit", "measured", "used", "accuracy", "verdict"]
    assert met.split()[0] == "80%"
    assert met.endswith(f" {100 * content['points'][0]['accuracy']:.1f}%  MET")
    assert infeasible.startswith("0.1%: ")
    assert "cannot be met" in infeasible
    assert saved.startswith(f"saved: {tmp_path / 'other' / 'front.csv'}")


def test_line_has_cost_share_of_the_limit_and_verdict() -> None:
    row = {"asked": "5 ms", "measured": 4.9e-3, "limit": 5e-3, "utilisation": 0.98, "verdict": "INCONCLUSIVE"}
    table = pd.DataFrame([{**row, "accuracy": float("nan")}])
    (found,) = _front_table(table, LatencyBudget("5ms")).rows
    assert found == ("5 ms", "5 ms", "4.9 ms", "98.0%", "", "INCONCLUSIVE")
