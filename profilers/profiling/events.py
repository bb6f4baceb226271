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
        interval: Typical half-width of the 95% intervals so far, as a share; None where it is not known.
    """

    stage: str
    what: str = ""
    done: float | None = None
    interval: float | None = None


Listener = Callable[[Event], None]
"""A function that shows progress."""
