"""A file is written whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsa_hw.errors import FileError, PlanError
from dsa_hw.utils.files import (
    append_line,
    cache_folder,
    locked,
    only_process,
    settle_folder,
    whole_file,
    whole_folder,
    write_bytes,
    write_figure,
    write_text,
)


def _write_half(path: Path) -> None:
    with whole_file(path) as temporary:
        temporary.write_text("new")
        raise RuntimeError("half way")


def test_failed_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_text(path, "old")
    with pytest.raises(RuntimeError, match="half way"):
        _write_half(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


def test_missing_folder_is_an_error_of_the_given_class(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="Cannot write"):
        write_text(tmp_path / "missing" / "plan.json", "text", PlanError)


def test_a_link_with_the_temporary_prefix_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("precious")
    for name in ("model.json.partial", ".model.json", ".model.json."):
        (tmp_path / name).symlink_to(precious)
    write_text(tmp_path / "model.json", "new")
    assert precious.read_text() == "precious"
    assert not (tmp_path / "model.json").is_symlink()


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_permissions_follow_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("DSA_HW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if os.name == "posix" and os.uname().sysname == "Linux":
        assert cache_folder() == tmp_path / "dsa_hw"


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_any_interrupt_removes_the_temporary_file(tmp_path: Path, interrupt: type[BaseException]) -> None:
    def write() -> None:
        with whole_file(tmp_path / "file") as temporary:
            temporary.write_text("half")
            raise interrupt

    with pytest.raises(interrupt):
        write()
    assert not os.listdir(tmp_path)


def test_what_is_not_a_regular_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "folder", "link"):
        with pytest.raises(FileError, match="not a regular file"):
            write_text(tmp_path / name, "text")
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_figure_needs_a_known_suffix(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1, 1))
    with pytest.raises(FileError, match=r"\.png, \.svg or \.pdf; got"):
        write_figure(tmp_path / "plot", figure)
    write_figure(tmp_path / "plot.svg", figure)
    assert os.listdir(tmp_path) == ["plot.svg"]
    assert "<svg" in (tmp_path / "plot.svg").read_text()


# Full disk, read-only folder ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _files_of_at_most(size: int) -> Iterator[None]:
    """Let writing beyond ``size`` bytes fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _state(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _save_tensors(path: Path) -> None:
    import torch

    with whole_file(path / "model.pt", PlanError) as file:
        torch.save(torch.zeros(100_000), file)


def _save_safely(path: Path) -> None:
    import torch

    safetensors = pytest.importorskip("safetensors.torch")
    with whole_file(path / "model.pt", PlanError) as file:
        safetensors.save_file({"x": torch.zeros(100_000)}, file)


def _save_folder(path: Path) -> None:
    with whole_folder(path, ["a.json", "rows.jsonl", "model.pt"], PlanError) as folder:
        write_bytes(folder / "a.json", b"new", PlanError)
        write_bytes(folder / "rows.jsonl", b"x" * 100_000, PlanError)


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_text(folder / "a.json", "x" * 100_000, PlanError),
        lambda folder: append_line(folder / "rows.jsonl", "x" * 100_000, PlanError),
        _save_folder,
        _save_tensors,
        _save_safely,
    ],
    ids=["file", "line", "folder", "torch", "safetensors"],
)
def test_full_disk_is_a_typed_line_and_changes_nothing(tmp_path: Path, write: Callable[[Path], None]) -> None:
    for name in ("a.json", "model.pt", "rows.jsonl"):
        (tmp_path / name).write_text(f"old {name}\n")
    before = _state(tmp_path)
    with _files_of_at_most(30_000), pytest.raises(PlanError, match="Cannot write") as caught:
        write(tmp_path)
    assert "\n" not in str(caught.value)
    assert _state(tmp_path) == before
    write(tmp_path)
    assert _state(tmp_path) != before


_READ_ONLY = """
import os, sys
from dsa_hw.errors import FileError
import dsa_hw.utils.files as files
folder = sys.argv[1]
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
def save():
    with files.whole_folder(folder, []): pass
def lock():
    with files.locked(f"{folder}/a"): pass
writers = [lambda: files.write_text(f"{folder}/a", "x"), lambda: files.append_line(f"{folder}/b", "x"), save, lock]
for write in writers:
    try: write()
    except FileError as error: print(error)
"""


def test_read_only_folder_is_a_typed_line() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as outer:  # not tmp_path, which another user cannot enter
        os.chmod(outer, 0o755)
        folder = Path(outer) / "folder"
        folder.mkdir()
        folder.chmod(0o555)
        done = subprocess.run([sys.executable, "-c", _READ_ONLY, str(folder)], capture_output=True, text=True)
        assert done.stderr == ""
        assert done.stdout.count("Permission denied.") == 4
        assert not os.listdir(folder)
        folder.chmod(0o755)


