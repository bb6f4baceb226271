"""A board over ssh: this computer through a real sshd on loopback; skipped where no sshd is installed."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
import torch
from torch import nn

import profilers
from dsa_hw.errors import DsaError, MeasurementError, MissingDependencyError, ProfileError
from profilers import latency
from profilers.measuring.rules import MeasuringRules
from profilers.networks.chains import Layer, artefact_of, input_of
from profilers.remote import agent
from profilers.remote.channel import Channel
from profilers.remote.device import AgentDevice
from profilers.targets import resolve, ssh
from profilers.targets.ssh import Address, Ssh
from tests.fakes import board_programs
from tests.fakes.outputs import printed_json
from tests.fakes.processes import agent_pid, children, eventually, gone

Network = tuple[nn.Module, tuple[torch.Tensor, ...]]


SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


needs_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None, reason="no sshd installed: apt-get install openssh-server"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """An sshd of our own on a free port, with keys of its own; nobody's configuration is read or changed."""
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("host", "other_host", "user", "other_user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        with socket.socket(socket.AF_INET6) as free:
            free.bind(("::1", port))
        ipv6 = True
    except OSError:
        ipv6 = False
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    (folder / "sshd_config").write_text(
        ("ListenAddress ::1\n" if ipv6 else "")
        + f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
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
    yield SimpleNamespace(folder=folder, port=port, pid=process.pid, ipv6=ipv6)
    process.terminate()
    process.wait(10)
    log.close()


@pytest.fixture
def place(server: SimpleNamespace, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """Addresses on the board, each with an ssh configuration of its own; afterwards nothing may be left running."""
    cache = tmp_path / "board"

    def address(python: str = sys.executable, **changes: str) -> str:
        host = changes.pop("host", "127.0.0.1")
        key = (server.folder / changes.pop("known", "host.pub")).read_text()
        known = f"[{host.strip('[]')}]:{server.port} {key}"
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
        runtime = changes.pop("runtime", "onnxruntime")
        more = "".join(f"&{k}={v}" for k, v in changes.items())
        return f"ssh://{host}?runtime={runtime}&config={config}&cache={cache}&python={python}{more}"

    yield SimpleNamespace(address=address, cache=cache, config=tmp_path / "config", server=server)
    ssh._close()
    ssh._BOARDS.clear()
    if (cache / "lock").exists():
        assert eventually(lambda: gone(agent_pid(cache))), "the agent is still running"
    assert eventually(lambda: not children(server.pid)), "a connection is still open"


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
    rounds: list[int] = []
    puts: list[tuple[str, int]] = []
    killed: list[str] = []
    sequence, exchange = AgentDevice.sequence, Channel.exchange

    def counting(self: AgentDevice, steps: Any) -> Any:
        found = sequence(self, steps)
        rounds.append(sum(len(seconds) for seconds in found))
        return found

    def spying(self: Channel, header: Any, payload: bytes = b"", limit: float = 60.0, most: int = 0) -> Any:
        if header["op"] == "put":
            puts.append((header["artefact"], header["offset"]))
        # In the middle of a request, so that an answer is lost.
        if header["op"] == "sequence" and len(rounds) in (1, 3) and len(killed) == len(rounds) // 2:
            victim = children(place.server.pid)[0] if not killed else agent_pid(place.cache)
            killed.append("connection" if not killed else "agent")
            os.kill(victim, signal.SIGKILL)
        return exchange(self, header, payload, limit, most)

    monkeypatch.setattr(AgentDevice, "sequence", counting)
    monkeypatch.setattr(Channel, "exchange", spying)
    out = tmp_path / "p.sqlite"
    url = place.address()
    with caplog.at_level(logging.WARNING):
        found = profilers.profile(
            *tiny, target=url, samples=4, holdout=1, grid=8, out=out, rules=lenient, time_limit=120
        )
    assert killed == ["connection", "agent"]
    target = resolve(url)
    assert isinstance(target, Ssh)
    assert target.board.reconnections == 2
    assert caplog.text.count("connecting again") == 2
    assert len(found) == 5
    assert found.agreement is not None
    assert found.agreement < 1e-4, "the outputs on the board are those of the shrunk network"
    assert len(profilers.load_tables(out, rules=lenient).samples) == sum(rounds), "every run is in the store, once"
    assert len(set(puts)) == len(puts), "what was on the board was not sent again"
    assert {p.name for p in place.cache.iterdir()} == {name for name, _ in puts} | {"lock"}
    about = found.environment
    assert about["target"] == "onnxruntime/ssh://127.0.0.1 fp32 x1"
    assert about["onnxruntime"]
    assert about["agent"] == str(agent.VERSION)
    # The process that was asked for is alive while it is needed, and gone afterwards (see `place`).
    assert not gone(agent_pid(place.cache))
    assert resolve(target.name).name == target.name
    assert set(target.board.state()) >= {"time", "load1"}


@needs_sshd
def test_full_disk_of_the_board_is_an_error_and_leaves_no_file(place: SimpleNamespace, tmp_path: Path) -> None:
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
def test_missing_runtime_or_python_names_the_remedy(place: SimpleNamespace, tmp_path: Path) -> None:
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
    printed = printed_json(capsys, "error")
    assert "host key of ssh://127.0.0.1 is unknown" in printed["error"]
    assert not place.cache.exists(), "nobody got in"


@needs_sshd
def test_shared_connection_of_the_user_is_not_used(place: SimpleNamespace, tmp_path: Path) -> None:
    """It could have been made with other options, for example without a check of the host key."""
    control = tmp_path / "control"
    target = resolve(place.address(ControlMaster="auto", ControlPath=str(control), ControlPersist="30"))
    assert isinstance(target, Ssh)
    assert target.board.state()
    assert not control.exists()
    command = ["ssh", "-G", *target.address.command[1:-1]]
    used = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "controlmaster false" in used
    assert not [line for line in used if line.startswith("controlpath") and "none" not in line]


@needs_sshd
def test_address_may_be_ipv6(place: SimpleNamespace) -> None:
    if not place.server.ipv6:
        pytest.skip("this computer has no IPv6 loopback")
    target = resolve(place.address(host="[::1]"))
    assert target.title == "onnxruntime/ssh://[::1] fp32 x1"
    assert resolve(target.name).name == target.name


@needs_sshd
def test_lost_board_is_an_error_after_the_patience(place: SimpleNamespace) -> None:
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
def test_killed_host_leaves_no_agent(place: SimpleNamespace) -> None:
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


@needs_sshd
def test_tensorrt_is_timed_by_trtexec_in_pairs_with_the_dense_network(
    place: SimpleNamespace, tiny: Network, lenient: MeasuringRules, tmp_path: Path
) -> None:
    program = board_programs.trtexec(tmp_path / "a folder;with $(marks)")
    url = place.address(runtime="tensorrt", binary=quote(str(program)))
    target = resolve(url, precision="fp16")
    found = profilers.profile(
        *tiny, target=target, samples=4, holdout=1, grid=8, out=tmp_path / "p.sqlite", rules=lenient, time_limit=120
    )
    calls = board_programs.calls(program)
    built = [call for call in calls if "--onnx" in call]
    assert len(built) == len({call["--onnx"] for call in built}), "every network is built once"
    assert all("--fp16" in call and "--int8" not in call for call in built)
    assert len({call["--timingCacheFile"] for call in built}) == 1
    timed = [call["--loadEngine"] for call in calls if "--loadEngine" in call]
    dense = max(set(timed), key=timed.count)
    others = [i for i, engine in enumerate(timed) if engine != dense]
    assert others
    assert all(timed[i - 1] == dense == timed[i + 1] for i in others), "each beside runs of the dense network"
    assert all(call["--iterations"] == "20" for call in calls if "--loadEngine" in call)
    assert found.environment["target"] == "tensorrt/ssh://127.0.0.1 fp16"
    assert found.environment["tensorrt"] == "8.5.2"
    assert "not on a board" in found.environment["tested"]
    narrow, dense_row = found.table["seconds"].min(), found.table["seconds"].max()
    assert narrow < dense_row, "the times are those that the program reported"
    assert resolve(target.name, precision="fp16").title == target.title


@needs_sshd
def test_litert_is_timed_by_benchmark_model(
    place: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = board_programs.benchmark_model(tmp_path / "bin")
    monkeypatch.setattr(ssh, "versions", lambda: {"litert-torch": "0"})
    monkeypatch.setattr(ssh, "convert", lambda worker, model, inputs: (SimpleNamespace(content=lambda: model), ""))
    target = resolve(place.address(runtime="litert", binary=str(program)), threads=2)
    small, large = (target.load(b"x" * n, ()) for n in (1000, 9000))
    assert small.run(2) == pytest.approx([200e-6] * 2)
    assert target.remote_device is not None
    steps = target.remote_device.sequence([(large, 1), (small, 1), (large, 1)])
    assert [float(s[0]) for s in steps] == pytest.approx([1000e-6, 200e-6, 1000e-6])
    assert target.title == "litert/ssh://127.0.0.1 fp32 x2"
    assert board_programs.calls(program)[-1]["--num_threads"] == "2"
    assert board_programs.calls(program)[-1]["--num_runs"] == "5"


@needs_sshd
def test_missing_program_names_the_remedy(place: SimpleNamespace) -> None:
    with pytest.raises(MissingDependencyError, match=r"/nowhere/trtexec is not there.*binary=PATH"):
        resolve(place.address(runtime="tensorrt", binary="/nowhere/trtexec"))


def test_address_is_parsed_and_written() -> None:
    found = Address.parse("ssh://pi@raspberrypi:2222?runtime=onnxruntime&python=~/venv/bin/python")
    assert (found.user, found.host, found.port) == ("pi", "raspberrypi", 2222)
    assert found.command[-2] == "raspberrypi"
    assert found.command[-1].startswith('exec "$HOME"/venv/bin/python -c ')
    assert Address.parse(found.url) == found
    for literal, host in (("[::1]", "::1"), ("pi@[fe80::1]:22", "fe80::1"), ("[fe80::1%25eth0]", "fe80::1%eth0")):
        board = Address.parse(f"ssh://{literal}")
        assert (board.host, board.command[-2]) == (host, host)
        assert board.title == f"ssh://{literal}".replace("%25", "%")
        assert Address.parse(board.url) == board
    options = [found.command[i + 1] for i, word in enumerate(found.command) if word == "-o"]
    assert {"StrictHostKeyChecking=yes", "BatchMode=yes", "ForwardAgent=no"} <= set(options)
    assert {"ControlPath=none", "ControlMaster=no"} <= set(options)
    quoted = Address.parse("ssh://host?python=a%20b;reboot").command[-1]
    assert quoted.startswith("exec 'a b;reboot' -c ")


@pytest.mark.parametrize(
    "address",
    [
        "ssh://",
        "ssh://-oProxyCommand=reboot",
        "ssh://-l@host",
        "ssh://host;reboot",
        "ssh://::1",
        "ssh://[::1",
        "ssh://[12345::1]",
        "ssh://[fe80::1%25-eth0]",
        "ssh://[fe80::1%25a;reboot]",
        "ssh://[1.2.3.4]",
        "ssh://user:password@host",
        "ssh://host/path",
        "ssh://host:port",
        "ssh://host?runtime=torch",
        "ssh://host?runtime=tensorrt&device=cpu",
        "ssh://host?runtime=litert&device=cuda",
        "ssh://host?binary=/bin/sh",
        "ssh://host?device=tpu",
        "ssh://host?StrictHostKeyChecking=no",
        "ssh://host?config=/nowhere/at/all",
        "ssh://host?patience=long",
        "ssh://host?room=0",
        "ssh://host?room=٣",
        f"ssh://host?patience={'9' * 400}",
        "ssh:host",
    ],
)
def test_invalid_addresses_are_errors(address: str) -> None:
    with pytest.raises(ProfileError):
        Address.parse(address)
    with pytest.raises(DsaError):
        resolve(f"auto/{address}")
