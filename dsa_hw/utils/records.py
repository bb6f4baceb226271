"""Records of what a long call does, for ``log=``: plain dictionaries, one for each step and stage.

A record has ``stage`` (text) and ``step`` (a whole number that counts within the stage); all else are numbers, texts
and booleans. `dsa_hw.integrations.loggers` writes records to TensorBoard, MLflow and Weights & Biases.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from dsa_hw.errors import DsaError
from dsa_hw.utils.text import one_line

__all__ = ["Log", "numbers_in", "recorder"]

_log = logging.getLogger(__name__)

Log = Callable[[dict[str, Any]], None]
"""Called with a record."""


def recorder(log: Log | None) -> Log:
    """Return what calls ``log`` until it fails; then a warning says so, and the work goes on without it.

    Raises:
        DsaError: ``log`` cannot be called.
    """
    if log is None:
        return lambda record: None
    if isinstance(log, _Recorder):
        return log
    if not callable(log):
        raise DsaError(f"`log` must be a function that takes a dict; got {log!r}.")
    return _Recorder(log)


def numbers_in(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record, without its step.

    >>> numbers_in({"stage": "allocating", "step": 3, "loss": 0.5, "verdict": "MET"})
    {'loss': 0.5}
    """
    found = {k: v for k, v in record.items() if k != "step" and isinstance(v, (int, float))}
    return {key: float(value) for key, value in found.items() if math.isfinite(value)}


class _Recorder:
    def __init__(self, log: Log) -> None:
        self.log: Log | None = log

    def __call__(self, record: dict[str, Any]) -> None:
        if self.log is None:
            return
        try:
            self.log(dict(record))
        except Exception as error:  # whatever the function of the user raises: hours of work are worth more
            self.log = None
            _log.warning("`log` failed (%s: %s). Nothing more is logged.", type(error).__name__, one_line(error))
