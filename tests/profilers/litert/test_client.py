"""The LiteRT worker process, with a fake worker."""

from __future__ import annotations

import json
import pwd
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dsa_hw.errors import DsaError, MeasurementError, MissingDependencyError
from dsa_hw.utils.processes import PipedProcess
from profilers.litert import client
from profilers.litert.client import Worker, environment_folder, python_of, versions
from profilers.litert.convert import to_bytes
from tests.fakes.litert_env import make_fake


def test_incomplete_environment_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path))
    python_of(environment_folder()).parent.mkdir(parents=True)
    python_of(environment_folder()).touch()
    with pytest.raises(MissingDependencyError, match=r"lacks ai-edge-litert, .*--again"):
        versions()


def test_worker_that_ends_is_an_error_with_its_log(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch, "dies")
    with pytest.raises(MeasurementError, match=r"ended at request 'convert'.*out of memory"):
        to_bytes(*tiny)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_START", 0.3)
    monkeypatch.setattr(client, "_LIMIT", 0.2)


@pytest.mark.parametrize("mood", ["sleeps", "shouts"])
def test_worker_that_hangs_is_an_error_at_the_deadline(
    mood: str, impatient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fake(tmp_path, monkeypatch, mood)
    worker = Worker()
    with pytest.raises(MeasurementError, match=r"did not answer within 0.2 s at request 'forget'"):
        worker.ask("forget", model="x")
    assert worker.pid is None, "a late answer cannot be mistaken for that of another request"


def test_worker_that_does_not_read_is_an_error_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch, "deaf")
    worker = Worker()
    assert worker.ask("forget", model="x") == {}
    with pytest.raises(MeasurementError, match=r"did not answer within 0.2 s at request 'narrow'"):
        worker.ask("narrow", pads=[0] * 10**6, limit=0.2)


def test_flood_and_deep_answers_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path / "one", monkeypatch, "floods")
    with pytest.raises(MeasurementError, match=r"invalid answer \(it wrote more than 16777216 bytes"):
        Worker().ask("forget", model="x")
    make_fake(tmp_path / "two", monkeypatch, "deep")
    with pytest.raises(MeasurementError, match=r"invalid answer .*nested"):
        Worker().ask("forget", model="x")


@pytest.mark.parametrize(
    "line",
    [
        "I am no JSON",
        "[]",
        "{}",
        "1",
        '{"done": []}',
        '{"done": null}',
        '{"refused": {"x": 1}}',
        '{"failed": 1}',
        '{"done": {}, "refused": "x"}',
        '{"done": {"x": NaN}}',
        '{"done": {"x": 1, "x": 2}}',
    ],
)
def test_other_answers_are_errors(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch, f"says {line}")
    worker = Worker()
    with pytest.raises(MeasurementError, match="sent an invalid answer"):
        worker.ask("forget", model="x")
    assert worker.pid is None


def test_what_is_forgotten_goes_with_the_next_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch)
    worker = Worker()
    worker.forget("a")
    assert worker.pid is None, "nothing is started, and nothing is waited for, when an object is deleted"
    written: list[bytes] = []
    write = PipedProcess.write

    def spying(self: PipedProcess, data: bytes, deadline: float) -> None:
        written.append(data)
        write(self, data, deadline)

    monkeypatch.setattr(PipedProcess, "write", spying)
    worker.ask("forget", model="x")
    worker.ask("forget", model="x")
    assert [json.loads(line)["forgotten"] for line in written] == [["a"], []]
    worker.close()


def test_user_without_a_home_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "XDG_CACHE_HOME", "DSA_HW_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DsaError, match=r"no home folder\. Set DSA_HW_CACHE"):
        versions()


def test_failed_request_does_not_end_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch)
    worker = Worker()
    with pytest.raises(MeasurementError, match="failed at request 'dance': no dance here"):
        worker.ask("dance")
    assert worker.ask("forget", model="x") == {}  # and goes on
    worker.close()


def test_interrupted_request_ends_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch, "sleeps")
    worker = Worker()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)  # SIGINT itself may be ignored where tests run in the background
    begin = time.monotonic()
    try:
        threading.Timer(1.0, lambda: signal.pthread_kill(main, signal.SIGUSR1)).start()
        with pytest.raises(KeyboardInterrupt):
            worker.ask("forget", model="x")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert worker.pid is None
    assert time.monotonic() - begin < 60  # it would have slept for ten minutes
