"""Numbers that users give, checked where they enter."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from dsa_hw.errors import DsaError

__all__ = ["check_number", "check_positive", "check_seed", "check_share"]


def check_number(value: Any, name: str, error: type[DsaError] = DsaError) -> None:
    """Check that ``value`` is a finite number from 0.

    Raises:
        DsaError: It is not; of class ``error``.
    """
    if not _is_finite(value) or value < 0:
        raise error(f"`{name}` must be a number from 0; got {value!r}.")


def check_positive(value: Any, name: str, error: type[DsaError] = DsaError) -> None:
    """Check that ``value`` is a finite number above 0.

    Raises:
        DsaError: It is not; of class ``error``.
    """
    if not _is_finite(value) or value <= 0:
        raise error(f"`{name}` must be a number above 0; got {value!r}.")


def check_share(value: Any, name: str, error: type[DsaError] = DsaError, *, strict: bool = False) -> None:
    """Check that ``value`` is a number in [0, 1], or in (0, 1) if ``strict``.

    Raises:
        DsaError: It is not; of class ``error``.
    """
    if not _is_finite(value) or not 0 <= value <= 1 or (strict and value in (0, 1)):
        where = "strictly between 0 and 1" if strict else "in [0, 1]"
        raise error(f"`{name}` must lie {where}; got {value!r}.")


def check_seed(seed: Any) -> None:
    """Check that ``seed`` is a whole number from 0 of at most 63 bits, as torch and NumPy accept.

    Raises:
        DsaError: It is not.
    """
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**63:
        raise DsaError(f"`seed` must be a whole number from 0; got {seed!r}.")


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
