"""Measuring on a device that is elsewhere: what such a device can do, the agent that runs there, and the way to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from profilers.networks.loaded import Loaded

__all__ = ["RemoteDevice"]

Floats = NDArray[np.float64]


class RemoteDevice(Protocol):
    """A device with its own clock, far enough away that a whole visit is asked for at once.

    A round trip takes longer than many networks do: in it the device would cool its caches and lower its clock between
    the control and the network, and the scheduler whose account counts is the device's.
    """

    def sequence(self, steps: Sequence[tuple[Loaded, int]]) -> list[tuple[Floats, float]]:
        """Do (network, runs) back to back: per step the seconds of its runs, and its wait for a processor in seconds
        (NaN where the device does not say)."""
        ...

    def scan(self, control: Loaded, seconds: float, least: int) -> Floats:
        """The control back to back for ``seconds``, ``least`` runs or more; shape (n, 3): start, processor wait until
        then, and length of each run, in seconds."""
        ...

    def busiest_process(self) -> str | None:
        """The process there that disturbs most right now, in words."""
        ...

    def state(self) -> dict[str, float]:
        """How busy the device is at this moment."""
        ...
