"""How busy this computer is: load, waits for a processor, and the process that uses most of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["busiest_process", "load_average", "waited"]


def load_average() -> dict[str, float]:
    """Return the time and the load averages; recorded with every session, never part of the environment."""
    try:
        one, five, _ = os.getloadavg()
    except OSError:
        return {"time": time.time()}
    return {"time": time.time(), "load1": round(one, 2), "load5": round(five, 2)}


def waited(all_threads: bool = False) -> float | None:
    """Return the seconds that this thread was ready to run without a processor, since it started.

    The value is the scheduler's own account (``schedstat``). It shows exactly, run by run, when another process took
    the core, even if the control before and after was undisturbed.

    Args:
        all_threads: Sum over all threads of this process.

    Returns:
        Seconds, or None where the system does not report them.
    """
    try:
        if not all_threads:
            return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
        total = 0
        for task in Path("/proc/self/task").iterdir():
            total += int((task / "schedstat").read_text().split()[1])
        return total * 1e-9
    except (OSError, IndexError, ValueError):
        return None


def busiest_process(seconds: float = 0.2) -> str | None:
    """Describe the other process that uses most processor time now; None if it uses less than 10% of a core."""
    before = _processor_times()
    if not before:
        return None
    time.sleep(seconds)
    tick = os.sysconf("SC_CLK_TCK")
    used = {
        pid: ((ticks - before[pid][1]) / tick / seconds, name)
        for pid, (name, ticks) in _processor_times().items()
        if pid in before and pid != os.getpid()
    }
    if not used:
        return None
    pid, (share, name) = max(used.items(), key=lambda item: item[1][0])
    return f"{name} (pid {pid}) uses {100 * share:.0f}% of a core" if share >= 0.1 else None


def _processor_times() -> dict[int, tuple[str, int]]:
    found: dict[int, tuple[str, int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text()
        except OSError:
            continue
        name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
        found[int(folder.name)] = (name, int(rest[11]) + int(rest[12]))
    return found
