"""From what ssh and the agent say to an error of ours, with the remedy; and whether trying again can help."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dsa_hw.errors import DsaError, MeasurementError, MissingDependencyError
from profilers.remote.channel import LostError, RefusedError, plain

__all__ = ["Failure", "of_lost", "of_refusal"]


@dataclass(frozen=True)
class Failure:
    """An error, and whether the same may work in a moment."""

    error: DsaError
    passing: bool = False


# What ssh prints on its way out (OpenSSH 7 to 10), the cause, the remedy, whether it may pass. First match counts.
_SSH = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed",
        "the host key of {board} is not the one that is known",
        "somebody may be listening, or the board was installed anew; if you know that it was, remove the old key with "
        "ssh-keygen -R {host}, connect once with: ssh {login}, and compare the fingerprint",
        False,
    ),
    (
        r"Host key verification failed|host key is known for",
        "the host key of {board} is not known here",
        "connect once by hand with: ssh {login}, and compare the fingerprint before saying yes; host keys are always "
        "checked",
        False,
    ),
    (
        r"Permission denied|Too many authentication failures|no such identity",
        "{board} does not accept the keys that ssh offers",
        "no password is ever asked for: copy your key with ssh-copy-id {login}, load it with ssh-add if it has a "
        "passphrase, or name it in your ssh configuration (IdentityFile); try: ssh {login} true",
        False,
    ),
    (
        r"[Bb]ad configuration option|Bad owner or permissions|Can't open user config",
        "ssh does not accept its configuration",
        "correct the file that it names; try: ssh {login} true",
        False,
    ),
    (r"Could not resolve hostname", "the name {host} is not known", "check the name; try: ssh {login} true", True),
    (
        r"refused|timed out|[Tt]imeout|No route|unreachable|[Cc]onnection (to .* )?(closed|reset)|kex_|[Bb]roken pipe",
        "{board} cannot be reached",
        "switch the board on, check the address, the port and the network; try: ssh {login} true",
        True,
    ),
)


def of_lost(lost: LostError, board: str, login: str, host: str, python: str) -> Failure:
    """Why a connection did not come about."""
    words = {"board": board, "login": login, "host": host}
    said = plain(lost.text.strip().rpartition("\n")[2], 200) or "nothing"
    found = re.search(r"dsa-hw-agent: (python \S+ is too old)", lost.text)
    if found:
        return Failure(
            MissingDependencyError(
                f"{board}: {plain(found[1])}; the agent needs Python 3.8 or later: name one with ?python=PATH"
            )
        )
    if lost.status in (126, 127):
        return Failure(
            MissingDependencyError(
                f"{board} has no {python} that can be run (it said: {said}); install Python 3, or name one with "
                "?python=PATH"
            )
        )
    if lost.status is None:
        return Failure(MissingDependencyError(f"{board} does not answer ({said}); try: ssh {login} true"), True)
    if lost.status == 255:
        for pattern, cause, remedy, passing in _SSH:
            if re.search(pattern, lost.text):
                text = f"{cause.format(**words)} (ssh said: {said}); {remedy.format(**words)}"
                return Failure(MissingDependencyError(text), passing)
    return Failure(
        MeasurementError(
            f"the agent on {board} did not start (exit status {lost.status}, it said: {said}); "
            f"try: ssh {login} {python} --version"
        ),
        passing=lost.status == 255,
    )


def of_refusal(refused: RefusedError, board: str, login: str, python: str) -> DsaError:
    """What the agent refused."""
    if refused.kind == "runtime":
        return MissingDependencyError(
            f"the board {board} has no usable ONNX Runtime: {refused}; on the board run {python} -m pip install "
            "onnxruntime numpy, or name the Python that has it with ?python=PATH"
        )
    remedies = {
        "disk": "make room there, or choose another folder with ?cache=PATH; nothing was left behind",
        "folder": "choose a folder of your own with ?cache=PATH",
        "busy": "wait for it, or end it: two measurements on one board disturb each other",
        "memory": "the network is too large for the board; use a smaller one, or a smaller batch",
        "not loaded": "the board has no memory for control and network at once; free some, or use a smaller one",
        "network": "this is what ONNX Runtime there says of the network; try a newer one on the board",
    }
    remedy = remedies.get(refused.kind, "this is a fault in the program: please report it")
    return MeasurementError(f"{board} refused ({refused.kind}): {refused}; {remedy}")
