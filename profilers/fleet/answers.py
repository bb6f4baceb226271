"""Check what the boards of a fleet answer.

Dask turns a message into Python objects; these functions check that they are the plain data that was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from dsa_hw.errors import MeasurementError
from dsa_hw.utils.text import one_line
from profilers.fleet.on_worker import unpack_samples
from profilers.measuring.measurement import Samples
from profilers.networks.seconds import LONGEST, SHORTEST, checked_seconds

__all__ = ["checked_batch", "checked_description"]

_TEXTS = 100  # entries of an environment
_TEXT = 300  # characters of an entry
_GRID = 2**16
_RUNS = 10**7  # runs of a network in one batch


def checked_description(found: object) -> dict[str, Any]:
    """Return what a board says about itself: the fields of `profilers.fleet.on_worker.describe`.

    Raises:
        MeasurementError: The board reports an error, or its answer is invalid.
    """
    about = _mapping(found, "a description")
    _raise_reported(about)
    environment = _mapping(about.get("environment"), "`environment`")
    if len(environment) > _TEXTS:
        raise _invalid(f"`environment` has {len(environment)} entries")
    grid = about.get("grid")
    if grid is not None and (type(grid) is not int or not 1 <= grid <= _GRID):
        raise _invalid(f"`grid` must be None or a number from 1 to {_GRID}; got {one_line(repr(grid), 60)}")
    for name in ("slow_to_load", "watched"):
        if type(about.get(name)) is not bool:
            raise _invalid(f"`{name}` must be True or False")
    estimated = about.get("estimated")
    return {
        "environment": {_text(k, "a key"): _text(v, "`environment`") for k, v in environment.items()},
        "title": _text(about.get("title"), "`title`"),
        "estimated": None if estimated is None else _text(estimated, "`estimated`"),
        "slow_to_load": about["slow_to_load"],
        "grid": grid,
        "watched": about["watched"],
    }


def checked_batch(found: object, names: Collection[str], sitting: int) -> tuple[dict[str, Samples], str | None]:
    """Return the runs of every network of a batch, and the busiest process of the board.

    Args:
        found: What the board returned.
        names: The networks of the batch, with the dense one.
        sitting: The number of the sitting that the batch is.

    Raises:
        MeasurementError: The board reports an error, or its answer is invalid.
    """
    answer = _mapping(found, "the result of a batch")
    _raise_reported(answer)
    packed = _mapping(answer.get("samples"), "`samples`")
    if set(packed) != set(names):
        raise _invalid(f"runs of {len(names)} networks are expected; got {one_line(sorted(map(str, packed)), 100)}")
    busiest = answer.get("busiest")
    samples = {name: _samples(_mapping(packed[name], "runs"), sitting) for name in names}
    return samples, None if busiest is None else _text(busiest, "`busiest`")


def _samples(lists: Mapping[Any, Any], sitting: int) -> Samples:
    values, extra = lists.get("values"), _mapping(lists.get("extra"), "`extra`")
    if not isinstance(values, list) or not 0 < len(values) <= _RUNS:
        raise _invalid("`values` must be a list of times")
    n = len(values)
    checked_seconds(values, n, "The board")
    for name in ("before", "after"):
        # Infinity: the dense network was not run there.
        if not _numbers(lists.get(name), n, lambda x: x == math.inf or SHORTEST <= x <= LONGEST):
            raise _invalid(f"`{name}` must be {n} times")
    if not _integers(lists.get("block"), n, 0, _RUNS) or not _integers(lists.get("sitting"), n, sitting, sitting):
        raise _invalid("runs of another batch")
    if len(extra) > _TEXTS or not all(isinstance(name, str) for name in extra):
        raise _invalid("`extra` must have names")
    if not all(_numbers(more, n, lambda x: True) for more in extra.values()):
        raise _invalid(f"`extra` must have {n} numbers for each name")
    return unpack_samples(lists)


def _numbers(values: object, n: int, accepted: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) == n
        and all(type(x) in (int, float) and accepted(x) for x in values)
        and np.asarray(values).dtype != object
    )


def _integers(values: object, n: int, low: int, high: int) -> bool:
    return isinstance(values, list) and len(values) == n and all(type(x) is int and low <= x <= high for x in values)


def _mapping(found: object, what: str) -> dict[Any, Any]:
    if type(found) is not dict:
        raise _invalid(f"{what} must be a dictionary; got {type(found).__name__}")
    return found


def _text(found: object, what: str) -> str:
    if not isinstance(found, str):
        raise _invalid(f"{what} must be text; got {type(found).__name__}")
    return one_line(found, _TEXT)


def _raise_reported(answer: Mapping[Any, Any]) -> None:
    if "error" in answer:
        raise MeasurementError(_text(answer["error"], "`error`"))


def _invalid(what: str) -> MeasurementError:
    return MeasurementError(f"Invalid answer: {what}.")
