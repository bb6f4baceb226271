"""A device with an agent, which is a process of this computer."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dsa_hw.errors import MeasurementError
from profilers.networks.chains import Layer, artefact_of, input_of
from profilers.remote import device as board
from profilers.remote.channel import Channel, LostError, RefusedError
from profilers.remote.device import AgentDevice
from profilers.remote.failures import Failure, of_lost
from tests.fakes.processes import LOCAL, agent_pid, eventually, gone


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Callable[..., AgentDevice]]:
    made: list[AgentDevice] = []

    def explain(lost: LostError) -> Failure:
        return of_lost(lost, "a board", "login", "host", "python3")

    def make(**options: Any) -> AgentDevice:
        folder = str(tmp_path / "board")
        made.append(AgentDevice("a board", LOCAL, explain, login="login", python="python3", folder=folder, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def loaded_on(found: AgentDevice, width: int) -> Any:
    chain, onnx = (Layer(width, width),), SimpleNamespace(artefact="onnx", precision="fp32", int8=None)
    return found.load(artefact_of(chain, onnx), [input_of(chain).numpy()], 1, "cpu")  # type: ignore[arg-type]


def test_upload_continues_after_a_lost_connection(
    local: Callable[..., AgentDevice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets: list[int] = []
    exchange = Channel.exchange

    def spying(self: Channel, header: Any, payload: bytes = b"", limit: float = 60.0, most: int = 0) -> Any:
        found = exchange(self, header, payload, limit, most)
        if header["op"] == "put" and len(payload) == 2**18:
            offsets.append(header["offset"])
            if len(offsets) == 3:
                os.kill(agent_pid(tmp_path / "board"), signal.SIGKILL)
        return found

    monkeypatch.setattr(Channel, "exchange", spying)
    found = local()
    loaded = loaded_on(found, 600)  # 1.4 MB
    assert offsets == [i * 2**18 for i in range(5)]
    assert found.reconnections == 1
    assert loaded.run(4).shape == (4,)
    # A file that was damaged on the board's disk is noticed, deleted and sent again.
    largest = max((tmp_path / "board").iterdir(), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1] + b"\0")
    found.close()
    assert loaded.run(1).shape == (1,)
    assert hashlib.sha256(largest.read_bytes()).hexdigest() == largest.name


def test_idle_or_hanging_agent_ends(
    local: Callable[..., AgentDevice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "_IDLE", 1)
    found = local()
    loaded = loaded_on(found, 4)
    assert eventually(lambda: gone(agent_pid(tmp_path / "board"))), "an agent that nobody asks ends"
    assert loaded.run(1) > 0, "and is started again"
    header = {"op": "sequence", "steps": [[found._networks[loaded].handle, 100_000]] * 100}
    begin = time.monotonic()
    assert found._channel is not None
    with pytest.raises(LostError):
        found._channel.exchange(header, limit=1)
    assert time.monotonic() - begin < 10, "a request that takes too long ends the agent"
    assert gone(agent_pid(tmp_path / "board"))


def test_board_that_changed_is_an_error(local: Callable[..., AgentDevice], tmp_path: Path) -> None:
    found = local()
    loaded = loaded_on(found, 4)
    assert found._about is not None
    found._about[0]["cpu"] = "another"
    os.kill(agent_pid(tmp_path / "board"), signal.SIGKILL)
    with pytest.raises(MeasurementError, match=r"changed while the connection was lost \(cpu\)"):
        loaded.run(1)


def test_request_that_kills_the_agent_is_given_up(
    local: Callable[..., AgentDevice], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    exchange = Channel.exchange

    def fatal(self: Channel, header: Any, payload: bytes = b"", limit: float = 60.0, most: int = 0) -> Any:
        if header["op"] == "outputs":
            os.kill(agent_pid(tmp_path / "board"), signal.SIGKILL)
        return exchange(self, header, payload, limit, most)

    monkeypatch.setattr(Channel, "exchange", fatal)
    loaded = loaded_on(local(), 4)
    with pytest.raises(MeasurementError, match="broke 3 times"):
        loaded.outputs()


def test_unloaded_networks_are_loaded_again(
    local: Callable[..., AgentDevice], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[str] = []
    exchange = Channel.exchange

    def forgetful(self: Channel, header: Any, payload: bytes = b"", limit: float = 60.0, most: int = 0) -> Any:
        if header["op"] == "sequence" and not answers:
            answers.append("not loaded")
            exchange(self, {"op": "state", "release": [h for h, _ in header["steps"]]})
        return exchange(self, header, payload, limit, most)

    monkeypatch.setattr(Channel, "exchange", forgetful)
    found = local()
    one, two = loaded_on(found, 4), loaded_on(found, 8)
    seconds = found.sequence([(one, 2), (two, 3)])
    assert [len(s) for s in seconds] == [2, 3]
    assert answers
    # What nobody holds any more is let go of, with the next request.
    handle = found._networks[two].handle
    del two, seconds
    one.run(1)
    assert found._channel is not None
    with pytest.raises(RefusedError) as error:
        found._channel.exchange({"op": "sequence", "steps": [[handle, 1]]})
    assert error.value.kind == "not loaded"


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Any], float]]:
    """The steps of every sequence that is sent, and its time limit; all runs of a network take its number in s."""
    seen: list[tuple[list[Any], float]] = []
    exchange = Channel.exchange

    def spying(self: Channel, header: Any, payload: bytes = b"", limit: float = 60.0, most: int = 0) -> Any:
        reply, data = exchange(self, header, payload, limit, most)
        if header["op"] == "sequence":
            seen.append((header["steps"], limit))
            data = np.concatenate([np.full(runs, float(handle)) for handle, runs in header["steps"]]).tobytes()
        return reply, data

    monkeypatch.setattr(Channel, "exchange", spying)
    return seen


def test_round_is_sent_in_short_requests_and_its_order_is_kept(
    local: Callable[..., AgentDevice], requests: list[tuple[list[Any], float]]
) -> None:
    found = local()
    small, large = loaded_on(found, 4), loaded_on(found, 8)
    one, two = (found._networks[loaded].handle for loaded in (small, large))
    steps = [(small, 1), (large, 2)] * 17
    assert [s.tolist() for s in found.sequence(steps)] == [[one], [two, two]] * 17
    sent = [request for request, _ in requests]
    assert sent[0] == [[one, 1], [two, 2]] * 8
    assert sent[1] == [[two, 1], *[[one, 1], [two, 2]] * 8], "the last network is run again before the others"
    assert sent[2] == [[two, 1], [one, 1], [two, 2]]
    assert all(limit / len(request) > 30 for request, limit in requests), "seconds for each step"
    found.sequence([(small, 1)])
    assert requests[-1][0] == [[two, 1], [one, 1]], "also before the next round"
    del small, steps
    found.sequence([(large, 1)])
    assert requests[-1][0] == [[two, 1]], "unless it is no longer loaded"


def test_board_with_little_memory_runs_fewer_networks_at_once(
    local: Callable[..., AgentDevice],
    requests: list[tuple[list[Any], float]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    room = SimpleNamespace(networks=3)
    exchange = Channel.exchange
    there: list[int] = []

    def small(self: Channel, header: Any, payload: bytes = b"", limit: float = 60.0, most: int = 0) -> Any:
        """Pass requests on, and unload networks as an agent with memory for three would."""
        for handle in header.get("keep", ()):
            if handle in there:
                there.append(there.pop(there.index(handle)))
        evicted = []
        while header["op"] == "load" and len(there) >= room.networks:
            evicted.append(there.pop(0))
        reply, data = exchange(
            self, {**header, "release": [*header.get("release", ()), *evicted]}, payload, limit, most
        )
        if header["op"] == "load":
            there.append(header["handle"])
            reply["evicted"] = evicted
        return reply, data

    monkeypatch.setattr(Channel, "exchange", small)
    found = local()
    networks = [loaded_on(found, width) for width in (4, 8, 12, 16, 20)]
    steps = [(network, i + 1) for i, network in enumerate(networks)]
    assert [len(s) for s in found.sequence(steps)] == [1, 2, 3, 4, 5]
    assert "lacks memory for all networks at once" in caplog.text
    assert [len(request) for request, _ in requests] == [2, 3, 2], "at most three networks in a request"
    room.networks, requests[:] = 1, []
    assert [len(s) for s in found.sequence(steps)] == [1, 2, 3, 4, 5]
    assert [len(request) for request, _ in requests] == [1] * 5


class Liar:
    """A channel whose answers are scripted: by operation, what replaces fields of a correct answer."""

    def __init__(self, lies: dict[str, Any], data: bytes | None = None) -> None:
        self.lies, self.data, self.opened = lies, data, 0

    def __call__(self, command: Any, limit: float) -> Liar:
        self.opened += 1
        return self

    def exchange(self, header: Any, payload: bytes = b"", limit: float = 60.0, most: int = 0) -> Any:
        operation, data = header["op"], b""
        honest: dict[str, Any] = {
            "hello": {"environment": {"cpu": "A72"}, "providers": ["CPUExecutionProvider"]},
            "state": {"state": {"time": 1.0, "load1": 0.5}, "busiest": "top"},
            "announce": {"have": dict.fromkeys(header.get("artefacts", ()), 0)},
            "put": {"have": header.get("offset", 0) + len(payload)},
            "load": {"evicted": []},
            "sequence": {},
            "outputs": {"specs": [["float32", [1, 2]]]},
        }[operation]
        if operation == "sequence":
            data = np.full(sum(runs for _, runs in header["steps"]), 1e-3).tobytes()
        if operation == "outputs":
            data = np.ones((1, 2), np.float32).tobytes()
        if operation in self.lies and self.data is not None:
            data = self.data
        if isinstance(lie := self.lies.get(operation, {}), Exception):
            raise lie
        return {**honest, **lie}, data

    def close(self) -> None:
        pass


def use_all(found: AgentDevice) -> None:
    """Make every kind of request."""
    assert found.environment["cpu"] == "A72"
    assert found.providers == ("CPUExecutionProvider",)
    assert found.state() == {"time": 1.0, "load1": 0.5}
    assert found.busiest_process() == "top"
    loaded = found.load(b"network", [np.ones((1, 2), np.float32)], 1, "cpu")
    assert loaded.run(3).tolist() == [1e-3] * 3
    assert loaded.outputs is not None
    assert loaded.outputs()[0].tolist() == [[1.0, 1.0]]


def lied_to(monkeypatch: pytest.MonkeyPatch, local: Callable[..., AgentDevice], liar: Liar) -> AgentDevice:
    monkeypatch.setattr(board, "Channel", liar)
    return local()


def test_honest_answers_are_accepted(local: Callable[..., AgentDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    use_all(lied_to(monkeypatch, local, Liar({})))


WRONG: list[tuple[str, str, Any]] = [
    ("hello", "environment", [None, [], "x", {"cpu": 1}, {"cpu": ["x"]}]),
    ("hello", "providers", [None, {}, "CPU", [1], ["x"] * 100]),
    ("state", "state", [None, [], 1, {"load1": "x"}, {"time": True}, {"celsius": [1]}]),
    ("state", "busiest", [None, 1, ["x"]]),
    ("announce", "have", [None, 1, [], {}]),
    ("put", "have", [None, "7", 0, 10**9, True]),
    ("load", "evicted", [None, 1, "x", ["x"], [[1]], [True]]),
    (
        "outputs",
        "specs",
        [None, {}, [1], [[]], [["float32"]], [["float32", 2]], [["object", [1]]], [[["float32"], [2]]],
         [["float32", [-1]]], [["float32", [1.0, 2]]], [["float32", [3]]], [["float32", [1]]], [["float32", [1] * 99]],
         [["float32", [0, 10**18]]], [["float32", [2**62, 4]]], []],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "field", "value"), [(o, f, v) for o, f, values in WRONG for v in values])
def test_answers_of_wrong_types_are_errors(
    operation: str, field: str, value: Any, local: Callable[..., AgentDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MeasurementError, match="sent an invalid answer"):
        use_all(lied_to(monkeypatch, local, Liar({operation: {field: value}})))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0, 0.0, 1e-300, 1e9])
def test_absurd_times_are_errors(
    bad: float, local: Callable[..., AgentDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MeasurementError, match=r"a board sent an invalid answer: a run must take from 1e-09 s"):
        use_all(lied_to(monkeypatch, local, Liar({"sequence": {}}, np.asarray([1e-3, bad, 1e-3]).tobytes())))
    with pytest.raises(MeasurementError, match="8 bytes for 3 runs"):
        use_all(lied_to(monkeypatch, local, Liar({"sequence": {}}, np.ones(1).tobytes())))


@pytest.mark.parametrize(
    "lost", [LostError(None, "no answer for 9 s", late=True), LostError(None, "invalid answer: x")]
)
@pytest.mark.parametrize("operation", ["state", "announce", "put", "load", "sequence", "outputs"])
def test_board_that_hangs_or_lies_is_not_asked_again(
    operation: str, lost: LostError, local: Callable[..., AgentDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    liar = Liar({operation: lost})
    with pytest.raises(MeasurementError, match=r"a board did not answer a request properly \((no|invalid) answer"):
        use_all(lied_to(monkeypatch, local, liar))
    assert liar.opened == 1


def test_text_from_the_board_has_no_control_characters() -> None:
    old = of_lost(LostError(1, "dsa-hw-agent: python 3.6\x1b[2J\u202e is too old"), "b", "l", "h", "p")
    assert "python 3.6?[2J? is too old" in str(old.error)
    assert "Python 3.8 or later" in str(old.error)
    assert not old.passing
    assert of_lost(LostError(255, "ssh: connect to host b port 22: Connection timed out"), "b", "l", "h", "p").passing
