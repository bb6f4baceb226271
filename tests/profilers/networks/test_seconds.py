"""Times that a device reports."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dsa_hw.errors import MeasurementError
from profilers.networks.seconds import LONGEST, SHORTEST, checked_seconds


def test_plausible_times_are_returned() -> None:
    assert checked_seconds([SHORTEST, 1, LONGEST], 3, "it").tolist() == [SHORTEST, 1.0, LONGEST]
    assert checked_seconds(np.asarray([0.5]), 1, "it").dtype == np.float64


@pytest.mark.parametrize(
    "bad", [0, -1.0, 1e-300, 2 * LONGEST, 1e300, math.inf, math.nan, "1", None, True, [1.0], 10**400]
)
def test_absurd_times_are_refused(bad: Any) -> None:
    with pytest.raises(MeasurementError, match="The board sent an invalid answer"):
        checked_seconds([1.0, bad], 2, "The board")


@pytest.mark.parametrize("values", [[], [1.0], [1.0] * 3, np.ones((2, 1))])
def test_wrong_number_of_times_is_refused(values: Any) -> None:
    with pytest.raises(MeasurementError, match="for 2 runs"):
        checked_seconds(values, 2, "The board")
