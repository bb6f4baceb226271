"""A board over ssh: ``ssh://[user@]host[:port][?runtime=onnxruntime&python=PATH&...]``. Timed on the board.

The system's own ssh client makes the connection, so that configuration, keys, agents and jump hosts work as ever. Host
keys are always checked. See docs/guide/boards.md.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from dsa_hw.errors import MissingDependencyError, ProfileError
from profilers.remote.channel import BOOTSTRAP, LostError
from profilers.remote.device import AgentDevice
from profilers.remote.failures import Failure, of_lost
from profilers.targets.base import Loaded, Target, register

__all__ = ["Address", "Ssh"]

_FORM = "ssh://[user@]host[:port]?runtime=onnxruntime"
_PARAMETERS = {
    "runtime": "onnxruntime",
    "device": "cpu",
    "python": "python3",
    "cache": "",
    "config": "",
    "patience": "60",
    "room": "2048",
}


@dataclass(frozen=True)
class Address:
    """Where a board is: ``python`` and ``cache`` are paths there, ``config`` is an ssh configuration file here,
    ``patience`` (s) how long a lost connection is tried again, ``room`` (MB) what artefacts may take there."""

    host: str
    user: str = ""
    port: int | None = None
    device: str = "cpu"
    python: str = "python3"
    cache: str = ""
    config: str = ""
    patience: float = 60.0
    room: int = 2048

    @classmethod
    def parse(cls, text: str) -> Address:
        """From a URL; the ssh configuration file may also come from the environment, DSA_HW_SSH_CONFIG."""
        try:
            parts = urlsplit(text)
            port, user, host = parts.port, parts.username or "", parts.hostname or ""
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError as error:
            raise ProfileError(f"{text!r} is no address of a board ({error}); write {_FORM}") from error
        # Both end up among the arguments of ssh: nothing that it could take for an option or a command.
        if parts.scheme != "ssh" or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]*", host):
            raise ProfileError(f"{text!r} is no address of a board; write {_FORM}")
        if not re.fullmatch(r"([A-Za-z0-9_][A-Za-z0-9_.-]*)?", user):
            raise ProfileError(f"{user!r} is no user name; write {_FORM}")
        if parts.password is not None:
            raise ProfileError("a password in the address of a board would be seen by others; use a key")
        if parts.path.strip("/") or parts.fragment:
            raise ProfileError(f"{text!r} has more than a host and options; write {_FORM}")
        given = dict(pairs)
        if unknown := set(given) - set(_PARAMETERS):
            raise ProfileError(f"{', '.join(sorted(unknown))} is no option of a board; use {', '.join(_PARAMETERS)}")
        options = {**_PARAMETERS, "config": os.environ.get("DSA_HW_SSH_CONFIG", ""), **given}
        if options["runtime"] != "onnxruntime":
            raise ProfileError(f"runtime {options['runtime']!r} asked for on a board; use onnxruntime")
        if options["device"] not in ("cpu", "cuda"):
            raise ProfileError(f"device {options['device']!r} asked for on a board; use cpu or cuda")
        if not re.fullmatch(r"\d+(\.\d+)?", options["patience"]) or not re.fullmatch(r"[1-9]\d*", options["room"]):
            raise ProfileError("patience is a number of seconds and room a number of megabytes")
        if options["config"] and not os.path.isfile(options["config"]):
            raise ProfileError(f"the ssh configuration {options['config']!r} does not exist")
        return cls(
            host,
            user,
            port,
            options["device"],
            options["python"] or "python3",
            options["cache"],
            options["config"],
            float(options["patience"]),
            int(options["room"]),
        )

    @property
    def title(self) -> str:
        """The address without options."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ssh://{self.user + '@' if self.user else ''}{host}{f':{self.port}' if self.port else ''}"

    @property
    def url(self) -> str:
        """The address with the options that are not the usual ones, as `parse` takes it."""
        given = {"device": self.device, "python": self.python, "cache": self.cache, "config": self.config}
        given |= {"patience": f"{self.patience:g}", "room": str(self.room)}
        unusual = {k: v for k, v in given.items() if v != _PARAMETERS[k]}
        return f"{self.title}?{urlencode({'runtime': 'onnxruntime'} | unusual)}"

    @property
    def login(self) -> str:
        """How a person would connect, for messages."""
        words = ["-F", self.config] if self.config else []
        words += ["-p", str(self.port)] if self.port else []
        return shlex.join([*words, f"{self.user}@{self.host}" if self.user else self.host])

    @property
    def command(self) -> list[str]:
        """The command that starts an agent there."""
        words = ["ssh", "-T"]
        words += ["-F", self.config] if self.config else []
        for option in (
            "BatchMode=yes",  # nobody is asked anything: what needs an answer is an error
            "StrictHostKeyChecking=yes",  # whatever the configuration says
            "ConnectTimeout=15",
            "ServerAliveInterval=5",
            "ServerAliveCountMax=3",
            "ClearAllForwardings=yes",  # the board gets no way back, neither to ports nor to keys
            "ForwardAgent=no",
            "ForwardX11=no",
            "PermitLocalCommand=no",
            "RemoteCommand=none",
        ):
            words += ["-o", option]
        words += ["-p", str(self.port)] if self.port else []
        words += ["-l", self.user] if self.user else []
        return [*words, "--", self.host, f"exec {_remote(self.python)} -c {shlex.quote(BOOTSTRAP)}"]


