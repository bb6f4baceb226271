"""``dsa-hw doctor``."""

from __future__ import annotations

import re

import pytest
import torch

import dsa_hw
from dsa_hw.cli import doctor
from dsa_hw.cli.main import main
from tests.dsa_hw.cli.test_options import documented_keys
from tests.fakes.outputs import printed_json


def test_unusable_target_has_a_reason_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_TRIAL_SECONDS", 1.0)
    assert main(["doctor", "--target", "torch/cpu", "--json"]) == 0
    content = printed_json(capsys, "doctor")
    assert set(content) == documented_keys("doctor")
    assert "resnet8 on torch/cpu" in content["trials"]["torch/cpu"]
    assert content["targets"]["torch/cpu"] == {"usable": True, "reason": None}
    assert main(["doctor", "--target", "torch/abacus", "--json"]) == 2
    found = printed_json(capsys, "doctor")["targets"]["torch/abacus"]
    assert not found["usable"]
    assert "abacus" in found["reason"]


def test_missing_runtimes_do_not_fail_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in ("torch/cpu          usable", "budgets        ours", "profilers      ours"):
        assert part in text
    assert len(text.partition("\nTargets\n")[2].splitlines()) == len(doctor._TARGETS), "a reason is one line"


def test_target_is_tried_and_the_last_line_is_for_an_issue(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_TRIAL_SECONDS", 2.0)
    assert main(["doctor", "--target", "torch/cpu"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("For an issue: dsa_hw ")
    assert re.search(r"resnet8 on torch/cpu fp32 x1: [0-9.]+ ms", last)
    assert f"torch {torch.__version__}" in last


def test_target_that_fails_while_it_runs_is_not_usable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("driver\nlost")

    monkeypatch.setattr(dsa_hw, "measure", fail)
    assert main(["doctor", "--target", "torch/cpu"]) == 2
    assert capsys.readouterr().out.splitlines()[-1].endswith("torch/cpu not usable: RuntimeError: driver lost")