# Errors at every call -------------------------------------------------------------------------------------------------

_CALLS = ("open", "close", "write", "fsync", "replace", "rename", "mkdir", "lseek", "lstat", "unlink", "rmdir")


class _FailingCall:
    """Let call number ``at`` of the operating system fail once; writes before it are short."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.count, self.at = 0, at
        for name in _CALLS:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.count += 1
            if name == "close":
                real(*args, **options)  # a file is closed also where that reports an error
            if self.count == self.at:
                raise OSError(errno.EIO, "Input/output error")
            if name in ("close", "fsync"):  # really flushing hundreds of times is slow
                return None
            if name == "write":
                return real(args[0], args[1][:7])
            return real(*args, **options)

        return call


_RESULT = ("plan", "weights", "table", "extra")


def _write_generation(folder: Path, name: str) -> None:
    """Write the generation ``name`` of a folder by each way of writing."""
    write_text(folder / "single", name * 10)
    append_line(folder / "lines", name * 10)
    with whole_folder(folder / "result", _RESULT) as staging:
        for part in _RESULT if name == "old" else _RESULT[:-1]:
            write_text(staging / part, name * 10)
    with locked(folder / "counter"):
        write_text(folder / "counter", name * 10)


def _is_whole(folder: Path) -> None:
    """Assert that every file of the folder has one generation, after a reader has settled it."""
    settle_folder(folder / "result", _RESULT)
    for single in ("single", "counter"):
        assert (folder / single).read_text() in ("old" * 10, "new" * 10)
    lines = (folder / "lines").read_text().splitlines()
    assert lines[:1] == ["old" * 10]
    assert set(lines) <= {"old" * 10, "new" * 10}
    result = {n: c.decode() for n, c in _state(folder / "result").items() if not n.startswith(".")}
    old = dict.fromkeys(_RESULT, "old" * 10)
    new = dict.fromkeys(_RESULT[:-1], "new" * 10)
    kept = {"mine.txt": "mine"}
    assert result in (old | kept, new | kept)


def _prepared(folder: Path) -> Path:
    folder.mkdir()
    _write_generation(folder, "old")
    (folder / "result" / "mine.txt").write_text("mine")
    return folder


def test_an_error_at_any_call_leaves_old_or_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 0
    template = _prepared(tmp_path / "template")
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for at in range(1, 1000):
        folder = Path(shutil.copytree(template, tmp_path / str(at)))
        with monkeypatch.context() as patch:
            failing = _FailingCall(patch, at)
            try:
                _write_generation(folder, "new")
            except FileError:
                failures += 1
        _is_whole(folder)
        _write_generation(folder, "new")  # nothing that is left over is in the way
        _is_whole(folder)
        assert (folder / "result" / "plan").read_text() == "new" * 10
        if failing.count < at:
            break
    assert at > failures > 40


# Killed processes, several processes ----------------------------------------------------------------------------------

_ENDLESS = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.dsa_hw.utils.test_files import _write_generation
folder = Path(sys.argv[1])
print("ready", flush=True)
while True:
    _write_generation(folder, "new")
    _write_generation(folder, "old")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_process_leaves_old_or_new_files(tmp_path: Path, number: int) -> None:
    generator = random.Random(number)
    folder = _prepared(tmp_path / "folder")
    root = str(Path(__file__).parents[3])
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", _ENDLESS, str(folder), root], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(generator.uniform(0.0, 0.08))
        process.send_signal(number)
        process.wait()
        process.stdout.close()
        _is_whole(folder)
    _write_generation(folder, "new")
    assert not list((folder / "result").glob(".*"))


_COUNT = """
import json, sys
from pathlib import Path
from dsa_hw.utils.files import append_line, locked, write_text
folder, name = Path(sys.argv[1]), sys.argv[2]
for i in range(150):
    with locked(folder / "known.json"):
        known = json.loads((folder / "known.json").read_text())
        write_text(folder / "known.json", json.dumps({**known, f"{name} {i}": i}))
    append_line(folder / "lines", f"{name} {i} " + "x" * 200)
