"""Measure on many boards at once, as workers of Dask distributed.

See docs/guide/fleets.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["profile_fleet"]

if TYPE_CHECKING:
    from profilers.fleet.profile import profile_fleet


def __getattr__(name: str) -> Any:
    if name != "profile_fleet":  # imported on demand: the Dask scheduler imports this package too
        raise AttributeError(f"module 'profilers.fleet' has no attribute {name!r}")
    from profilers.fleet.profile import profile_fleet

    return profile_fleet
