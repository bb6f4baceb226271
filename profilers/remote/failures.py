"""Turn failures of ssh and of the agent into errors with a remedy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dsa_hw.errors import DsaError, MeasurementError, MissingDependencyError
from dsa_hw.utils.text import one_line
from profilers.remote.channel import LostError, RefusedError

__all__ = ["Failure", "of_lost", "of_refusal"]


@dataclass(frozen=True)
class Failure:
    """An error, and whether it may pass when tried again."""

    error: DsaError
    passing: bool = False


# What ssh prints (OpenSSH 7 to 10), the cause, the remedy, and whether it may pass. The first match is used.
_SSH = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed",
        "The host key of {board} differs from the known one",
        "The connection may be intercepted, or the board was reinstalled. If it was, remove the old key with "
        "ssh-keygen -R {host}, connect once with: ssh {login}, and compare the fingerprint.",
        False,
    ),
    (
        r"Host key verification failed|host key is known for",
        "The host key of {board} is unknown",
        "Connect once with: ssh {login}, and compare the fingerprint before you accept it.",
        False,
    ),
    (
        r"Permission denied|Too many authentication failures|no such identity",
        "{board} does not accept the keys that ssh offers",
        "Passwords are not supported: copy your key with ssh-copy-id {login}, load it with ssh-add if it has a "
        "passphrase, or name it in your ssh configuration (IdentityFile). Try: ssh {login} true",
        False,
    ),
    (
        r"[Bb]ad configuration option|Bad owner or permissions|Can't open user config",
        "ssh does not accept its configuration",
        "Correct the file that it names. Try: ssh {login} true",
        False,
    ),
    (r"Could not resolve hostname", "The host name {host} is unknown", "Check the name. Try: ssh {login} true", True),
    (
        r"refused|timed out|[Tt]imeout|No route|unreachable|[Cc]onnection (to .* )?(closed|reset)|kex_|[Bb]roken pipe",
        "{board} cannot be reached",
        "Switch the board on; check address, port and network. Try: ssh {login} true",
        True,
    ),
)


def of_lost(lost: LostError, board: str, login: str, host: str, python: str) -> Failure:
    """Explain why a connection could not be made.

    Args:
        lost: What happened.
        board: Name of the board in messages.
        login: Arguments of ssh with which a user would connect.
        host: Host name of the board.
        python: Python on the board.
    """
    words = {"board": board, "login": login, "host": host}
    said = one_line(lost.text.strip().rpartition("\n")[2], 200).rstrip(".") or "no output"
    found = re.search(r"dsa-hw-agent: (python \S+ is too old)", lost.text)
    if found:
        return Failure(
            MissingDependencyError(
                f"{board}: {one_line(found[1])}. The agent needs Python 3.8 or later: name one with ?python=PATH."
            )
        )
    if lost.status in (126, 127):
        return Failure(
            MissingDependencyError(
                f"{board} cannot run {python} ({said}). Install Python 3 there, or name one with ?python=PATH."
            )
        )
    if lost.status is None:
        text = f"{board} does not answer properly ({said}). Try: ssh {login} true"
        return Failure(MissingDependencyError(text), passing=lost.late)
    if lost.status == 255:
        for pattern, cause, remedy, passing in _SSH:
            if re.search(pattern, lost.text):
                text = f"{cause.format(**words)} ({said}). {remedy.format(**words)}"
                return Failure(MissingDependencyError(text), passing)
    return Failure(
        MeasurementError(
            f"The agent on {board} did not start (exit status {lost.status}: {said}). "
            f"Try: ssh {login} {python} --version"
        ),
        passing=lost.status == 255,
    )


def of_refusal(refused: RefusedError, board: str, login: str, python: str, runtime: str = "onnxruntime") -> DsaError:
    """Explain what the agent refused."""
    if refused.kind == "runtime" and runtime != "onnxruntime":
        return MissingDependencyError(
            f"The program that runs networks on {board} cannot be used ({refused}). Try it there, or name another one "
            "with &binary=PATH. TensorRT 8.5 to 11 and LiteRT's benchmark_model of the interpreter are supported."
        )
    if refused.kind == "runtime":
        return MissingDependencyError(
            f"The board {board} has no usable ONNX Runtime ({refused}). On the board run {python} -m pip install "
            "onnxruntime numpy, or name the Python that has it with ?python=PATH."
        )
    if refused.kind == "program":
        return MissingDependencyError(
            f"The board {board} cannot run networks: {refused}. Name the path there with &binary=PATH. trtexec is part "
            "of TensorRT (JetPack: sudo apt install tensorrt), benchmark_model of LiteRT (docs/guide/boards.md)."
        )
    remedies = {
        "disk": "Free space there, or choose another folder with ?cache=PATH. No incomplete file was left.",
        "folder": "Choose a folder of your own with ?cache=PATH.",
        "busy": "Wait for it, or end it: two measurements on one board disturb each other.",
        "memory": "The network is too large for the board. Use a smaller one, or a smaller batch.",
        "not loaded": "The board lacks memory for the networks. Free some, or use a smaller network.",
        "network": "The message is from the runtime on the board. Try a newer version there.",
    }
    remedy = remedies.get(refused.kind, "This is an error in the program. Please report it.")
    return MeasurementError(f"{board} refused the request ({refused.kind}): {refused}. {remedy}")
