"""``dsa-hw compare``, on a target whose times are a formula."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import tests.fakes.digits  # noqa: F401  (registers the target)
from dsa_hw.cli.compare import comparison_table
from dsa_hw.cli.main import main
from dsa_hw.experiments.report.findings import COLUMNS
from tests.dsa_hw.cli.test_options import documented_keys
from tests.fakes.outputs import printed_json

QUICK = ["--train-epochs", "0.3", "--epochs", "0.2", "--finetune-epochs", "0.2", "--samples", "14", "--target"]
QUICK += ["formula/cpu", "--model", "tests.fakes.digits:net", "--data", "digits"]


def test_json_text_and_report_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", *QUICK, "--budgets", "flops=50%", "latency=50%", "--methods", "uniform", "--out", str(tmp_path)]
    assert main([*words, "--json"]) == 0
    content = printed_json(capsys, "compare")
    assert set(content) == documented_keys("compare")
    assert [n["kind"] for n in content["networks"]] == ["dense", "flops", "latency", "flops"]
    assert set(content["networks"][0]) == {*COLUMNS, "verdict"}
    assert main(words) == 0
    captured = capsys.readouterr()
    head, dense, *rest, blank, headline, report = captured.out.splitlines()
    assert head.split()[:3] == ["network", "latency", "[ms]"]
    assert dense.split()[:2] == ["dense", f"{1e3 * content['networks'][0]['seconds']:.4g}"]
    assert [line.strip().partition(",")[0] for line in rest] == ["flops 50%", "latency 50%", "flops 50%"]
    assert "at equal latency" in rest[2]
    assert (blank, headline, report) == ("", content["headline"], f"report: {tmp_path / 'index.html'}")
    page = (tmp_path / "index.html").read_text().replace(" \\\n  --", " --")
    assert " ".join(["dsa-hw", *words]) in page, "the report has the command as typed"


def test_table_leaves_out_what_is_unknown() -> None:
    rows = [
        ("dense", "", "", "", 0.0123456, 2e6, 3e3, float("nan"), 0.9, ""),
        ("flops", "50%", "dsa", "latency-50%-dsa", 0.006, 1e6, 1.5e3, 0.5, 0.875, "MET"),
    ]
    names = [
        "kind",
        "asked",
        "method",
        "matches",
        "seconds",
        "flops",
        "params",
        "accuracy_before",
        "accuracy",
        "verdict",
    ]
    _, dense, pruned = str(comparison_table(pd.DataFrame(rows, columns=names))).splitlines()
    assert dense.split() == ["dense", "12.35", "2.0", "3.0", "90.0"]
    assert pruned.split() == [
        "flops",
        "50%,",
        "dsa",
        "at",
        "equal",
        "latency",
        "6",
        "1.0",
        "1.5",
        "50.0",
        "87.5",
        "MET",
    ]
