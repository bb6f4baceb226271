"""``dsa-hw minimize``, on a target whose times are a formula."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dsa_hw.cli.main import main
from tests.dsa_hw.cli.test_compare import QUICK
from tests.dsa_hw.cli.test_options import documented_keys
from tests.dsa_hw.zoo.test_folders_and_loaders import pets
from tests.fakes.outputs import printed_json

WORDS = ["minimize", *QUICK, "--method", "uniform", "--recovery", "none", "--epochs", "0"]


def test_json_text_and_files_agree_and_the_same_command_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, "--cost", "flops", "--max-drop", "60%", "--most", "2", "--out", str(tmp_path)]
    assert main([*words, "--budget", "params=95%", "--json"]) == 0
    content = printed_json(capsys, "minimize")
    assert set(content) == documented_keys("minimize")
    assert content["certificate"]["verdict"] == "MET"
    assert content["certificate"]["quality"]["max_drop"] == 0.6
    assert [e["budget"]["kind"] for e in content["certificate"]["entries"]] == ["FlopsBudget", "ParamsBudget"]
    assert json.loads((tmp_path / "plan.json").read_text())["certificate"] == content["certificate"]
    assert main([*words, "--budget", "params=95%"]) == 0
    captured = capsys.readouterr()
    assert "of at most" not in captured.err, "nothing is tried again"
    lines = captured.out.splitlines()
    for line, row in zip(lines[1:], content["front"], strict=False):
        assert line.split()[0] == row["asked"]
        interval = f"{100 * row['drop_low']:.2f}% to {100 * row['drop_high']:.2f}%"
        assert f"{100 * row['drop']:.2f}%  {interval}" in re.sub(r" {2,}", "  ", line)
    assert lines[-3:] == [
        f"saved: {tmp_path}",
        f"page: {tmp_path / 'index.html'}",
        f"next: dsa-hw verify {tmp_path / 'plan.json'} --model tests.fakes.digits:net --target formula/cpu",
    ]
    assert main(words) == 2, "another question"
    assert "contains results of a run with different settings (budgets=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cost", "latncy", "--max-drop", "5%"], "Unknown cost 'latncy'. Did you mean 'latency'?"),
        (["--cost", "flops.p95", "--max-drop", "5%"], "Only latency has percentiles"),
        (["--cost", "flops", "--max-drop", "0.01"], "--max-drop: must be a percentage such as 2% or 5%, got '0.01'"),
        (["--cost", "flops", "--max-drop", "5%", "--most", "0"], "--most: must be a whole number from 1, got '0'"),
        (["--cost", "flops", "--max-drop", "5%", "--budget", "flops=50%"], "limits the cost that is minimised"),
        (["--cost", "flops", "--max-drop", "0.1%"], "144 inputs (validation data) cannot show a drop of at most 0.10%"),
        (["--cost", "flops"], "The following arguments are required: --max-drop"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([*WORDS, "--train-epochs", "0", *words, "--out", str(tmp_path)])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("dsa-hw minimize: ")
    assert message in line


def test_a_drop_that_cannot_be_kept_exits_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--cost", "flops=10%", "--max-drop", "3%", "--train-epochs", "4", "--finetune-epochs", "0"]
    assert main([*words, "--out", str(tmp_path)]) == 3
    assert "None of the 1 networks that were tried has a drop of at most 0.03" in capsys.readouterr().err


def test_class_folders_are_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pets(tmp_path / "pets", 40)
    words = [*WORDS, "--data", f"imagefolder:{tmp_path / 'pets'}", "--model", "resnet8", "--classes", "2"]
    search = ["--cost", "flops", "--max-drop", "100%", "--most", "1", "--out", str(tmp_path / "out")]
    assert main([*words, *search, "--json"]) == 0
    assert printed_json(capsys, "minimize")["certificate"]["quality"]["source"] == "test data"
