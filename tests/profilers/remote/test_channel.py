"""The connection to an agent, with boards that hang, flood, die and lie."""

from __future__ import annotations

import struct
import sys
import threading
import time
from pathlib import Path

import pytest

from profilers.remote import channel
from profilers.remote.channel import Channel, LostError, RefusedError
from tests.fakes import lying_board as script
from tests.fakes.processes import gone

SOON = 0.3
LATE = 60.0


def board(*words: str) -> list[str]:
    return [sys.executable, "-SE", str(script.__spec__.origin), *words]  # type: ignore[union-attr]


def exchange(*words: str, limit: float = LATE, payload: bytes = b"", most: int = 0) -> None:
    found = Channel(board(*words), LATE)
    try:
        found.exchange({"op": "state"}, payload, limit=limit, most=most)
    finally:
        found.close()
        assert gone(found.pid), "nothing is left running"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_GRACE", 0.0)


@pytest.mark.parametrize("kind", ["deaf from the start", "never starts"])
def test_board_that_does_not_start_is_an_error_at_the_deadline(kind: str) -> None:
    with pytest.raises(LostError, match="no answer") as error:
        Channel(board(kind), SOON)
    assert error.value.late


@pytest.mark.parametrize("kind", ["deaf", "mute", "floods standard error"])
def test_board_that_hangs_is_an_error_at_the_deadline(kind: str) -> None:
    with pytest.raises(LostError, match="no answer") as error:
        exchange(kind, limit=SOON, payload=bytes(10**6))
    assert error.value.late


def test_floods_are_errors() -> None:
    with pytest.raises(LostError, match="more than 65536 bytes"):
        Channel(board("babbles before it starts"), LATE)
    with pytest.raises(LostError, match="invalid answer"):
        exchange("floods")
    with pytest.raises(LostError, match="does not belong to the request"):
        exchange("sends frames for ever")


def test_board_that_dies_is_an_error_with_its_last_words() -> None:
    with pytest.raises(LostError, match="Out of memory") as error:
        exchange("dies")
    assert error.value.status == 7
    assert not error.value.late


def test_deep_answer_is_an_error_and_ends_no_thread() -> None:
    before = threading.active_count()
    begin = time.monotonic()
    with pytest.raises(LostError, match="nested"):
        exchange("deep")
    assert threading.active_count() == before
    assert time.monotonic() - begin < LATE


@pytest.mark.parametrize(
    "answer",
    [
        script.frame(b"[1]"),
        script.frame(b"{}"),
        script.frame(b'{"id": 2}'),
        script.frame(b'{"id": true}'),
        script.frame(b'{"id": "1"}'),
        script.frame(b'{"id": 1, "x": NaN}'),
        script.frame(b'{"id": 1, "x": 1e999}'),
        script.frame(b'{"id": 1, "x": 1, "x": 2}'),
        script.frame(b"\xff\xfe"),
        script.frame(b"no JSON"),
        script.frame(b'{"id": 1}', bytes(17)),  # more than was asked for
        struct.pack(">II", 2**31, 0),
        struct.pack(">II", 2, 2**31),
    ],
)
def test_other_answers_are_errors(answer: bytes, tmp_path: Path) -> None:
    (tmp_path / "answer").write_bytes(answer)
    with pytest.raises(LostError, match="invalid answer") as error:
        exchange("says", str(tmp_path / "answer"), most=16)
    assert error.value.status is None


def test_refusal_is_text_without_control_characters(tmp_path: Path) -> None:
    (tmp_path / "answer").write_bytes(script.frame(b'{"id": 1, "refused": ["disk"], "text": "\\u001b[2J full"}'))
    with pytest.raises(RefusedError, match=r"^\?\[2J full$"):
        exchange("says", str(tmp_path / "answer"))
