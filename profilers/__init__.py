"""Measure the latency and energy of networks on real devices.

- ``latency``, ``energy``: the commands ``python -m profilers.latency`` and ``python -m profilers.energy``; ``cli`` and
  ``summary`` are their options and their output.
- ``profiling``: sampled configurations of a network, from the grid to the profile.
- ``measuring``: how one value is measured, and when it can be trusted.
- ``storage``: all runs in one SQLite file.
- ``networks``, ``targets``, ``litert``, ``remote``, ``fleet``: what is measured, and where.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Event": "profilers.profiling.events",
    "Measurement": "profilers.measuring.measurement",
    "MeasurementComparison": "profilers.measuring.comparison",
    "MeasuringRules": "profilers.measuring.rules",
    "Profile": "dsa_hw.profiles",
    "SelfCheck": "profilers.profiling.api",
    "Tables": "profilers.storage.tables",
    "Target": "profilers.targets",
    "compare_measurements": "profilers.measuring.comparison",
    "int8_sensitivity": "profilers.profiling.sensitivity",
    "load_profile": "profilers.storage.tables",
    "load_tables": "profilers.storage.tables",
    "measure": "profilers.profiling.api",
    "profile": "profilers.profiling.api",
    "register": "profilers.targets",
    "resolve": "profilers.targets",
    "self_check": "profilers.profiling.api",
}
__all__ = [
    "Event",
    "Measurement",
    "MeasurementComparison",
    "MeasuringRules",
    "Profile",
    "SelfCheck",
    "Tables",
    "Target",
    "compare_measurements",
    "int8_sensitivity",
    "load_profile",
    "load_tables",
    "measure",
    "profile",
    "register",
    "resolve",
    "self_check",
]

if TYPE_CHECKING:
    from dsa_hw.profiles import Profile
    from profilers.measuring.comparison import MeasurementComparison, compare_measurements
    from profilers.measuring.measurement import Measurement
    from profilers.measuring.rules import MeasuringRules
    from profilers.profiling.api import SelfCheck, measure, profile, self_check
    from profilers.profiling.events import Event
    from profilers.profiling.sensitivity import int8_sensitivity
    from profilers.storage.tables import Tables, load_profile, load_tables
    from profilers.targets import Target, register, resolve


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'profilers' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
