"""profilers: measure what networks really take on a device, and say how far the numbers can be trusted."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "MeasurementComparison": "profilers.measuring.comparison",
    "Measurement": "profilers.measuring.measurement",
    "MeasuringRules": "profilers.measuring.rules",
    "compare_measurements": "profilers.measuring.comparison",
    "load_tables": "profilers.storage.tables",
    "measure": "profilers.profiling.api",
    "profile": "profilers.profiling.api",
    "self_check": "profilers.profiling.api",
}
__all__ = [
    "Measurement",
    "MeasurementComparison",
    "MeasuringRules",
    "compare_measurements",
    "load_tables",
    "measure",
    "profile",
    "self_check",
]

if TYPE_CHECKING:
    from profilers.measuring.comparison import MeasurementComparison, compare_measurements
    from profilers.measuring.measurement import Measurement
    from profilers.measuring.rules import MeasuringRules
    from profilers.profiling.api import measure, profile, self_check
    from profilers.storage.tables import load_tables


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'profilers' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
