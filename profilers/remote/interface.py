"""What a device must offer on which whole rounds are run at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dsa_hw.utils.arrays import Floats
from profilers.networks.loaded import Loaded

__all__ = ["RemoteDevice"]


class RemoteDevice(Protocol):
    """A device with its own clock, on which whole rounds are run at once.

    A round trip takes longer than many networks run. With one between two runs, the device would lower its clock, and
    the two would no longer meet the same conditions.
    """

    def sequence(self, steps: Sequence[tuple[Loaded, int]]) -> list[Floats]:
        """Run (network, runs) back to back, in this order.

        Returns:
            The seconds of the runs of each step.
        """
        ...

    def busiest_process(self) -> str | None:
        """Describe the busiest process of the device; None if there is none."""
        ...

    def state(self) -> dict[str, float]:
        """Return how busy the device is now."""
        ...
