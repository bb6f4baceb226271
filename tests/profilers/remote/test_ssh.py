"""A board over ssh: this computer, through a real sshd on loopback. Skipped only where no sshd is installed."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import profilers
from dsa_hw.errors import DsaError, MeasurementError, MissingDependencyError, ProfileError
from profilers import latency
from profilers.measuring.rules import MeasuringRules
from profilers.networks.chains import Layer, artefact_of, input_of
from profilers.remote import agent
from profilers.remote import device as board
from profilers.remote.channel import BOOTSTRAP, Channel, LostError, RefusedError
from profilers.remote.device import AgentDevice
from profilers.remote.failures import Failure, of_lost
from profilers.targets import resolve, ssh
from profilers.targets.ssh import Address, Ssh

Network = tuple[nn.Module, tuple[torch.Tensor, ...]]
SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
needs_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None, reason="no sshd installed: apt-get install openssh-server"
)
LOCAL = [sys.executable, "-c", BOOTSTRAP]


def eventually(what: Callable[[], bool], seconds: float = 15.0) -> bool:
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.05)
    return what()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# The board ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """An sshd of our own on a free port, with keys of its own; nobody's configuration is read or changed."""
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("host", "other_host", "user", "other_user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        "PidFile none\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nStrictModes no\n"
    )
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # sshd insists, when it is root
    log = (folder / "log").open("w")
    process = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log)

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    assert eventually(listens), (folder / "log").read_text()
    yield SimpleNamespace(folder=folder, port=port, pid=process.pid)
    process.terminate()
    process.wait(10)
    log.close()