def _remote(path: str) -> str:
    """A path on the board, for its shell: the home directory may be written ~."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


_BOARDS: dict[Address, AgentDevice] = {}


def _board(address: Address) -> AgentDevice:
    """The board at an address: one connection per process, however many targets ask."""
    address = replace(address, device="cpu")  # its CPU and its GPU are behind the same connection
    if address not in _BOARDS:

        def explain(lost: LostError) -> Failure:
            return of_lost(lost, address.title, address.login, address.host, address.python)

        if not _BOARDS:
            atexit.register(_close)
        _BOARDS[address] = AgentDevice(
            address.title,
            address.command,
            explain,
            login=address.login,
            python=address.python,
            folder=address.cache or None,
            patience=address.patience,
            room=address.room * 10**6,
        )
    return _BOARDS[address]


def _close() -> None:
    for board in _BOARDS.values():
        board.close()


@register("ssh")
class Ssh(Target):
    """ONNX Runtime on a board, through an agent there. The environment of a measurement is the board's."""

    artefact = "onnx"

    def __init__(self, device: str, *, precision: str = "fp32", threads: int = 1) -> None:
        self.address = Address.parse(device)
        super().__init__(self.address.device, precision=precision, threads=threads)
        self.board = _board(self.address)
        self.remote_device = self.board

    def check(self) -> None:
        """An ssh client here, a connection, and ONNX Runtime there."""
        if shutil.which("ssh") is None:
            raise MissingDependencyError("a board over ssh needs the ssh client; install openssh-client")
        self.board.connect()
        if self._provider() not in self.board.providers:
            raise MissingDependencyError(
                f"device={self.device} asked for, but ONNX Runtime on {self.address.title} has "
                f"{', '.join(self.board.providers)} only; install a build with it there, or use device=cpu"
            )

    def load(self, artefact: bytes, inputs: tuple[Any, ...]) -> Loaded:
        """Send and load the bytes of an ONNX file."""
        return self.board.load(artefact, [x.cpu().numpy() for x in inputs], self.threads, self.device)

    def describe(self) -> dict[str, str]:
        """The board, its versions, and the session options of the agent."""
        return {
            **self.board.environment,
            "session": f"intra_op_num_threads={self.threads} inter_op_num_threads=1 allow_spinning=0 "
            "graph_optimization_level=all execution_mode=sequential",
            "providers": self._provider(),
        }

    def close(self) -> None:
        """End the agent; nothing stays running on the board. It starts again when it is needed."""
        self.board.close()

    @property
    def name(self) -> str:
        """The address, as it is written to `resolve`."""
        return self.address.url

    @property
    def title(self) -> str:
        """Runtime, board, precision and threads."""
        threads = f" x{self.threads}" if self.device == "cpu" else ""
        device = "" if self.device == "cpu" else f" {self.device}"
        return f"onnxruntime/{self.address.title}{device} {self.precision}{threads}"

    def _provider(self) -> str:
        return "CUDAExecutionProvider" if self.device == "cuda" else "CPUExecutionProvider"
