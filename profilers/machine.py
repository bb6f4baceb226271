"""How busy this computer is: load, waits for a processor, and the process that uses most of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from dsa_hw.utils.text import one_line

__all__ = ["busiest_process", "load_average"]


def load_average() -> dict[str, float]:
    """Return the time and the load averages; recorded with every session, never part of the environment."""
    try:
        one, five, _ = os.getloadavg()
    except OSError:
        return {"time": time.time()}
    return {"time": time.time(), "load1": round(one, 2), "load5": round(five, 2)}


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
            text = (folder / "stat").read_text(errors="replace")
        except OSError:
            continue
        # A process chooses its name: it may contain any bytes, also those that change a terminal.
        name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
        found[int(folder.name)] = (one_line(name, 40), int(rest[11]) + int(rest[12]))
    return found