@pytest.fixture
def place(server: SimpleNamespace, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """Addresses on the board, each with an ssh configuration of its own; afterwards nothing may be left running."""
    cache = tmp_path / "board"

    def address(python: str = sys.executable, **changes: str) -> str:
        known = f"[127.0.0.1]:{server.port} {(server.folder / changes.pop('known', 'host.pub')).read_text()}"
        (tmp_path / "known").write_text(known if changes.pop("known_at_all", "yes") == "yes" else "")
        options = {
            "Port": str(server.port),
            "IdentityFile": str(server.folder / changes.pop("key", "user")),
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "UserKnownHostsFile": str(tmp_path / "known"),
            "GlobalKnownHostsFile": "none",
            **{k: changes.pop(k) for k in list(changes) if k[0].isupper()},
        }
        config = tmp_path / "config"
        config.write_text("Host *\n" + "".join(f"  {k} {v}\n" for k, v in options.items()))
        more = "".join(f"&{k}={v}" for k, v in changes.items())
        return f"ssh://127.0.0.1?runtime=onnxruntime&config={config}&cache={cache}&python={python}{more}"

    yield SimpleNamespace(address=address, cache=cache, config=tmp_path / "config", server=server)
    ssh._close()
    ssh._BOARDS.clear()
    if (cache / "lock").exists():
        assert eventually(lambda: gone(agent_pid(cache))), "the agent is still running"
    assert eventually(lambda: not children(server.pid)), "a connection is still open"


def agent_pid(cache: Path) -> int:
    return int((cache / "lock").read_text().split()[0])


def children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            rest = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(rest[1]) == pid and rest[0] != "Z":
            found.append(int(folder.name))
    return found


def wrapper(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@needs_sshd
def test_profile_survives_a_killed_connection_and_a_killed_agent(
    place: SimpleNamespace,
    tiny: Network,
    lenient: MeasuringRules,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    visits: list[int] = []
    puts: list[tuple[str, int]] = []
    killed: list[str] = []
    sequence, exchange = AgentDevice.sequence, Channel.exchange

    def counting(self: AgentDevice, steps: Any) -> Any:
        found = sequence(self, steps)
        visits.append(len(found[2][0]))
        return found

    def spying(self: Channel, header: Any, payload: bytes = b"", limit: float = 60.0) -> Any:
        if header["op"] == "put":
            puts.append((header["artefact"], header["offset"]))
        # In the middle of a request, so that an answer is lost.
        if header["op"] == "sequence" and len(visits) in (1, 3) and len(killed) == len(visits) // 2:
            victim = children(place.server.pid)[0] if not killed else agent_pid(place.cache)
            killed.append("connection" if not killed else "agent")
            os.kill(victim, signal.SIGKILL)
        return exchange(self, header, payload, limit)

    monkeypatch.setattr(AgentDevice, "sequence", counting)
    monkeypatch.setattr(Channel, "exchange", spying)
    out = tmp_path / "p.sqlite"
    url = place.address()
    with caplog.at_level(logging.WARNING):
        table = profilers.profile(
            *tiny, target=url, samples=4, holdout=1, grid=8, out=out, rules=lenient, time_limit=120
        )
    assert killed == ["connection", "agent"]
    target = resolve(url)
    assert isinstance(target, Ssh)
    assert target.board.reconnections == 2
    assert caplog.text.count("connecting again") == 2
    assert len(table) == 5
    assert table.attrs["untrusted"] == 0
    assert table.attrs["agreement"] < 1e-4, "the outputs on the board are those of the shrunk network"
    assert len(profilers.load_tables(out, rules=lenient).samples) == sum(visits), "every visit is in the store, once"
    assert len(set(puts)) == len(puts), "what was on the board was not sent again"
    assert {p.name for p in place.cache.iterdir()} == {name for name, _ in puts} | {"lock"}
    about = table.attrs["environment"]
    assert about["target"] == "onnxruntime/ssh://127.0.0.1 fp32 x1"
    assert about["control"] == "2", "the control of ONNX Runtime on a CPU"
    assert about["onnxruntime"]
    assert about["agent"] == str(agent.VERSION)
    # The process that was asked for is alive while it is needed, and gone afterwards (see `place`).
    assert not gone(agent_pid(place.cache))
    assert resolve(target.name).name == target.name
    assert set(target.board.state()) >= {"time", "load1"}


@needs_sshd
def test_a_full_disk_there(place: SimpleNamespace, tmp_path: Path) -> None:
    python = wrapper(tmp_path / "python", f'ulimit -f 16; exec {sys.executable} "$@"')  # files of a few kilobytes
    target = resolve(place.address(python))
    chain = (Layer(200, 200),)
    with pytest.raises(MeasurementError, match=r"refused the request \(disk\).*Free space there") as error:
        target.load(artefact_of(chain, target), (input_of(chain),))
    assert "File too large" in str(error.value)
    assert [p.name for p in place.cache.iterdir()] == ["lock"], "nothing is left behind"
    small = (Layer(4, 4),)
    assert target.load(artefact_of(small, target), (input_of(small),)).run(3).shape == (3,), "the board still works"


@needs_sshd
def test_a_missing_runtime_and_a_missing_python(place: SimpleNamespace, tmp_path: Path) -> None:
    bare = wrapper(tmp_path / "bare", f'exec {sys.executable} -S "$@"')  # without site-packages
    with pytest.raises(MissingDependencyError, match=r"cannot import onnxruntime.*pip install onnxruntime numpy"):
        resolve(place.address(bare))
    with pytest.raises(MissingDependencyError, match=r"cannot run /nowhere/python.*python=PATH"):
        resolve(place.address("/nowhere/python"))
    if "CUDAExecutionProvider" not in resolve(place.address()).board.providers:  # type: ignore[attr-defined]
        with pytest.raises(MissingDependencyError, match=r"only .*CPUExecutionProvider"):
            resolve(place.address(device="cuda"))


@needs_sshd
def test_keys_are_checked_on_both_sides(place: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MissingDependencyError, match=r"does not accept the keys.*ssh-copy-id"):
        resolve(place.address(key="other_user"))
    with pytest.raises(MissingDependencyError, match=r"differs from the known one.*ssh-keygen -R"):
        resolve(place.address(known="other_host.pub", StrictHostKeyChecking="no"))
    # Whatever the user's configuration says, an unknown host is refused.
    unknown = place.address(known_at_all="no", StrictHostKeyChecking="no")
    assert latency.main(["--device", unknown, "--json"]) == 2
    printed = json.loads(capsys.readouterr().out)
    assert "host key of ssh://127.0.0.1 is unknown" in printed["error"]
    assert not place.cache.exists(), "nobody got in"


@needs_sshd
def test_a_board_that_does_not_come_back(place: SimpleNamespace) -> None:
    target = resolve(place.address(patience="0.5"))
    chain = (Layer(4, 4),)
    loaded = target.load(artefact_of(chain, target), (input_of(chain),))
    place.config.write_text(place.config.read_text().replace(f"Port {place.server.port}", "Port 1"))
    os.kill(agent_pid(place.cache), signal.SIGKILL)
    with pytest.raises(MeasurementError, match=r"could not be restored within 0 s\. .*cannot be reached"):
        loaded.run(1)
    place.config.write_text(place.config.read_text().replace("Port 1\n", f"Port {place.server.port}\n"))
    assert loaded.run(2).shape == (2,), "and when it is back, all goes on"


@needs_sshd
def test_a_killed_host_leaves_nothing_running(place: SimpleNamespace) -> None:
    script = (
        "import sys, time; from profilers.targets.ssh import Ssh; t = Ssh(sys.argv[1]); t.check(); "
        "print('ready', flush=True); time.sleep(60)"
    )
    host = subprocess.Popen([sys.executable, "-c", script, place.address()], stdout=subprocess.PIPE)
    try:
        assert host.stdout is not None
        assert host.stdout.readline() == b"ready\n"
        pid = agent_pid(place.cache)
        assert not gone(pid)
    finally:
        host.kill()
        host.wait()
        assert host.stdout is not None
        host.stdout.close()
    assert eventually(lambda: gone(pid))


# The same without ssh: the agent as a process of this computer --------------------------------------------------------


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
    chain, onnx = (Layer(width, width),), SimpleNamespace(artefact="onnx", precision="fp32")
    return found.load(artefact_of(chain, onnx), [input_of(chain).numpy()], 1, "cpu")  # type: ignore[arg-type]


def test_an_upload_goes_on_where_it_was_cut_off(
    local: Callable[..., AgentDevice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets: list[int] = []
    exchange = Channel.exchange

    def spying(self: Channel, header: Any, payload: bytes = b"", limit: float = 60.0) -> Any:
        found = exchange(self, header, payload, limit)
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


def test_the_watchdogs(local: Callable[..., AgentDevice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "_IDLE", 1)
    found = local()
    loaded = loaded_on(found, 4)
    assert eventually(lambda: gone(agent_pid(tmp_path / "board"))), "an agent that nobody asks ends"
    assert loaded.run(1) > 0, "and is started again"
    header = {"op": "scan", "network": found._networks[loaded].handle, "seconds": 60.0, "least": 1}
    begin = time.monotonic()
    assert found._channel is not None
    with pytest.raises(LostError):
        found._channel.exchange(header, limit=1)
    assert time.monotonic() - begin < 10, "a request that takes too long ends the agent"
    assert gone(agent_pid(tmp_path / "board"))


def test_one_session_at_a_time_and_ours_is_taken_over(tmp_path: Path) -> None:
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


def test_another_board_behind_the_same_name_is_not_mixed_in(local: Callable[..., AgentDevice], tmp_path: Path) -> None:
    found = local()
    loaded = loaded_on(found, 4)
    assert found._about is not None
    found._about[0]["cpu"] = "another"
    os.kill(agent_pid(tmp_path / "board"), signal.SIGKILL)
    with pytest.raises(MeasurementError, match=r"changed while the connection was lost \(cpu\)"):
        loaded.run(1)


def test_a_request_that_kills_the_agent_is_not_repeated_for_ever(
    local: Callable[..., AgentDevice], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    exchange = Channel.exchange

    def fatal(self: Channel, header: Any, payload: bytes = b"", limit: float = 60.0) -> Any:
        if header["op"] == "outputs":
            os.kill(agent_pid(tmp_path / "board"), signal.SIGKILL)
        return exchange(self, header, payload, limit)

    monkeypatch.setattr(Channel, "exchange", fatal)
    loaded = loaded_on(local(), 4)
    with pytest.raises(MeasurementError, match="broke 3 times"):
        loaded.outputs()


def test_networks_that_do_not_fit_are_loaded_again(
    local: Callable[..., AgentDevice], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[str] = []
    exchange = Channel.exchange

    def forgetful(self: Channel, header: Any, payload: bytes = b"", limit: float = 60.0) -> Any:
        if header["op"] == "sequence" and not answers:
            answers.append("not loaded")
            exchange(self, {"op": "state", "release": [h for h, _ in header["steps"]]})
        return exchange(self, header, payload, limit)

    monkeypatch.setattr(Channel, "exchange", forgetful)
    found = local()
    one, two = loaded_on(found, 4), loaded_on(found, 8)
    seconds = found.sequence([(one, 2), (two, 3)])
    assert [len(s) for s, _ in seconds] == [2, 3]
    assert answers
    # What nobody holds any more is let go of, with the next request.
    handle = found._networks[two].handle
    del two, seconds
    one.run(1)
    assert found._channel is not None
    with pytest.raises(RefusedError) as error:
        found._channel.exchange({"op": "sequence", "steps": [[handle, 1]]})
    assert error.value.kind == "not loaded"


# The agent by itself --------------------------------------------------------------------------------------------------


def artefacts(tmp_path: Path, room: int = 10**6) -> agent.Artefacts:
    return agent.Artefacts(str(tmp_path / "artefacts"), room)


@contextlib.contextmanager
def refused(kind: str) -> Iterator[None]:
    with pytest.raises(agent.RefusalError) as error:
        yield
    assert error.value.kind == kind


def test_only_announced_artefacts_with_the_right_hash_are_taken(tmp_path: Path) -> None:
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


def test_links_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    kept = artefacts(tmp_path)
    name = hashlib.sha256(b"network").hexdigest()
    kept.announce({name: 7})
    victim = tmp_path / "victim"
    victim.write_text("")
    (tmp_path / "artefacts" / f"{name}.part").symlink_to(victim)
    with refused("folder"):
        kept.put(name, 0, b"network")
    assert victim.read_text() == ""
    os.chmod(kept.folder, 0o777)
    with refused("folder"):
        artefacts(tmp_path)


def test_room_is_made_by_age_and_a_full_disk_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_agent_answers_nonsense_with_a_refusal() -> None:
    source = io.BytesIO()
    requests: list[dict[str, Any]] = [{"op": "announce", "artefacts": {}}, {"op": "fly"}, {"op": "hello"}, {}]
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
    assert agent.read_frame(sink) is None


@settings(max_examples=30)
@given(st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.integers())), st.binary(max_size=200))
def test_frames_come_back_as_they_were(header: dict[str, Any], payload: bytes) -> None:
    stream = io.BytesIO()
    agent.write_frame(stream, header, payload)
    data = stream.getvalue()
    assert agent.read_frame(io.BytesIO(data)) == (header, payload)
    assert agent.read_frame(io.BytesIO(data[:-1])) is None, "cut off is the end, not half a frame"


@settings(max_examples=50)
@given(st.binary(max_size=64))
def test_bytes_that_are_no_frame(data: bytes) -> None:
    try:
        found = agent.read_frame(io.BytesIO(data))
    except ValueError:
        return
    assert found is None or isinstance(found[0], dict)


def test_the_agent_is_one_file_for_old_pythons() -> None:
    source = Path(agent.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    found = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    found |= {n.module or "." for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names) == {"numpy", "onnxruntime"}
    assert not found & {"pickle", "marshal", "shelve", "dill"}
    ast.parse(BOOTSTRAP, feature_version=(3, 5))
    assert "'" not in BOOTSTRAP
    assert "\n" not in BOOTSTRAP


# Addresses and messages -----------------------------------------------------------------------------------------------


def test_addresses() -> None:
    found = Address.parse("ssh://pi@raspberrypi:2222?runtime=onnxruntime&python=~/venv/bin/python")
    assert (found.user, found.host, found.port) == ("pi", "raspberrypi", 2222)
    assert found.command[-2] == "raspberrypi"
    assert found.command[-1].startswith('exec "$HOME"/venv/bin/python -c ')
    assert Address.parse(found.url) == found
    assert Address.parse("ssh://pi@[fe80::1]:22").title == "ssh://pi@[fe80::1]:22"
    options = [found.command[i + 1] for i, word in enumerate(found.command) if word == "-o"]
    assert {"StrictHostKeyChecking=yes", "BatchMode=yes", "ForwardAgent=no"} <= set(options)
    quoted = Address.parse("ssh://host?python=a%20b;reboot").command[-1]
    assert quoted.startswith("exec 'a b;reboot' -c ")


@pytest.mark.parametrize(
    "address",
    [
        "ssh://",
        "ssh://-oProxyCommand=reboot",
        "ssh://-l@host",
        "ssh://host;reboot",
        "ssh://user:password@host",
        "ssh://host/path",
        "ssh://host:port",
        "ssh://host?runtime=torch",
        "ssh://host?device=tpu",
        "ssh://host?StrictHostKeyChecking=no",
        "ssh://host?config=/nowhere/at/all",
        "ssh://host?patience=long",
        "ssh://host?room=0",
        "ssh:host",
    ],
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ProfileError):
        Address.parse(address)
    with pytest.raises(DsaError):
        resolve(f"auto/{address}")


def test_text_from_the_board_cannot_steer_a_terminal() -> None:
    old = of_lost(LostError(1, "dsa-hw-agent: python 3.6\x1b[2J\u202e is too old"), "b", "l", "h", "p")
    assert "python 3.6?[2J? is too old" in str(old.error)
    assert "Python 3.8 or later" in str(old.error)
    assert not old.passing
    assert of_lost(LostError(255, "ssh: connect to host b port 22: Connection timed out"), "b", "l", "h", "p").passing
