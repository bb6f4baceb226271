"""Values of command-line options: counts, shares and durations, as types for argparse."""

from __future__ import annotations

import argparse
import re

__all__ = ["duration", "positive_integer", "share"]


def positive_integer(text: str) -> int:
    """Parse a whole number from 1.

    >>> positive_integer("40")
    40
    """
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return int(text)


def share(text: str) -> float:
    """Parse a percentage of more than 0 and at most 100.

    >>> share("5%")
    0.05
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    if not match or not 0 < float(match[1]) <= 100:
        raise argparse.ArgumentTypeError(f"must be a percentage such as 2% or 5%, got {text!r}")
    return float(match[1]) / 100


def duration(text: str) -> float:
    """Parse a time and return seconds.

    >>> duration("10min")
    600.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)?", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"must be a time such as 90, 90s or 10min, got {text!r}")
    return float(match[1]) * {None: 1, "s": 1, "min": 60, "h": 3600}[match[2]]
