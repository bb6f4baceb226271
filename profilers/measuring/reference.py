"""The reference: how long the control workload takes on a target when nothing disturbs it.

References are kept per user and environment, so that a machine that is disturbed all the time is detected: its control
workload is slow compared with the reference of a better day. Interference only adds time, so a reference can only
decrease, unless the user says that the machine has changed (``--reset-reference``).
"""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path

from dsa_hw.errors import DsaError
from dsa_hw.utils.files import cache_folder, write_text
from dsa_hw.utils.text import one_line

__all__ = ["Reference", "ReferenceFile"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reference:
    """A control reading on the undisturbed machine.

    Attributes:
        seconds: Seconds of one control run; joules where energy is measured.
        day: The day on which it was measured.
    """

    seconds: float
    day: str


class ReferenceFile:
    """References by key (the digest of an environment) in one JSON file.

    Args:
        path: The file; ``references.json`` in the user's cache folder if None.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path) if path is not None else cache_folder() / "references.json"
        self._memory: dict[str, Reference] = {}

    def get(self, key: str) -> Reference | None:
        """Return the stored reference, or None."""
        return self._read().get(key)

    def lower(self, key: str, seconds: float) -> Reference:
        """Store ``seconds`` unless a lower reference is known; return the one that is valid now."""
        known = self._read()
        found = known.get(key)
        if found is None or seconds < found.seconds:
            found = Reference(seconds, time.strftime("%Y-%m-%d"))
            self._write({**known, key: found})
        return found

    def reset(self, key: str) -> None:
        """Delete a reference, because the machine has changed."""
        self._memory.pop(key, None)
        self._write({k: v for k, v in self._read().items() if k != key})

    def _read(self) -> dict[str, Reference]:
        try:
            entries = json.loads(self.path.read_text())
            found = {str(k): Reference(float(v["seconds"]), str(v["day"])) for k, v in entries.items()}
        except FileNotFoundError:
            return dict(self._memory)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("Cannot read %s (%s). The references in it are ignored.", self.path, one_line(error))
            return dict(self._memory)
        return {k: v for k, v in found.items() if math.isfinite(v.seconds) and v.seconds > 0}

    def _write(self, references: dict[str, Reference]) -> None:
        self._memory = references
        text = json.dumps({k: {"seconds": v.seconds, "day": v.day} for k, v in references.items()}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, text)
        except (OSError, DsaError) as error:
            _log.warning(
                "Cannot keep the reference of the control workload in %s (%s). It is valid for this process only. Set "
                "DSA_HW_CACHE to a folder that can be written.",
                self.path,
                one_line(error),
            )
