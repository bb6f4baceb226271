"""A board over ssh, timed on the board.

The address is ``ssh://[user@]host[:port][?runtime=onnxruntime&python=PATH&...]``; an IPv6 address is in brackets. The
connection uses the system's ssh client, and so the user's configuration, keys, agents and jump hosts. Host keys are
always checked. See docs/guide/boards.md.

The runtime is ONNX Runtime within the agent, TensorRT by NVIDIA's ``trtexec`` (``runtime=tensorrt``), or LiteRT by its
``benchmark_model`` (``runtime=litert``). The programs were not run on a board: their options and output are those of
their source, and the tests use programs that behave alike.
"""

from __future__ import annotations

import atexit
import ipaddress
import os
import re
import shlex
import shutil
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal
from urllib.parse import parse_qsl, urlencode, urlsplit

from dsa_hw.errors import MissingDependencyError, ProfileError
from profilers.litert.client import Worker, versions
from profilers.litert.convert import ConvertedNetwork, TfliteFile, convert
from profilers.remote.channel import BOOTSTRAP, LostError
from profilers.remote.device import AgentDevice
from profilers.remote.failures import Failure, of_lost
from profilers.targets.base import Loaded, Target, register

__all__ = ["Address", "Ssh"]

_FORM = "ssh://[user@]host[:port]?runtime=onnxruntime"
_PARAMETERS = {
    "runtime": "onnxruntime",
    "device": "",
    "binary": "",
    "python": "python3",
    "cache": "",
    "config": "",
    "patience": "60",
    "room": "2048",
}
_DEVICES = {"onnxruntime": ("cpu", "cuda"), "tensorrt": ("cuda",), "litert": ("cpu",)}  # the default first
_TESTED = "written after the source of the program and tested with one that behaves alike, not on a board"
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
        runtime: "onnxruntime", "tensorrt" or "litert".
        binary: Path of ``trtexec`` or ``benchmark_model`` on the board; empty for where it usually is.
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
    runtime: str = "onnxruntime"
    binary: str = ""

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
        runtime = options["runtime"]
        if runtime not in _DEVICES:
            raise ProfileError(f"A board supports runtime={', '.join(_DEVICES)}; got {runtime!r}.")
        device = options["device"] or _DEVICES[runtime][0]
        if device not in _DEVICES[runtime]:
            known = " or ".join(f"device={d}" for d in _DEVICES[runtime])
            raise ProfileError(f"A board supports {known} with runtime={runtime}; got {device!r}.")
        if options["binary"] and runtime == "onnxruntime":
            raise ProfileError("`binary` is for runtime=tensorrt or runtime=litert; ONNX Runtime is a Python package.")
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
            device,
            options["python"] or "python3",
            options["cache"],
            options["config"],
            float(options["patience"]),
            int(options["room"]),
            runtime,
            options["binary"],
        )

    @property
    def title(self) -> str:
        """The address without options."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ssh://{self.user + '@' if self.user else ''}{host}{f':{self.port}' if self.port else ''}"

    @property
    def url(self) -> str:
        """The address with all options that are not defaults."""
        given = {"python": self.python, "cache": self.cache, "config": self.config, "binary": self.binary}
        given |= {"patience": f"{self.patience:g}", "room": str(self.room)}
        unusual = {k: v for k, v in given.items() if v != _PARAMETERS[k]}
        device = {"device": self.device} if self.device != _DEVICES[self.runtime][0] else {}
        return f"{self.title}?{urlencode({'runtime': self.runtime} | device | unusual)}"

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
    if address.runtime == "onnxruntime":
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
            runtime=address.runtime,
            binary=address.binary,
        )
    return _BOARDS[address]


def _close() -> None:
    for board in _BOARDS.values():
        board.close()


@register("ssh")
class Ssh(Target):
    """A runtime on a board, run by an agent there; the class of the address's runtime is made.

    The environment of a measurement is the board's.
    """

    artefact: ClassVar[Literal["module", "onnx"]] = "onnx"
    schemes: ClassVar[tuple[str, ...]] = ("u8", "s8", "u8layers")
    cache = 2**22  # boards have little memory for copies

    def __new__(cls, device: str, **_: Any) -> Ssh:
        """Make the class that belongs to the runtime of the address."""
        return super().__new__(_CLASSES.get(Address.parse(device).runtime, cls))

    def __init__(self, device: str, *, precision: str = "fp32", threads: int = 1) -> None:
        self.address = Address.parse(device)
        super().__init__(self.address.device, precision=precision, threads=threads)
        self.board = _board(self.address)
        self.remote_device = self.board

    def check(self) -> None:
        """Check the ssh client, the connection, and the runtime on the board."""
        if shutil.which("ssh") is None:
            raise MissingDependencyError("A board over ssh needs the ssh client. Install openssh-client.")
        self.board.connect()

    def load(self, artefact: bytes, inputs: tuple[Any, ...]) -> Loaded:
        """Send the bytes of an ONNX file to the board and load it."""
        precision = "int8" if self.int8 is not None else self.precision
        return self.board.load(artefact, [x.cpu().numpy() for x in inputs], self.threads, self.device, precision)

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
        device = "" if self.device == _DEVICES[self.address.runtime][0] else f" {self.device}"
        return f"{self.address.runtime}/{self.address.title}{device} {self.precision}{threads}"


class SshOnnxRuntime(Ssh):
    """ONNX Runtime on a board."""

    def check(self) -> None:
        """Check the connection and the execution providers of the board."""
        super().check()
        if self._provider() not in self.board.providers:
            raise MissingDependencyError(
                f"ONNX Runtime on {self.address.title} has no provider for device={self.device}, only "
                f"{', '.join(self.board.providers)}. Install another build there, or use device=cpu."
            )

    def describe(self) -> dict[str, str]:
        """Return the board, its versions, and the session options of the agent."""
        return {
            **self.board.environment,
            "session": f"intra_op_num_threads={self.threads} inter_op_num_threads=1 allow_spinning=0 "
            "graph_optimization_level=all execution_mode=sequential",
            "providers": self._provider(),
            **self.describe_int8(),
        }

    def _provider(self) -> str:
        return "CUDAExecutionProvider" if self.device == "cuda" else "CPUExecutionProvider"


class SshTensorRT(Ssh):
    """TensorRT on a board, for example a Jetson: engines are built and timed there by ``trtexec``."""

    schemes = ("s8sym",)
    slow_to_load = True
    warms_up = False

    def describe(self) -> dict[str, str]:
        """Return the board, its versions, how engines are timed, and how this was tested."""
        return {
            **_unseen(self.board.environment),
            "timed": "GPU compute time of trtexec, 20 runs after 200 ms, no data transfers, shared timing cache",
            "tested": _TESTED,
            **self.describe_int8(),
        }


class SshLiteRT(Ssh):
    """LiteRT with XNNPACK on a board, timed by ``benchmark_model``; networks are converted on this computer."""

    artefact = "module"
    schemes = ()
    slow_to_load = True
    warms_up = False

    def __init__(self, device: str, *, precision: str = "fp32", threads: int = 1) -> None:
        super().__init__(device, precision=precision, threads=threads)
        self.worker = Worker()

    def check(self) -> None:
        """Check the precision, the environment of the converter, and the connection."""
        if self.precision != "fp32":
            raise ProfileError(f"A board with runtime=litert supports --precision fp32 only; got {self.precision!r}.")
        versions()
        super().check()

    def template(self, model: Any, groups: Any, inputs: tuple[Any, ...]) -> ConvertedNetwork:
        """Convert the network once; configurations are made by narrowing that file."""
        return ConvertedNetwork(self.worker, model, groups, inputs)

    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        """Send a LiteRT file to the board; a module is converted first, which takes many seconds."""
        file = artefact if isinstance(artefact, TfliteFile) else convert(self.worker, artefact, inputs)[0]
        return self.board.load(file.content(), [], self.threads, self.device)

    def describe(self) -> dict[str, str]:
        """Return the board, its versions, how networks are timed, and how this was tested."""
        return {
            **_unseen(self.board.environment),
            "litert-torch": versions()["litert-torch"],
            "timed": f"mean of 5 runs of benchmark_model after 3, num_threads={self.threads} XNNPACK",
            "tested": _TESTED,
        }


def _unseen(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of a board that runs a program: the packages of this computer do not matter."""
    return {"numpy": "not used", **environment}


_CLASSES: dict[str, type[Ssh]] = {"onnxruntime": SshOnnxRuntime, "tensorrt": SshTensorRT, "litert": SshLiteRT}
