"""``dsa-hw doctor``."""

from __future__ import annotations

import json

import pytest

from dsa_hw.cli import doctor
from dsa_hw.cli.main import main
from tests.dsa_hw.cli.test_options import documented_keys


def test_unusable_target_has_a_reason_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--target", "torch/cpu", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert set(content) == documented_keys("doctor")
    assert content["targets"]["torch/cpu"] == {"usable": True, "reason": None}
    assert main(["doctor", "--target", "torch/abacus", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)["targets"]["torch/abacus"]
    assert not found["usable"]
    assert "abacus" in found["reason"]


def test_missing_runtimes_do_not_fail_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in ("torch/cpu          usable", "budgets        ours", "profilers      ours"):
        assert part in text
    assert len(text.partition("\nTargets\n")[2].splitlines()) == len(doctor._TARGETS), "a reason is one line"
