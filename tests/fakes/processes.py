"""An agent as a process of this computer, signals, and waiting for processes."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from profilers.remote.channel import BOOTSTRAP

LOCAL = [sys.executable, "-c", BOOTSTRAP]


def send(number: int) -> None:
    """Send a signal to this process and wait for its handler, which Python can run a moment later beside threads."""
    signal.raise_signal(number)
    for _ in range(20):
        time.sleep(0.005)


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
