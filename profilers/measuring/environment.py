"""What the machine is and how busy it is: versions, flags, processor, governor, load, and who else is running."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

from profilers.networks.chains import control_name
from profilers.targets import Target

__all__ = ["busiest", "differences", "digest", "environment", "load", "waited"]

_CPU = Path("/sys/devices/system/cpu")


def environment(target: Target) -> dict[str, str]:
    """Everything that a measurement depends on and that stays put during it; equal digests may be mixed.

    What a target computes does not depend on this machine: then it is the target and whose word it is.
    """
    if target.estimated is not None:
        return {"target": target.title, "estimated": target.estimated, **target.describe()}
    import numpy
    import torch

    return {
        "target": target.title,
        "control": control_name(target),
        "cpu": _cpu_model(),
        "cores": str(_cores()),
        "governor": _read(_CPU / "cpu0/cpufreq/scaling_governor") or "not visible",
        "boost": _read(_CPU / "cpufreq/boost") or "not visible",
        "smt": _read(_CPU / "smt/control") or "not visible",
        "kernel": platform.release(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        **target.describe(),
    }


def digest(description: Mapping[str, str]) -> str:
    """Content hash of an environment."""
    return hashlib.sha256(json.dumps(dict(description), sort_keys=True).encode()).hexdigest()


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """What changed between two environments, in words: ``onnxruntime 1.30.0 -> 1.31.1``."""
    keys = [k for k in dict.fromkeys((*old, *new)) if old.get(k) != new.get(k)]
    return "; ".join(f"{k} {old.get(k, 'absent')} -> {new.get(k, 'absent')}" for k in keys)


def load() -> dict[str, float]:
    """How busy the machine is at this moment; recorded with every session, never part of the digest."""
    try:
        one, five, _ = os.getloadavg()
    except OSError:
        return {"time": time.time()}
    return {"time": time.time(), "load1": round(one, 2), "load5": round(five, 2)}


def waited(all_threads: bool = False) -> float | None:
    """Seconds that this thread (or all of the process) stood ready without a processor, since it started.

    The scheduler's own account (``schedstat``): a neighbour that takes our core shows here exactly, run by run, even
    when the control before and after happened to be undisturbed. None where the system does not say.
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


def busiest(seconds: float = 0.2) -> str | None:
    """The other process that uses most processor time right now, in words; None where it cannot be seen or is small."""
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
    return f"{name} (pid {pid}) uses {100 * share:.0f} % of a core" if share >= 0.1 else None


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


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
