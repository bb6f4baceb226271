"""Running a command: exit codes and messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dsa_hw.errors import InfeasibleBudgetError, ProfileError
from dsa_hw.utils.commands import run_command
from tests.fakes.outputs import printed_json
from tests.fakes.processes import send


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


def test_error_is_also_an_object_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("x", lambda: raising(ProfileError("No\n  grid.")), as_json=True) == 2
    assert printed_json(capsys, "error") == {"error": "No grid.", "exit_code": 2}


def test_interrupt_says_what_is_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "p.sqlite"
    assert run_command("x", lambda: raising(KeyboardInterrupt()), out=out) == 130
    assert capsys.readouterr().err == "\nx: Interrupted. Nothing was kept.\n", "there is no such file"
    out.touch()
    interrupt = KeyboardInterrupt()
    interrupt.add_note("profile")
    assert run_command("x", lambda: raising(interrupt), out=out) == 130
    during = "Interrupted during the stage 'profile'"
    assert capsys.readouterr().err == f"\nx: {during}. Finished work is in {out}. Repeat the command to continue.\n"
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_to_a_full_disk_is_one_line() -> None:
    code = "from dsa_hw.utils.commands import run_command\nraise SystemExit(run_command('x', lambda: print('text')))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    where = "standard output or a temporary file (TMPDIR)"
    assert done.stderr == f"x: Cannot write {where}: No space left on device.\n"
    assert done.returncode == 2


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("a\nb"), MemoryError(), RecursionError("deep"), OSError(5, "broken")]
)
def test_unexpected_error_is_one_line_and_its_traceback_is_in_a_file(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path))
    assert run_command("dsa-hw fit", lambda: raising(error)) == 1
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 1
    assert message.startswith(f"dsa-hw fit: Unexpected {type(error).__name__}: ")
    (file,) = (tmp_path / "tracebacks").iterdir()
    assert str(file) in message
    assert "in raising" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before


def test_traceback_goes_to_a_temporary_folder_where_the_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").touch()
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_command("x", lambda: 1 // 0) == 1
    (file,) = tmp_path.glob("dsa-hw-*/x-*.txt")
    assert str(file) in capsys.readouterr().err


def test_broken_pipe_of_another_process_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path))
    assert run_command("x", lambda: raising(BrokenPipeError(32, "Broken pipe"))) == 1
    assert "Unexpected BrokenPipeError" in capsys.readouterr().err


def test_sigterm_is_handled_like_an_interrupt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cleaned = []

    def work() -> int:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            try:
                send(signal.SIGTERM)
            finally:
                cleaned.append(True)
        return 0

    assert run_command("x", work, out=Path("p.sqlite"), again="Repeat it.") == 143
    assert capsys.readouterr().err == "\nx: Terminated. Nothing was kept.\n"
    assert cleaned == [True]
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_of_a_program_with_its_own_handler_is_left_alone() -> None:
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        assert run_command("x", lambda: send(signal.SIGTERM)) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


def test_terminated_training_saves_and_exits_with_143(tmp_path: Path) -> None:
    """The whole way: a process that trains is sent SIGTERM, finishes its step, saves, and continues to the same end."""
    code = f"""
import os, signal, sys, torch
from pathlib import Path
from dsa_hw.training.finetune import finetune
from dsa_hw.utils.commands import run_command
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
data = [(torch.randn(8, 4), torch.zeros(8, dtype=torch.long)) for _ in range(5)]
class Loader(list):
    read = 0
    def __iter__(self):
        for item in list.__iter__(self):
            self.read += 1
            if self.read == 3 and sys.argv[1] == "kill":
                signal.raise_signal(signal.SIGTERM)
            yield item
def work():
    finetune(model, Loader(data), 2, folder=Path({str(tmp_path)!r}))
    print(float(model.weight.sum()))
sys.exit(run_command("x", work, out=Path("out")))
"""

    def run(how: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=False)

    killed = run("kill")
    assert killed.returncode == 143, killed.stderr
    assert killed.stderr.splitlines()[-1] == "x: Terminated. Nothing was kept."
    assert [file.name for file in tmp_path.iterdir()] == ["finetune.pt"]
    continued = run("go")
    assert "Continuing a training at step 3 of 10" in continued.stderr
    (tmp_path / "finetune.pt").unlink()
    assert continued.stdout == run("go").stdout != ""
