"""The random numbers of the process that calls us."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

__all__ = ["random_state_kept"]


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the global random numbers of Python, NumPy and torch when the body ends."""
    plain, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(plain)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
