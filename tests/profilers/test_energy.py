"""``python -m profilers.energy``."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsa_hw.errors import MissingDependencyError
from profilers import cli, energy
from profilers.measuring import counters, energy_bench
from profilers.measuring.rules import MeasuringRules
from tests.fakes.outputs import printed_json


def command(tmp_path: Path, *arguments: str) -> list[str]:
    model = ["--model", "tests.fakes.machine:Tiny", "--input", "1x3x16x16", "--runtime", "torch"]
    return [*model, "--out", str(tmp_path / "energy.sqlite"), "--grid", "8", *arguments]


def test_command_measures_joules_with_the_users_meter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lenient: MeasuringRules
) -> None:
    monkeypatch.setattr(cli, "_rules", lambda options: lenient)
    monkeypatch.setattr(energy_bench, "_SETTLE", 0.01)
    monkeypatch.setattr(energy_bench, "_LEAST_SECONDS", 0.03)
    meter = "tests.fakes.powered:real_time"
    arguments = command(tmp_path, "--counter", meter, "--samples", "2", "--holdout", "1", "--time-limit", "2min")
    assert energy.main(arguments) == 0
    text = capsys.readouterr().out
    for part in ("mJ, 95% CI [", "net of idling", "next: dsa-hw fit"):
        assert part in text
    assert energy.main([*arguments, "--json"]) == 0
    report = printed_json(capsys, "profile")
    assert report["quantity"] == "energy"
    assert report["unit"] == "J"
    for row in report["configurations"]:
        assert row["watts"] == pytest.approx(20.0, rel=0.05), "the meter's physics"
        assert abs(row["net"]) < 0.05 * row["joules"], "it counts the same when idle"


def test_machine_without_counter_is_refused_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        counters.find("cpu")
    except MissingDependencyError:
        pass
    else:
        pytest.skip("this machine has a CPU energy counter")
    assert energy.main(command(tmp_path, "--device", "cpu")) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "counter" in captured.err
    assert "--counter package.module:function" in captured.err
    assert not (tmp_path / "energy.sqlite").exists(), "refused before any work"


def test_meter_without_updates_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy_bench, "_STILL", 0.2)
    assert energy.main(command(tmp_path, "--counter", "tests.fakes.powered:standing")) == 4
    assert "did not move" in capsys.readouterr().err
