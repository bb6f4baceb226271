"""The absolute reference: how long the control workload takes on this target when nothing disturbs it.

Kept per user and environment, so that a machine that is disturbed all day long is noticed: the control is then slow
against the reference of a better day. Interference only adds time, so a reference only ever falls, unless the user
says that the machine has changed for good (``--reset-reference``).
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Reference", "ReferenceFile"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reference:
    """``seconds`` of one control run, and the day it was measured."""

    seconds: float
    day: str


def _default_path() -> Path:
    if folder := os.environ.get("DSA_HW_CACHE"):
        return Path(folder) / "references.json"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsa_hw" / "references.json"


class ReferenceFile:
    """References by key (the digest of an environment) in one JSON file, replaced atomically."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path) if path is not None else _default_path()
        self._memory: dict[str, Reference] = {}

    def get(self, key: str) -> Reference | None:
        """The stored reference, if there is one."""
        return self._read().get(key)

    def lower(self, key: str, seconds: float) -> Reference:
        """Store ``seconds`` unless a lower reference is known; the one that holds now."""
        known = self._read()
        found = known.get(key)
        if found is None or seconds < found.seconds:
            found = Reference(seconds, time.strftime("%Y-%m-%d"))
            self._write({**known, key: found})
        return found

    def reset(self, key: str) -> None:
        """Forget a reference: the machine has changed for good."""
        self._memory.pop(key, None)
        self._write({k: v for k, v in self._read().items() if k != key})

    def _read(self) -> dict[str, Reference]:
        try:
            entries = json.loads(self.path.read_text())
            found = {str(k): Reference(float(v["seconds"]), str(v["day"])) for k, v in entries.items()}
        except FileNotFoundError:
            return dict(self._memory)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("%s cannot be read (%s); references start afresh", self.path, error)
            return dict(self._memory)
        return {k: v for k, v in found.items() if math.isfinite(v.seconds) and v.seconds > 0}

    def _write(self, references: dict[str, Reference]) -> None:
        self._memory = references
        text = json.dumps({k: {"seconds": v.seconds, "day": v.day} for k, v in references.items()}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                file.write(text)
            os.replace(file.name, self.path)
        except OSError as error:
            _log.warning(
                "the reference of the control workload cannot be kept in %s (%s): it holds for this process only; "
                "set DSA_HW_CACHE to a folder that can be written",
                self.path,
                error,
            )
