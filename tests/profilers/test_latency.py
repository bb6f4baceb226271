"""``python -m profilers.latency``, which is also ``dsa-hw profile``."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from profilers import cli, latency
from profilers.measuring.rules import MeasuringRules
from tests.fakes.outputs import printed_json
from tests.fakes.stores import stored_runs

MODEL = "tests.fakes.machine:Tiny"


def command(*arguments: str) -> list[str]:
    return ["--model", MODEL, "--input", "1x3x16x16", "--runtime", "torch", *arguments]


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch, lenient: MeasuringRules) -> None:
    """Rules that need less time than those of the command."""
    monkeypatch.setattr(cli, "_rules", lambda options: replace(lenient, require=options.require))


@pytest.mark.usefixtures("rules")
def test_command_prints_text_or_json_and_plots_the_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "p.sqlite", tmp_path / "grid.png"
    arguments = command(
        "--samples", "4", "--holdout", "1", "--out", str(out), "--time-limit", "1min", "--plot", str(picture)
    )
    assert latency.main(arguments) == 0
    text = capsys.readouterr().out
    for part in ("dense", "ms, 95% CI [", "range", "grid", "precision", "spread of the runs", "next: dsa-hw fit"):
        assert part in text
    assert out.exists()
    assert picture.stat().st_size > 5000
    assert latency.main([*arguments, "--json"]) == 0
    report = printed_json(capsys, "profile")
    assert report["target"] == "torch/cpu fp32 x1"
    assert len(report["configurations"]) == 5
    assert all(row["error"] >= 0 for row in report["configurations"])
    assert report["next"]
    assert latency.main(command("--self-check", "--time-limit", "20s", "--out", str(out))) == 0
    assert "Difference of the ratios: median" in capsys.readouterr().out


@pytest.mark.usefixtures("rules")
def test_required_precision_that_is_not_reached_is_exit_code_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command("--samples", "3", "--holdout", "0", "--grid", "8", "--out", str(tmp_path / "p.sqlite"))
    assert latency.main([*arguments, "--require", "0.01%"]) == 4
    error = capsys.readouterr().err
    assert "+/-0.01% is required" in error
    assert "--require" in error.split("is required")[1], "the remedy"
    assert latency.main(arguments) == 0, "without it, every interval is accepted"


def test_options_are_the_rules_of_measuring() -> None:
    parser = argparse.ArgumentParser()
    cli.add_options(parser)
    assert cli._rules(parser.parse_args([])) == MeasuringRules()
    options = parser.parse_args(["--statistic", "p95", "--require", "2%"])
    assert cli._rules(options) == MeasuringRules(statistic="p95", require=0.02)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--runtime", "tensorrt"], 2, "pip install"),
        (["--device", "cuda"], 2, "CUDA"),
        (["--device", "quantum"], 2, "Unknown device"),
        (["--model", "resnet81"], 2, "resnet"),
        (["--model", MODEL, "--input", "1x3x"], 2, "1x3x224x224"),
        (["--model", "no.such:thing"], 2, "Cannot import model"),
        (["--holdout", "-1"], 2, "must be a whole number from 0"),
        (["--fleet", "tcp://nowhere:1", "--plot", "p.png"], 2, "--plot"),
    ],
)
def test_invalid_options_are_refused_on_one_line(
    arguments: list[str], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available() and "cuda" in arguments:
        pytest.skip("there is CUDA here")
    try:
        found: Any = latency.main([*arguments, "--out", str(tmp_path / "p.sqlite")])
    except SystemExit as refusal:  # of the parser
        found = refusal.code
    captured = capsys.readouterr()
    assert found == code
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("python -m profilers.latency: ")
    assert words in captured.err
    assert captured.out == ""


def test_foreign_store_is_refused_in_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.sqlite"
    path.write_text("something else entirely, and long enough to be a header " * 3)
    assert latency.main(command("--out", str(path), "--json")) == 2
    captured = capsys.readouterr()
    assert "not a profile store" in captured.err
    assert json.loads(captured.out) == {
        "error": captured.err.removeprefix("python -m profilers.latency: ").strip(),
        "exit_code": 2,
    }


@pytest.mark.parametrize(
    ("option", "text"),
    [*(("time-limit", text) for text in ("0", "-3", "ten", "5 weeks")), ("require", "0%"), ("require", "0.01")],
)
def test_invalid_durations_and_shares_are_refused(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        latency.main([f"--{option}={text}"])
    assert stop.value.code == 2
    assert f"--{option}: must be a" in capsys.readouterr().err


def test_interrupted_command_keeps_its_runs(tmp_path: Path) -> None:
    out = tmp_path / "p.sqlite"
    code = (
        "import sys; from profilers import cli, latency; from profilers.measuring.rules import MeasuringRules\n"
        # Never finished: it measures until it is stopped.
        "cli._rules = lambda options: MeasuringRules(precision=0, most_blocks=10**6)\n"
        "sys.exit(latency.main(sys.argv[1:]))"
    )
    arguments = command("--samples", "3", "--holdout", "1", "--grid", "8", "--out", str(out))
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True, env=dict(os.environ),
        # Where the tests run in the background SIGINT is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (out.exists() and stored_runs(out)):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Repeat the command to continue." in errors
    assert str(out) in errors
    assert "Traceback" not in errors
    assert stored_runs(out) > 0


def test_import_of_profilers_loads_no_heavy_package() -> None:
    heavy = ("torch", "onnxruntime", "openvino", "matplotlib")
    code = f"import sys, profilers; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
