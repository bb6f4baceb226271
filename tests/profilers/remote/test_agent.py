"""The agent by itself."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import os
import pwd
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.remote import agent
from profilers.remote.channel import BOOTSTRAP, Channel, LostError
from tests.fakes import board_programs
from tests.fakes.processes import LOCAL, agent_pid, children, eventually, gone


def test_one_session_at_a_time_except_after_a_lost_connection(tmp_path: Path) -> None:
    hello = {"op": "hello", "session": "ours", "idle": 60, "folder": str(tmp_path / "board"), "room": 10**6}
    first = Channel(LOCAL, 60)
    first.exchange(hello)
    second = Channel(LOCAL, 60)
    try:
        second.exchange(hello)  # the connection of the first is dead, as far as we know
        with pytest.raises(LostError):
            first.exchange({"op": "state"})
        other = agent.Agent(io.BytesIO(), io.BytesIO())
        with pytest.raises(agent.RefusalError, match="another session") as error:
            other._take(str(tmp_path / "board"), "theirs", patience=0.2)
        assert error.value.kind == "busy"
        other._lock.close()
        second.exchange({"op": "state"})
    finally:
        first.close()
        second.close()


def artefacts(tmp_path: Path, room: int = 10**6) -> agent.Artefacts:
    return agent.Artefacts(str(tmp_path / "artefacts"), room)


@contextlib.contextmanager
def refused(kind: str) -> Iterator[None]:
    with pytest.raises(agent.RefusalError) as error:
        yield
    assert error.value.kind == kind


def test_only_announced_artefacts_with_their_hash_are_accepted(tmp_path: Path) -> None:
    kept = artefacts(tmp_path)
    name = hashlib.sha256(b"network").hexdigest()
    with refused("unannounced"):
        kept.put(name, 0, b"network")
    with refused("unannounced"):
        kept.get(name)
    for bad in ("../" + name, "lock", name.upper(), name + "\n", "/etc/passwd", name[:-1]):
        with refused("protocol"):
            kept.announce({bad: 7})
        with refused("unannounced"):
            kept.put(bad, 0, b"network")
    for size in (0, -1, True, 7.0, "7"):
        with refused("protocol"):
            kept.announce({name: size})
    assert kept.announce({name: 7}) == {name: 0}
    with refused("hash"):
        kept.put(name, 0, b"netwurk")
    assert os.listdir(kept.folder) == []
    with refused("protocol"):
        kept.put(name, 0, b"networks")  # longer than announced
    assert kept.put(name, 0, b"net") == 3
    with refused("protocol"):
        kept.put(name, 5, b"rk")
    assert artefacts(tmp_path).announce({name: 7}) == {name: 3}, "the next agent knows what is there"
    assert kept.put(name, 3, b"work") == 7
    assert kept.get(name) == b"network"
    assert os.listdir(kept.folder) == [name]
    assert os.stat(kept.folder).st_mode & 0o777 == 0o700


def test_links_and_folders_of_others_are_refused(tmp_path: Path) -> None:
    kept = artefacts(tmp_path)
    name = hashlib.sha256(b"network").hexdigest()
    kept.announce({name: 7})
    victim = tmp_path / "victim"
    victim.write_text("")
    (tmp_path / "artefacts" / f"{name}.part").symlink_to(victim)
    with refused("folder"):
        kept.put(name, 0, b"network")
    assert victim.read_text() == ""
    (tmp_path / "artefacts" / "lock").symlink_to(victim)
    with refused("folder"):
        agent.Agent(io.BytesIO(), io.BytesIO())._take(kept.folder, "ours", patience=0.1)
    assert victim.read_text() == ""
    os.chmod(kept.folder, 0o777)
    with refused("folder"):
        artefacts(tmp_path)


def test_user_without_a_home_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    board = agent.Agent(io.BytesIO(), io.BytesIO())
    for folder in (None, "~/mine"):
        with refused("folder"):
            board.hello({"op": "hello", "session": "ours", "idle": 60, "folder": folder, "room": 1})
    assert not list(tmp_path.iterdir()), "no folder is named ~"


def test_artefacts_have_a_limit_and_an_age(tmp_path: Path) -> None:
    kept = artefacts(tmp_path, room=25)
    first, second = (hashlib.sha256(bytes([i]) * 20).hexdigest() for i in range(2))
    with refused("disk"):
        kept.announce({first: 20, second: 20})  # no room for both
    kept.announce({first: 20})
    kept.put(first, 0, bytes([0]) * 20)
    assert os.listdir(artefacts(tmp_path).folder) == [first]
    os.utime(os.path.join(kept.folder, first), (1, 1))
    assert os.listdir(artefacts(tmp_path).folder) == [], "what nobody used for a month is deleted"


def test_oldest_artefacts_are_deleted_and_a_full_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = artefacts(tmp_path, room=25)
    names = []
    for i in range(3):
        data = bytes([i]) * 10
        names.append(hashlib.sha256(data).hexdigest())
        kept.announce({names[i]: 10})
        kept.put(names[i], 0, data)
        os.utime(os.path.join(kept.folder, names[i]), (i, i))
    assert set(os.listdir(kept.folder)) == set(names[1:])
    full = SimpleNamespace(f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with refused("disk"):
        kept.announce({hashlib.sha256(b"x").hexdigest(): 1})


def test_invalid_requests_are_refused() -> None:
    source = io.BytesIO()
    requests: list[dict[str, Any]] = [{"op": "announce", "artefacts": {}}, {"op": "fly"}, {"op": "hello"}, {"id": 7}]
    for request in requests:
        agent.write_frame(source, request)
    source.seek(0)
    sink = io.BytesIO()
    agent.Agent(source, sink).serve()
    signal.alarm(0)  # the agent's own watchdog, in this process
    assert sink.getvalue().startswith(agent.BANNER)
    sink.seek(len(agent.BANNER))
    replies = [agent.read_frame(sink) for _ in requests]
    assert all(r is not None and r[0]["refused"] == "protocol" for r in replies)
    assert [r and r[0]["id"] for r in replies] == [None, None, None, 7], "a reply names its request"
    assert agent.read_frame(sink) is None


def test_least_recently_used_networks_are_unloaded_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        agent, "Network", lambda artefact, arrays, threads, device: SimpleNamespace(size=3 * len(artefact))
    )
    board = agent.Agent(io.BytesIO(), io.BytesIO())
    board.memory, board.artefacts = 75, artefacts(tmp_path)
    names = []
    for content in (b"n" * 8, b"\0" * 4):
        names.append(hashlib.sha256(content).hexdigest())
        board.artefacts.announce({names[-1]: len(content)})
        board.artefacts.put(names[-1], 0, content)
    request = {"network": names[0], "inputs": names[1], "specs": [["float32", [1]]], "threads": 1, "device": "cpu"}

    def load(handle: int, *keep: int) -> Any:
        return board.load({**request, "handle": handle, "keep": [*keep, handle]})["evicted"]

    assert [load(1), load(2), load(3)] == [[], [], []], "three networks fit"
    assert load(4, 1) == [2], "1 is older, but it is needed"
    board.network(3)
    assert load(5) == [1]
    assert load(6, 3, 4, 5) == [3], "where not all that are needed fit, the reply says so"


@settings(max_examples=30)
@given(
    st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.integers()), max_size=5), st.binary(max_size=200)
)
def test_frames_round_trip(header: dict[str, Any], payload: bytes) -> None:
    stream = io.BytesIO()
    agent.write_frame(stream, header, payload)
    data = stream.getvalue()
    assert agent.read_frame(io.BytesIO(data)) == (header, payload)
    assert agent.read_frame(io.BytesIO(data[:-1])) is None, "cut off is the end, not half a frame"


@settings(max_examples=50)
@given(st.binary(max_size=64))
def test_invalid_bytes_are_no_frame(data: bytes) -> None:
    try:
        found = agent.read_frame(io.BytesIO(data))
    except ValueError:
        return
    assert found is None or isinstance(found[0], dict)


def test_deep_header_is_no_frame() -> None:
    text = b"[" * 500_000
    with pytest.raises(ValueError, match="nested"):
        agent.read_frame(io.BytesIO(agent.LENGTHS.pack(len(text), 0) + text))


def test_agent_is_one_file_for_python_3_8() -> None:
    source = Path(agent.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    found = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    found |= {n.module or "." for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names) == {"numpy", "onnxruntime"}
    assert not found & {"pickle", "marshal", "shelve", "dill"}
    ast.parse(BOOTSTRAP, feature_version=(3, 5))
    assert "'" not in BOOTSTRAP
    assert "\n" not in BOOTSTRAP


@pytest.mark.parametrize(
    ("number", "version", "flags"),
    [
        ("8502", "8.5.2", [[], ["--fp16"], ["--int8"]]),
        ("100300", "10.3.0", [["--stronglyTyped"]] * 3),
        ("110000", "11.0.0", [[], [], []]),
    ],
)
def test_flags_of_trtexec_follow_its_version(tmp_path: Path, number: str, version: str, flags: list[list[str]]) -> None:
    found = agent.Trtexec(str(board_programs.trtexec(tmp_path, number)), str(tmp_path))
    assert found.version == version
    assert [found.flags(precision) for precision in ("fp32", "fp16", "int8")] == flags
    (tmp_path / "network").write_bytes(b"x" * 4000)
    engine = found.load("name", str(tmp_path / "network"), "fp16")
    assert engine.times(7) == pytest.approx([0.14e-3] * 7, rel=0.03)
    assert len(board_programs.calls(tmp_path / "trtexec")) == 2
    found.load("name", str(tmp_path / "network"), "fp16")
    assert len(board_programs.calls(tmp_path / "trtexec")) == 2, "the engine is stored"


@pytest.mark.parametrize("mode", ["silent", "short", "words"])
def test_wrong_report_of_trtexec_is_refused(tmp_path: Path, mode: str) -> None:
    found = agent.Trtexec(str(board_programs.trtexec(tmp_path, mode=mode)), str(tmp_path))
    (tmp_path / "network").write_bytes(b"x")
    with refused("runtime"):
        found.load("name", str(tmp_path / "network"), "fp32").times(3)


def test_failure_of_trtexec_is_refused_with_its_message(tmp_path: Path) -> None:
    found = agent.Trtexec(str(board_programs.trtexec(tmp_path)), str(tmp_path))
    (tmp_path / "network").write_bytes(b"")
    with pytest.raises(agent.RefusalError, match=r"status 1: .*Failed to parse onnx file"):
        found.load("name", str(tmp_path / "network"), "fp32")
    with refused("runtime"):
        agent.Trtexec("/bin/true", str(tmp_path))


def test_program_ends_with_the_agent(tmp_path: Path) -> None:
    """An alarm or a signal ends the agent without cleaning up."""
    program = board_programs.trtexec(tmp_path, mode="hang")
    folder = tmp_path / "board"
    channel = Channel(LOCAL, 60)
    hello = {"op": "hello", "session": "ours", "idle": 60, "folder": str(folder), "room": 10**6}
    channel.exchange({**hello, "runtime": "tensorrt", "binary": str(program)})
    name = hashlib.sha256(b"network").hexdigest()
    channel.exchange({"op": "announce", "artefacts": {name: 7}})
    channel.exchange({"op": "put", "artefact": name, "offset": 0}, b"network")
    pid = agent_pid(folder)
    request = {"op": "load", "handle": 1, "network": name, "threads": 1, "device": "cuda", "precision": "fp32"}
    with pytest.raises(LostError):
        channel.exchange(request, limit=1)
    channel.close()
    assert eventually(lambda: gone(pid) and not children(pid))
    assert board_programs.calls(program), "it had been started"
    running = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(program).encode() in _read(p)]
    assert eventually(lambda: not [p for p in running if str(program).encode() in _read(p)])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
