"""Command lines: a parser with one-line errors, and counts, shares, durations and other numbers as types for argparse.

Only the digits 0 to 9 count: Python also reads those of other scripts, which may be an accident of copying.
"""

from __future__ import annotations

import argparse
import math
import re
from typing import NoReturn

from dsa_hw.errors import DsaError
from dsa_hw.utils.text import one_line

__all__ = [
    "OneLineParser",
    "amount",
    "confidence",
    "duration",
    "positive_amount",
    "positive_integer",
    "share",
    "whole_number",
]

_LARGEST = 2**63 - 1  # of seeds and counts, which NumPy, torch and SQLite keep in 64 bits


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports a wrong argument as every other error is reported, on one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with the code of invalid input."""
        text = one_line(message[:1].upper() + message[1:], 1000).rstrip(".")
        self.exit(DsaError.exit_code, f"{self.prog}: {text}. See {self.prog} --help.\n")


def positive_integer(text: str) -> int:
    """Parse a whole number from 1.

    >>> positive_integer("40")
    40
    """
    number = whole_number(text) if re.fullmatch(r"[0-9]{1,19}", text) else 0
    if not number:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {_shown(text)}")
    return number


def whole_number(text: str) -> int:
    """Parse a whole number from 0 of at most 63 bits.

    >>> whole_number("0")
    0
    """
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) > _LARGEST:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0, got {_shown(text)}")
    return int(text)


def amount(text: str) -> float:
    """Parse a finite number from 0, such as a number of epochs.

    >>> amount("0.5")
    0.5
    """
    if not re.fullmatch(r"[0-9]*\.?[0-9]+([eE][-+]?[0-9]{1,3})?|[0-9]+\.", text) or not math.isfinite(float(text)):
        raise argparse.ArgumentTypeError(f"must be a number from 0, got {_shown(text)}")
    return float(text)


def positive_amount(text: str) -> float:
    """Parse a finite number above 0, such as a learning rate.

    >>> positive_amount("1e-3")
    0.001
    """
    try:
        number = amount(text)
    except argparse.ArgumentTypeError:
        number = 0.0
    if not number:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {_shown(text)}")
    return number


def confidence(text: str) -> float:
    """Parse a probability strictly between 0 and 1.

    >>> confidence("0.95")
    0.95
    """
    try:
        number = amount(text)
    except argparse.ArgumentTypeError:
        number = 0.0
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"must be a number between 0 and 1, such as 0.95, got {_shown(text)}")
    return number


def share(text: str) -> float:
    """Parse a percentage of more than 0 and at most 100.

    >>> share("5%")
    0.05
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*%", text)
    if not match or not 0 < float(match[1]) <= 100:
        raise argparse.ArgumentTypeError(f"must be a percentage such as 2% or 5%, got {_shown(text)}")
    return float(match[1]) / 100


def duration(text: str) -> float:
    """Parse a time and return seconds.

    >>> duration("10min")
    600.0
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(s|min|h)?", text)
    if not match or not 0 < float(match[1]) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a time such as 90, 90s or 10min, got {_shown(text)}")
    return float(match[1]) * {None: 1, "s": 1, "min": 60, "h": 3600}[match[2]]


def _shown(text: str) -> str:
    return repr(one_line(text, 60))
