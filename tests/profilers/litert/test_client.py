"""The LiteRT worker process, with a fake worker."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dsa_hw.errors import MeasurementError, MissingDependencyError
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


def test_answer_that_is_not_json_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch, "babbles")
    with pytest.raises(MeasurementError, match="answered 'I am no JSON"):
        Worker().ask("forget", model="x")


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
