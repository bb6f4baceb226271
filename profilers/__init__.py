"""profilers: measure what networks really take on a device, and say how far the numbers can be trusted."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Comparison": "profilers.measuring.measurement",
    "Measurement": "profilers.measuring.measurement",
    "Protocol": "profilers.measuring.measurement",
    "compare_measurements": "profilers.measuring.measurement",
    "load": "profilers.storage.tables",
    "measure": "profilers.profiling.api",
    "profile": "profilers.profiling.api",
    "self_check": "profilers.profiling.api",
}
__all__ = [
    "Comparison",
    "Measurement",
    "Protocol",
    "compare_measurements",
    "load",
    "measure",
    "profile",
    "self_check",
]

if TYPE_CHECKING:
    from profilers.measuring.measurement import Comparison, Measurement, Protocol, compare_measurements
    from profilers.profiling.api import measure, profile, self_check
    from profilers.storage.tables import load


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'profilers' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
