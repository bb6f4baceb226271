"""What a measurement depends on: target, versions, flags, processor and its settings."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from profilers.targets import Target

__all__ = ["differences", "digest", "environment"]

_CPU = Path("/sys/devices/system/cpu")


def environment(target: Target) -> dict[str, str]:
    """Return everything that a measurement depends on and that does not change while measuring.

    Measurements of environments with equal digests may be combined. Where the target computes its times, they depend
    on the target alone, not on this machine.
    """
    if target.estimated is not None:
        return {"target": target.title, "estimated": target.estimated, **target.describe()}
    return {
        "target": target.title,
        "cpu": _cpu_model(),
        "cores": str(_cores()),
        "governor": _read(_CPU / "cpu0/cpufreq/scaling_governor") or "not visible",
        "boost": _read(_CPU / "cpufreq/boost") or "not visible",
        "smt": _read(_CPU / "smt/control") or "not visible",
        "kernel": platform.release(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        **target.describe(),
    }


def digest(description: Mapping[str, str]) -> str:
    """Return the content hash of an environment."""
    return hashlib.sha256(json.dumps(dict(description), sort_keys=True).encode()).hexdigest()


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Describe what changed between two environments.

    >>> differences({"torch": "2.8", "python": "3.11"}, {"torch": "2.9", "python": "3.11"})
    'torch 2.8 -> 2.9'
    """
    keys = [k for k in dict.fromkeys((*old, *new)) if old.get(k) != new.get(k)]
    return "; ".join(f"{k} {old.get(k, 'absent')} -> {new.get(k, 'absent')}" for k in keys)


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
