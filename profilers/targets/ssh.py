"""A board over ssh, timed on the board.

The address is ``ssh://[user@]host[:port][?runtime=onnxruntime&python=PATH&...]``; an IPv6 address is in brackets. The
connection uses the system's ssh client, and so the user's configuration, keys, agents and jump hosts. Host keys are
always checked. See docs/guide/boards.md.
"""

from __future__ import annotations

import atexit
import ipaddress
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
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Address:
    """The address of a board.

    Attributes:
        host: Host name, or an IP address; IPv6 without brackets.
        user: User name; empty for ssh's default.
        port: Port; None for ssh's default.
        device: "cpu" or "cuda".
        python: Path of Python on the board.
        cache: Folder for artefacts on the board; empty for the agent's default.
        config: An ssh configuration file on this computer.
        patience: Seconds during which a lost connection is tried again.
        room: Megabytes of artefacts to keep on the board at most.
    """

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
        """Parse a URL.

        The environment variable DSA_HW_SSH_CONFIG is the default of ``config``.
        """
        try:
            parts = urlsplit(text)
            port, user, host = parts.port, parts.username or "", parts.hostname or ""
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError as error:
            raise ProfileError(f"The address of a board must be {_FORM}; got {text!r} ({error}).") from error
        host = host.replace("%25", "%")  # before the zone of an IPv6 address, as RFC 6874 writes it
        # Both become arguments of ssh, which must not take them for an option or a command.
        if parts.scheme != "ssh" or not (_NAME.fullmatch(host) or _is_ipv6(host)):
            raise ProfileError(f"The address of a board must be {_FORM}; got {text!r}.")
        if not re.fullmatch(r"([A-Za-z0-9_][A-Za-z0-9_.-]*)?", user):
            raise ProfileError(f"The user name of a board may contain letters, digits and _.-; got {user!r}.")
        if parts.password is not None:
            raise ProfileError(
                "The address of a board must not contain a password, which other users could see. Use a key."
            )
        if parts.path.strip("/") or parts.fragment:
            raise ProfileError(f"The address of a board must have a host and options only, {_FORM}; got {text!r}.")
        given = dict(pairs)
        if unknown := set(given) - set(_PARAMETERS):
            raise ProfileError(
                f"The options of a board are {', '.join(_PARAMETERS)}; got {', '.join(sorted(unknown))}."
            )
        options = {**_PARAMETERS, "config": os.environ.get("DSA_HW_SSH_CONFIG", ""), **given}
        if options["runtime"] != "onnxruntime":
            raise ProfileError(f"A board supports runtime=onnxruntime only; got {options['runtime']!r}.")
        if options["device"] not in ("cpu", "cuda"):
            raise ProfileError(f"A board supports device=cpu or device=cuda; got {options['device']!r}.")
        if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", options["patience"]) or not re.fullmatch(
            r"[1-9][0-9]{0,8}", options["room"]
        ):
            raise ProfileError(
                "`patience` must be a number of seconds and `room` a whole number of megabytes; got "
                f"{options['patience']!r} and {options['room']!r}."
            )
        if options["config"] and not os.path.isfile(options["config"]):
            raise ProfileError(f"The ssh configuration {options['config']!r} does not exist.")
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
        """The address with all options that are not defaults."""
        given = {"device": self.device, "python": self.python, "cache": self.cache, "config": self.config}
        given |= {"patience": f"{self.patience:g}", "room": str(self.room)}
        unusual = {k: v for k, v in given.items() if v != _PARAMETERS[k]}
        return f"{self.title}?{urlencode({'runtime': 'onnxruntime'} | unusual)}"

    @property
    def login(self) -> str:
        """Arguments of ssh with which a user would connect, for messages."""
        words = ["-F", self.config] if self.config else []
        words += ["-p", str(self.port)] if self.port else []
        return shlex.join([*words, f"{self.user}@{self.host}" if self.user else self.host])

    @property
    def command(self) -> list[str]:
        """The command that starts an agent on the board."""
        words = ["ssh", "-T"]
        words += ["-F", self.config] if self.config else []
        for option in (
            "BatchMode=yes",  # no prompts: what needs an answer is an error
            "StrictHostKeyChecking=yes",  # regardless of the configuration
            "ConnectTimeout=15",
            "ServerAliveInterval=5",
            "ServerAliveCountMax=3",
            "ClearAllForwardings=yes",  # no access from the board to our ports and keys
            "ForwardAgent=no",
            "ForwardX11=no",
            "PermitLocalCommand=no",
            "RemoteCommand=none",
            "ControlMaster=no",  # over a shared connection, none of these options would apply
            "ControlPath=none",
        ):
            words += ["-o", option]
        words += ["-p", str(self.port)] if self.port else []
        words += ["-l", self.user] if self.user else []
        return [*words, "--", self.host, f"exec {_remote(self.python)} -c {shlex.quote(BOOTSTRAP)}"]


def _is_ipv6(host: str) -> bool:
    """Return whether this is an IPv6 address, with a plain zone (%eth0) or none."""
    address, percent, zone = host.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return not percent or _NAME.fullmatch(zone) is not None


def _remote(path: str) -> str:
    """Quote a path on the board for its shell; it may start with ~/."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


_BOARDS: dict[Address, AgentDevice] = {}


def _board(address: Address) -> AgentDevice:
    """Return the board at an address; all targets of the process share one connection."""
    address = replace(address, device="cpu")  # CPU and GPU share one connection
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
    """ONNX Runtime on a board, run by an agent there.

    The environment of a measurement is the board's.
    """

    artefact = "onnx"
    schemes = ("u8", "s8", "u8layers")
    cache = 2**22  # boards have little memory for copies

    def __init__(self, device: str, *, precision: str = "fp32", threads: int = 1) -> None:
        self.address = Address.parse(device)
        super().__init__(self.address.device, precision=precision, threads=threads)
        self.board = _board(self.address)
        self.remote_device = self.board

    def check(self) -> None:
        """Check the ssh client, the connection, and ONNX Runtime on the board."""
        if shutil.which("ssh") is None:
            raise MissingDependencyError("A board over ssh needs the ssh client. Install openssh-client.")
        self.board.connect()
        if self._provider() not in self.board.providers:
            raise MissingDependencyError(
                f"ONNX Runtime on {self.address.title} has no provider for device={self.device}, only "
                f"{', '.join(self.board.providers)}. Install another build there, or use device=cpu."
            )

    def load(self, artefact: bytes, inputs: tuple[Any, ...]) -> Loaded:
        """Send the bytes of an ONNX file to the board and load it."""
        return self.board.load(artefact, [x.cpu().numpy() for x in inputs], self.threads, self.device)

    def describe(self) -> dict[str, str]:
        """Return the board, its versions, and the session options of the agent."""
        return {
            **self.board.environment,
            "session": f"intra_op_num_threads={self.threads} inter_op_num_threads=1 allow_spinning=0 "
            "graph_optimization_level=all execution_mode=sequential",
            "providers": self._provider(),
            **self.describe_int8(),
        }

    def close(self) -> None:
        """End the agent on the board; the next request starts another."""
        self.board.close()

    @property
    def name(self) -> str:
        """The address, as `resolve` takes it."""
        return self.address.url

    @property
    def title(self) -> str:
        """Runtime, board, precision and threads."""
        threads = f" x{self.threads}" if self.device == "cpu" else ""
        device = "" if self.device == "cpu" else f" {self.device}"
        return f"onnxruntime/{self.address.title}{device} {self.precision}{threads}"

    def _provider(self) -> str:
        return "CUDAExecutionProvider" if self.device == "cuda" else "CPUExecutionProvider"
