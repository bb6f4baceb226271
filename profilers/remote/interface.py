"""What a device must offer on which whole visits are made at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dsa_hw.utils.arrays import Floats
from profilers.networks.loaded import Loaded

__all__ = ["RemoteDevice"]


class RemoteDevice(Protocol):
    """A device with its own clock, on which whole visits are made at once.

    A round trip takes longer than many networks run. Between the control and the network the device would lose its
    caches and lower its clock. Waits for a processor, too, can only be read on the device.
    """

    def sequence(self, steps: Sequence[tuple[Loaded, int]]) -> list[tuple[Floats, float]]:
        """Run (network, runs) back to back.

        Returns:
            For each step, the seconds of its runs and its wait for a processor in seconds (NaN where unknown).
        """
        ...

    def scan(self, control: Loaded, seconds: float, least: int) -> Floats:
        """Run the control back to back.

        Args:
            control: The control workload.
            seconds: How long to run it.
            least: The least number of runs.

        Returns:
            Shape (n, 3): start, processor wait until then, and length of each run, in seconds.
        """
        ...

    def busiest_process(self) -> str | None:
        """Describe the busiest process of the device; None if there is none."""
        ...

    def state(self) -> dict[str, float]:
        """Return how busy the device is now."""
        ...
