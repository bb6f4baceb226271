"""Child processes that hang, flood and die."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsa_hw.utils.processes import EndedError, FloodError, PipedProcess, StalledError, run_bounded
from tests.fakes.processes import eventually, gone

SOON = 0.2
LATE = 60.0


def by(seconds: float) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def started() -> Iterator[list[PipedProcess]]:
    made: list[PipedProcess] = []
    yield made
    for process in made:
        process.close(0.0)
        assert gone(process.pid)


def start(started: list[PipedProcess], script: str, **options: int) -> PipedProcess:
    started.append(PipedProcess(["sh", "-c", script], **options))  # type: ignore[arg-type]
    return started[-1]


def test_everything_written_and_read_arrives(started: list[PipedProcess]) -> None:
    process = start(started, "head -c 1000000")
    with pytest.raises(StalledError):
        process.write(bytes(10**6), by(SOON))  # nobody reads what `head` writes
    process.close(0.0)
    process = start(started, "read line; echo $line $line; cat")
    process.write(b"word\n", by(LATE))
    assert process.read_until(b"\n", 100, by(LATE)) == b"word word\n"
    process.write(b"rest", by(LATE))
    assert process.read(3, by(LATE)) == b"res"
    assert process.read(1, by(LATE)) == b"t"


def test_process_that_does_not_read_or_write_is_an_error_at_the_deadline(started: list[PipedProcess]) -> None:
    process = start(started, "exec sleep 60")
    with pytest.raises(StalledError, match="read"):
        process.write(bytes(10**6), by(SOON))
    with pytest.raises(StalledError, match="answer"):
        process.read(1, by(SOON))
    with pytest.raises(StalledError, match="answer"):
        process.read_until(b"\n", 10, by(SOON))


def test_flood_without_an_end_is_an_error(started: list[PipedProcess]) -> None:
    process = start(started, "exec yes")
    with pytest.raises(FloodError, match="more than 1000 bytes"):
        process.read_until(b"\0", 1000, by(LATE))
    assert len(process._unread) < 2**18, "no more is kept than one block"


def test_standard_error_is_read_in_blocks_and_its_end_is_kept(started: list[PipedProcess]) -> None:
    process = start(
        started, "head -c 5000000 /dev/zero | tr '\\0' x >&2; echo the end >&2; echo ready", error_bytes=100
    )
    assert process.read_until(b"\n", 100, by(LATE)) == b"ready\n"
    assert process.ended(LATE) == 0
    assert process.error_text.endswith("xxx" + "the end\n")
    assert len(process.error_text) == 100
    endless = start(started, "yes >&2", error_bytes=100)
    with pytest.raises(StalledError):
        endless.read(1, by(SOON))
    assert len(endless.error_text) == 100


def test_process_that_dies_is_an_error(started: list[PipedProcess]) -> None:
    process = start(started, "printf half; exit 3")
    with pytest.raises(EndedError):
        process.read(5, by(LATE))
    assert process.ended(LATE) == 3
    with pytest.raises(EndedError):
        process.write(bytes(10**6), by(LATE))


def test_bounded_command_returns_what_it_printed() -> None:
    found = run_bounded(["sh", "-c", "printf 'a\\377'; echo b >&2; exit 4"], limit=LATE)
    assert (found.status, found.stdout, found.stderr) == (4, "a\ufffd", "b\n")
    with pytest.raises(OSError, match="nowhere"):
        run_bounded(["/nowhere/at/all"], limit=LATE)


def test_bounded_command_and_its_children_are_ended(tmp_path: Path) -> None:
    with pytest.raises(FloodError, match="sh printed more than 1000 bytes"):
        run_bounded(["sh", "-c", "exec yes"], limit=LATE, most=1000)
    for leader in ("wait", "exit 0"):  # the second leaves a child that holds the pipe
        with pytest.raises(StalledError):
            run_bounded(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; {leader}"], limit=0.5)
        assert eventually(lambda: gone(int((tmp_path / "pid").read_text())))
