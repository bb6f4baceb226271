"""The worker's requests, as far as they need no LiteRT."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from profilers.litert.worker import service as litert


def test_worker_answers_each_request(tmp_path: Path) -> None:
    """The worker's real script, in our own interpreter: what needs no LiteRT works there."""
    requests = [
        {"do": "forget", "forgotten": ["y"], "model": "x"},
        {"do": "load", "forgotten": [], "model": "../x", "inputs": [], "threads": 1},
        {"do": "?", "forgotten": []},
    ]
    text = "".join(json.dumps(r) + "\n" for r in requests)
    command = [sys.executable, litert.__file__, str(tmp_path)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers[0] == {"done": {}}
    assert "refused" in answers[1] or "failed" in answers[1]
    assert "'?'" in answers[2]["failed"]


def test_names_with_folders_are_an_error(tmp_path: Path) -> None:
    service = litert.Service(tmp_path)
    for name in ("../x", "/etc/passwd", "a/b", ""):
        with pytest.raises(litert.UnsupportedError, match="not a plain file name"):
            service._path(name)


def test_worker_times_each_run(tmp_path: Path) -> None:
    service = litert.Service(tmp_path)
    calls: list[int] = []
    service._interpreters["m"] = SimpleNamespace(invoke=lambda: calls.append(1))
    steps = service.sequence([("m", 3), ("m", 2)])["steps"]
    assert [len(seconds) for seconds in steps] == [3, 2]
    assert len(calls) == 5
