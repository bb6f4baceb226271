"""The random numbers of the caller."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import torch

from dsa_hw.utils.random_state import random_state_kept


def _draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_numbers_continue_as_if_nothing_had_been_drawn() -> None:
    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    expected = _draws()
    seed()
    with contextlib.suppress(ZeroDivisionError), random_state_kept():
        torch.manual_seed(5)
        _draws()
        raise ZeroDivisionError
    assert _draws() == expected
