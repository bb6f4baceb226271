"""The commands as typed, on the target that is a formula."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

import tests.fakes.digits  # noqa: F401  (registers the target)
from dsa_hw.cli import compare, sweep

QUICK = [
    "--train-epochs",
    "0.3",
    "--epochs",
    "0.2",
    "--finetune-epochs",
    "0.2",
    "--samples",
    "14",
    "--target",
    "formula/cpu",
]
NET = ["--model", "tests.fakes.digits:net", "--data", "digits"]


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    compare.add(subparsers)
    sweep.add(subparsers)
    args = parser.parse_args(arguments)
    return int(args.run(args))


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--budgets", "flops=50%", "latency=50%", "--methods", "uniform"]
    assert run("compare", *NET, *asked, *QUICK, "--out", str(tmp_path), "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert [n["kind"] for n in content["networks"]] == ["dense", "flops", "latency", "flops"]
    assert run("compare", *NET, *asked, *QUICK, "--out", str(tmp_path)) == 0
    captured = capsys.readouterr()
    assert content["headline"] in captured.out
    assert str(tmp_path / "index.html") in captured.out
    page = (tmp_path / "index.html").read_text()
    assert "--budgets flops=50% latency=50%" in page
    assert "--train-epochs 0.3" in page


def test_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--budgets", "latency=50%..80%:2", "--method", "uniform"]
    assert run("sweep", *NET, *asked, *QUICK, "--out", str(tmp_path), "--json") == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [p["asked"] for p in points] == ["80%", "50%"]
    assert all(p["verdict"] == "MET" for p in points)
    assert run("sweep", *NET, *asked, *QUICK, "--out", str(tmp_path)) == 0
    assert capsys.readouterr().out.count("MET") == 2
    asked[1:2] = ["latency=80%", "latency=0.1%"]
    assert run("sweep", *NET, *asked, *QUICK, "--out", str(tmp_path)) == 3
    assert "cannot be kept" in capsys.readouterr().out