"""


@pytest.mark.parametrize("kind", ["flock", "existence"])
def test_two_processes_lose_no_update(tmp_path: Path, kind: str) -> None:
    (tmp_path / "known.json").write_text("{}")
    without = "import dsa_hw.utils.files as f\nf._acquire = f._acquire_by_existence\n" if kind == "existence" else ""
    commands = [[sys.executable, "-c", without + _COUNT, str(tmp_path), name] for name in ("a", "b")]
    processes = [subprocess.Popen(command) for command in commands]
    assert [process.wait() for process in processes] == [0, 0]
    wanted = {f"{name} {i}" for name in ("a", "b") for i in range(150)}
    assert set(json.loads((tmp_path / "known.json").read_text())) == wanted
    lines = (tmp_path / "lines").read_text().splitlines()
    assert sorted(lines) == sorted(f"{name} " + "x" * 200 for name in wanted)
    assert sorted(os.listdir(tmp_path)) == ["known.json", "lines"]


def test_a_lock_that_stays_is_a_typed_line(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "a"),
        pytest.raises(FileError, match="Another process has locked"),
        locked(tmp_path / "a", patience=0.01),
    ):
        pass
    with locked(tmp_path / "a"):
        pass


_WORK = """
import sys
from pathlib import Path
from dsa_hw.utils.files import only_process
with only_process(Path(sys.argv[1])):
    print("works", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_does_not_continue_the_work_of_a_first(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-c", _WORK, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"works\n"
        with pytest.raises(FileError, match="Another process works in"), only_process(folder):
            pass
        first.kill()
    with only_process(folder):  # the lock ends with the process
        assert os.listdir(folder) == [".work.lock"]
    assert folder.exists(), "it was there before"
    with only_process(tmp_path / "new"), only_process(None):
        pass
    assert not (tmp_path / "new").exists(), "nothing was kept"


def test_a_line_that_was_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("one\ntw")
    append_line(tmp_path / "lines", "three")
    assert (tmp_path / "lines").read_text() == "one\ntw\nthree\n"


def test_settling_never_follows_a_link(tmp_path: Path) -> None:
    for name in ("result", "private"):
        (tmp_path / name).mkdir()
    (tmp_path / "private" / "plan").write_text("key")
    (tmp_path / "result" / ".switch").symlink_to(tmp_path / "private")
    with pytest.raises(FileError, match="not a folder"):
        settle_folder(tmp_path / "result", _RESULT)
    assert _state(tmp_path) == {"private/plan": b"key"}
    (tmp_path / "result" / ".switch").unlink()
    (tmp_path / "result" / ".switch").mkdir()
    (tmp_path / "result" / ".switch" / "plan").symlink_to(tmp_path / "private" / "plan")
    with pytest.raises(FileError, match="foreign file, 'plan'"):
        settle_folder(tmp_path / "result", _RESULT)
    assert not os.path.lexists(tmp_path / "result" / "plan")


@pytest.mark.parametrize("name", ["mine.txt", "src", "main.py"])
def test_settling_replaces_no_other_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.py").write_text("mine")
    (tmp_path / "mine.txt").write_text("mine")
    before = _state(tmp_path)
    (tmp_path / ".switch").mkdir()
    (tmp_path / ".switch" / name).write_text("stranger")
    with pytest.raises(FileError, match=f"foreign file, '{name}'"):
        settle_folder(tmp_path, _RESULT)
    with pytest.raises(FileError, match="foreign file"), whole_folder(tmp_path, _RESULT):
        pass
    shutil.rmtree(tmp_path / ".switch")
    assert _state(tmp_path) == before


def test_settling_removes_no_other_file(tmp_path: Path) -> None:
    result, private = tmp_path / "result", tmp_path / "private"
    for folder in (result / ".switch", result / "src", private):
        folder.mkdir(parents=True)
    for file in (private / "key", result / "mine.txt", result / "src" / "main.py", result / "extra"):
        file.write_text("mine")
    names = ["../private/key", "..", ".", "/", str(private / "key"), 5, "mine.txt", "src", "extra"]
    (result / ".switch" / ".removed.json").write_text(json.dumps(names))
    settle_folder(result, _RESULT)
    assert sorted(_state(tmp_path)) == ["private/key", "result/mine.txt", "result/src/main.py"]


def test_a_folder_in_the_place_of_a_file_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "mine.txt").write_text("mine")
    with pytest.raises(FileError, match="plan in it is a folder"), whole_folder(tmp_path, _RESULT) as staging:
        write_text(staging / "plan", "new")
    assert _state(tmp_path) == {"plan/mine.txt": b"mine"}


def test_a_lock_that_is_removed_meanwhile_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, times = os.stat, []

    def stat_of(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).endswith(".a.lock") and not times:
            times.append(1)
            os.unlink(path)  # by the process that had the lock
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", stat_of)
    with locked(tmp_path / "a"):
        assert times
