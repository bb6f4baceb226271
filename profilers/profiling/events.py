"""Progress of a profile, for listeners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Event", "Listener"]


@dataclass(frozen=True)
class Event:
    """Progress of a profile.

    Attributes:
        stage: What is done at the moment.
        what: The network that it is done with.
        done: Share of the profile that is done; None where it is not known.
        accepted: Share of the runs that were accepted; None before the first run.
    """

    stage: str
    what: str = ""
    done: float | None = None
    accepted: float | None = None


Listener = Callable[[Event], None]
"""A function that shows progress."""
