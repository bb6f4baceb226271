"""Progress of a profile, for listeners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Event", "Listener"]


@dataclass(frozen=True)
class Event:
    """Progress: the stage, what is being measured, how much of the stage is done, the share of runs accepted."""

    stage: str
    what: str = ""
    done: float | None = None
    accepted: float | None = None


Listener = Callable[[Event], None]
