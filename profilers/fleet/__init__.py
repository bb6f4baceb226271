"""Many boards at once, as workers of Dask distributed. See docs/guide/fleets.md; Dask is imported only when used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["profile_fleet"]

if TYPE_CHECKING:
    from profilers.fleet.profile import profile_fleet


def __getattr__(name: str) -> Any:
    if name != "profile_fleet":  # the scheduler imports this package, and needs nothing of it
        raise AttributeError(f"module 'profilers.fleet' has no attribute {name!r}")
    from profilers.fleet.profile import profile_fleet

    return profile_fleet
