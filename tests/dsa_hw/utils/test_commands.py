"""Running a command: exit codes and messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsa_hw.errors import InfeasibleBudgetError, ProfileError
from dsa_hw.utils.commands import run_command


def raising(error: BaseException) -> int:
    raise error


def test_exit_code_is_that_of_the_command() -> None:
    assert run_command("x", lambda: 3) == 3
    assert run_command("x", lambda: None) == 0


@pytest.mark.parametrize("error", [ProfileError, InfeasibleBudgetError])
def test_error_is_one_line_with_the_command_and_its_own_exit_code(
    error: type[ProfileError], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("dsa-hw fit", lambda: raising(error("No\n  grid."))) == error.exit_code
    assert capsys.readouterr().err == "dsa-hw fit: No grid.\n"


def test_other_errors_are_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command("x", lambda: 1 // 0)


def test_interrupt_says_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("x", lambda: raising(KeyboardInterrupt()), out=Path("p.sqlite")) == 130
    assert (
        capsys.readouterr().err == "\nx: Interrupted. Finished work is in p.sqlite. Repeat the command to continue.\n"
    )
    assert run_command("x", lambda: raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "\nx: Interrupted. Nothing was kept.\n"


@pytest.mark.parametrize(
    "work",
    ["[print(i, flush=True) for i in range(100000)]", "[print(1, flush=True), time.sleep(1), print(2)]"],
    ids=["while printing", "at the last flush"],
)
def test_closed_pipe_ends_without_a_traceback(work: str) -> None:
    code = (
        "import sys, time; from dsa_hw.utils.commands import run_command\n"
        f"sys.exit(run_command('x', lambda: {work} and 0))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""
