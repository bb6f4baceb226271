"""``dsa-hw``: its commands, start-up, errors and interrupts."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import dsa_hw
from dsa_hw.cli.main import main
from tests.dsa_hw.cli.test_options import commands

HEAVY = ("torch", "pandas", "sklearn", "scipy", "matplotlib", "torchvision")


def test_help_of_every_command_imports_no_heavy_package() -> None:
    code = f"""
import sys
from dsa_hw.cli.main import main
for words in ([], *([name] for name in {sorted(commands())!r})):
    try:
        main([*words, "--help"])
    except SystemExit as end:
        assert end.code == 0
print("imported:", [name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "imported: []"


def test_module_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "dsa_hw.cli", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: dsa-hw ")
    for name in commands():
        assert f"\n    {name} " in done.stdout
    assert "doctor" in commands()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["inspect"], "dsa-hw inspect: The following arguments are required: --model. See dsa-hw inspect --help."),
        (
            ["inspect", "--model", "resnet20", "--speed", "2 3"],
            "dsa-hw inspect: Unknown arguments: --speed '2 3'. See dsa-hw inspect --help.",
        ),
        (
            ["verify", "plan.json", "--model", "resnet18", "--require", "2"],
            "dsa-hw verify: Argument --require: must be a percentage such as 2% or 5%, got '2'. "
            "See dsa-hw verify --help.",
        ),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert capsys.readouterr().err == f"{error}\n"


def test_interrupt_says_what_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dsa_hw, "allocate", interrupt)
    monkeypatch.setattr(dsa_hw, "find_groups", interrupt)
    model = ["--model", "tests.fakes.digits:net"]
    assert main(["allocate", *model, "--budget", "flops=50%", "--out", str(tmp_path)]) == 130
    expected = f"dsa-hw allocate: Interrupted. Finished work is in {tmp_path}. Repeat the command to continue."
    assert capsys.readouterr().err.splitlines()[-1] == expected
    assert main(["inspect", *model]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "dsa-hw inspect: Interrupted. Nothing was kept."


def test_interrupted_command_continues_from_its_run_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def interrupt(_: object, budgets: object, **__: object) -> None:
        asked.append(budgets)
        raise KeyboardInterrupt

    monkeypatch.setattr(dsa_hw, "allocate", interrupt)
    assert main(["allocate", "--model", "resnet8", "--budget", "flops=50%", "--out", str(tmp_path)]) == 130
    said, _, again = capsys.readouterr().err.splitlines()[-1].partition(" Continue with: ")
    assert said == f"dsa-hw allocate: Interrupted. Finished work is in {tmp_path}."
    program, *words = shlex.split(again)
    assert (program, main(words)) == ("dsa-hw", 130)
    assert asked == [[dsa_hw.FlopsBudget("50%")]] * 2


def test_verbose_shows_the_traceback(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    assert main(["-v", "inspect", "--model", "no_such_network"]) == 2
    assert "ModelError" in caplog.text
    assert capsys.readouterr().err.startswith("dsa-hw inspect: Unknown model 'no_such_network'.")
