"""How much sittings differ: the same ratio, measured again by another process at another time.

Within one sitting a ratio can be known to a few tenths of a percent, and still be a percent different an hour later,
because other users of the machine take caches and memory bandwidth. Every sitting therefore measures one more pair:
the dense network and its anchor, a network of half the widths. The scatter of that ratio (and of the dense network's
time) over sittings is what intervals must contain besides their own error. It is kept for each environment and
network in the user's cache folder, one line per sitting, and starts from a stated prior.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsa_hw.errors import FileError
from dsa_hw.utils.arrays import Ints
from dsa_hw.utils.documents import check_seal, parse_json, read_bytes, sealed
from dsa_hw.utils.files import append_line, cache_folder
from dsa_hw.utils.text import one_line
from profilers.measuring.statistics import Estimate

__all__ = ["PRIOR_RATIO", "PRIOR_SCALE", "Scatter", "Sitting", "SittingFile", "anchor_widths", "sitting_key"]

_log = logging.getLogger(__name__)

PRIOR_RATIO = 0.008
"""Standard deviation of a ratio between sittings that is assumed before the second sitting."""
PRIOR_SCALE = 0.015
"""Standard deviation of the dense network's time between sittings that is assumed before the second sitting."""
_PRIOR_FREEDOM = 4.0  # how many further sittings the prior counts for
_PRIOR_ANCHOR = math.log(0.4)  # the anchor's ratio that is assumed before the first sitting
_FINEST = 0.001  # standard deviation of a sitting; a smaller one does not get more weight
_LAST = 30  # sittings that count: a machine may change


def anchor_widths(sizes: Sequence[int] | Ints) -> tuple[int, ...]:
    """Return the widths of the anchor: half of each group, in multiples of 8 channels where the group has them.

    >>> anchor_widths([64, 24, 6])
    (32, 16, 3)
    """
    return tuple(8 * math.ceil(int(c) / 16) if int(c) >= 16 else max(int(c) // 2, 1) for c in sizes)


def sitting_key(environment: str, fingerprint: str, inputs: Sequence[Any], statistic: str) -> str:
    """Return the key under which sittings are compared.

    Args:
        environment: Digest of the environment.
        fingerprint: Of the dense network's channel groups.
        inputs: Shape and type of each input, as plain data.
        statistic: What is measured of the runs.
    """
    content = json.dumps([environment, fingerprint, inputs, statistic])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Scatter:
    """Variances of logarithms between sittings, with the degrees of freedom by which they are known.

    Attributes:
        ratio: Of the anchor's ratio to the dense network.
        ratio_freedom: Its degrees of freedom.
        scale: Of the dense network's time.
        scale_freedom: Its degrees of freedom.
        anchor: Logarithm of the anchor's ratio.
        sittings: Sittings that were seen.
    """

    ratio: float = PRIOR_RATIO**2
    ratio_freedom: float = _PRIOR_FREEDOM
    scale: float = PRIOR_SCALE**2
    scale_freedom: float = _PRIOR_FREEDOM
    anchor: float = _PRIOR_ANCHOR
    sittings: int = 0

    @classmethod
    def of(cls, sittings: Sequence[Sitting]) -> Scatter:
        """Return the scatter of sittings, together with the prior."""
        ratio = _between([s.ratio for s in sittings], PRIOR_RATIO)
        scale = _between([s.scale for s in sittings], PRIOR_SCALE)
        anchor = float(np.median([s.ratio.log for s in sittings])) if sittings else _PRIOR_ANCHOR
        return cls(*ratio, *scale, min(anchor, -0.1), len(sittings))

    def at(self, log: float) -> float:
        """Return the variance between sittings of a ratio with this logarithm.

        A network that is nearly dense responds to the machine as the dense network does, a narrow one differently: in
        our measurements (docs/guide/how-we-measure.md) the standard deviation grows with the logarithm of the ratio. It
        is taken as that of the anchor in this proportion, but at least 0.7 times and at most twice as large.
        """
        return self.ratio * float(np.clip(log / self.anchor, 0.7, 2.0)) ** 2


@dataclass(frozen=True)
class Sitting:
    """What one sitting found of the anchor pair, without the scatter between sittings.

    Attributes:
        ratio: The anchor over the dense network.
        scale: The dense network's time.
    """

    ratio: Estimate
    scale: Estimate


def _between(found: Sequence[Estimate], prior: float) -> tuple[float, float]:
    """Return the variance between estimates beyond their own variances, with a prior, and its degrees of freedom.

    The estimates are weighted by their precision (DerSimonian and Laird, 1986): a disturbed sitting, which knows its
    own ratio badly, says little about how much sittings differ.
    """
    more = max(len(found) - 1, 0)
    seen = 0.0
    if more:
        logs = np.asarray([e.log for e in found])
        weights = 1 / np.maximum(np.asarray([e.variance for e in found]), _FINEST**2)
        mean = float((weights * logs).sum() / weights.sum())
        excess = float((weights * (logs - mean) ** 2).sum()) - more
        seen = max(excess / float(weights.sum() - (weights**2).sum() / weights.sum()), 0.0)
    freedom = _PRIOR_FREEDOM + more
    return (_PRIOR_FREEDOM * prior**2 + more * seen) / freedom, freedom


class SittingFile:
    """The sittings of this user, one JSON object per line; lines are only ever appended.

    Args:
        path: The file; ``sittings.jsonl`` in the user's cache folder if None.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path) if path is not None else cache_folder() / "sittings.jsonl"
        self._memory: list[tuple[str, Sitting]] = []

    def scatter(self, key: str) -> Scatter:
        """Return the scatter of the last sittings of an environment and network."""
        return Scatter.of([sitting for k, sitting in [*self._read(), *self._memory] if k == key][-_LAST:])

    def add(self, key: str, sitting: Sitting) -> None:
        """Append a sitting; where that is impossible, it is known to this process only."""
        row = {
            "key": key,
            "time": round(time.time(), 3),
            **{name: [e.log, e.variance] for name, e in (("ratio", sitting.ratio), ("scale", sitting.scale))},
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_line(self.path, json.dumps(sealed(row)))
        except (OSError, FileError) as error:
            self._memory.append((key, sitting))
            _log.warning(
                "Cannot keep how much sittings differ in %s (%s). It is known to this process only. Set DSA_HW_CACHE "
                "to a folder that can be written.",
                self.path,
                one_line(error),
            )

    def _read(self) -> list[tuple[str, Sitting]]:
        try:
            lines = read_bytes(self.path).splitlines()
        except FileError:
            return []
        found = []
        for line in dict.fromkeys(lines):
            # A line that is damaged or repeated is left out: the others are worth no less.
            with contextlib.suppress(FileError, ValueError, KeyError, TypeError, AttributeError):
                row = parse_json(line, "a sitting", max_bytes=10_000)
                check_seal(row, "a sitting")
                parts = [Estimate(*(float(v) for v in row[name])) for name in ("ratio", "scale")]
                if all(math.isfinite(e.log) and 0 <= e.variance < math.inf for e in parts):
                    found.append((str(row["key"]), Sitting(*parts)))
        return found
