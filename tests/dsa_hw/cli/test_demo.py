"""``dsa-hw demo``, with little training and a target whose times are a formula."""

from __future__ import annotations

from pathlib import Path

import pytest

import dsa_hw
from dsa_hw.cli import demo
from dsa_hw.cli.main import main
from dsa_hw.experiments.settings import ExperimentSettings
from dsa_hw.pipeline.options import ProfileOptions
from tests.fakes.digits import Formula

SETTINGS = ExperimentSettings(train_epochs=0.1, epochs=0.1, finetune_epochs=0.1)
PROFILING = ProfileOptions(samples=14, holdout=2)


def test_demo_prints_a_table_a_headline_and_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.demo(
        tmp_path,
        target=f"{Formula.runtime}/cpu",
        settings=SETTINGS,
        profiling=PROFILING,
        command="dsa-hw demo --out here",
    )
    text = capsys.readouterr().out
    for part in (
        "latency 50%, dsa",
        "flops 50%, dsa",
        f"report: {tmp_path / 'index.html'}",
    ):
        assert part in text
    assert "<code>dsa-hw demo --out here</code>" in (tmp_path / "index.html").read_text()


def test_command_passes_the_folder_and_reports_an_interrupt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def compare(*_: object, **options: object) -> None:
        asked.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(dsa_hw, "compare", compare)
    assert main(["demo", "--out", str(tmp_path)]) == 130
    assert (asked["out"], asked["command"]) == (tmp_path, f"dsa-hw demo --out {tmp_path}")
    again = f"Continue with: dsa-hw demo --config {tmp_path / 'run.yaml'}"
    assert capsys.readouterr().err.endswith(f"Interrupted. Finished work is in {tmp_path}. {again}\n")
