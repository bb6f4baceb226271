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


def test_interrupt_names_what_is_continued(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("x", lambda: raising(KeyboardInterrupt()), out=Path("p.sqlite")) == 130
    assert (
        capsys.readouterr().err == "x: Interrupted. p.sqlite contains what was measured. The same command continues.\n"
    )


def test_closed_pipe_ends_without_a_traceback() -> None:
    code = (
        "import sys; from dsa_hw.utils.commands import run_command\n"
        "sys.exit(run_command('x', lambda: [print(i, flush=True) for i in range(100000)] and 0))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""
