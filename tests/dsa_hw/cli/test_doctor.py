"""dsa-hw doctor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsa_hw.cli.main import main


def test_a_usable_and_an_unusable_target_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--target", "torch/cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["targets"]["torch/cpu"] == {"usable": True, "reason": None}
    assert main(["doctor", "--target", "torch/abacus", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)["targets"]["torch/abacus"]
    assert not found["usable"]
    assert "abacus" in found["reason"]


def test_missing_runtimes_do_not_fail_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in ("torch/cpu          usable", "budgets        ours", "profilers      ours"):
        assert part in text
    assert all(len(line.splitlines()) <= 1 for line in text.split("\n"))


def test_a_users_own_module_that_hides_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / "budgets.py").write_text("")
    path = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(Path(__file__).parents[3])!r}]"
    code = f"{path}; from dsa_hw.cli.main import main; sys.exit(main(['inspect', '--model', 'resnet18']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "budgets.py hides the package budgets" in done.stderr
    assert len(done.stderr.splitlines()) == 1
