"""Times that another device or process reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from dsa_hw.errors import MeasurementError
from dsa_hw.utils.arrays import Floats

__all__ = ["LONGEST", "SHORTEST", "checked_seconds"]

SHORTEST: Final = 1e-9
"""Seconds of a run at least: one cycle at 1 GHz, in which no network runs."""

LONGEST: Final = 3600.0
"""Seconds of a run at most; no request to a device has more time."""


def checked_seconds(values: Sequence[object] | Floats, count: int, source: str) -> Floats:
    """Return reported times as an array of shape (count,).

    Args:
        values: What was reported.
        count: How many times are expected.
        source: Who reported them, for messages, e.g. "ssh://pi@board".

    Raises:
        MeasurementError: The number of times is wrong, or one of them is not a number from `SHORTEST` to `LONGEST`.
    """
    if not isinstance(values, np.ndarray) and not all(type(value) in (int, float) for value in values):
        raise MeasurementError(f"{source} sent an invalid answer: times must be numbers.")
    try:
        found = np.asarray(values, np.float64)
    except OverflowError as error:
        raise MeasurementError(f"{source} sent an invalid answer: a time is too large.") from error
    if found.shape != (count,):
        raise MeasurementError(f"{source} sent an invalid answer: {found.size} times for {count} runs.")
    wrong = ~((found >= SHORTEST) & (found <= LONGEST))
    if wrong.any():
        raise MeasurementError(
            f"{source} sent an invalid answer: a run must take from {SHORTEST:g} s to {LONGEST:g} s; got "
            f"{found[wrong][0]:g} s. Check the clock of the device."
        )
    return found
