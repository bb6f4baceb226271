"""How much sittings differ: the same ratio, measured again by another process at another time.

Within one sitting a ratio can be known to a few tenths of a percent, and still be some percent different an hour later,
because other users of the machine take caches and memory bandwidth. Every sitting therefore measures one more pair:
the dense network and its anchor, a network of half the widths. The scatter of that ratio (and of the dense network's
time) over sittings is what intervals must contain besides their own error. It is kept for each environment and
network in the user's cache folder, and starts from a stated prior. Measurements within ten minutes are one sitting:
they agree with each other better than with those of another hour.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
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

# The most likely values for the first three sittings of benchmarks/results/repeatability.jsonl, see
# docs/benchmarks/profilers.md. Networks differ widely, so the prior counts for few sittings.
PRIOR_RATIO = 0.008
"""Standard deviation of a ratio between sittings that is assumed before the second sitting."""
PRIOR_SCALE = 0.03
"""Standard deviation of the dense network's time between sittings that is assumed before the second sitting."""
_RATIO_FREEDOM = 2.0  # how many further sittings the prior counts for
_SCALE_FREEDOM = 4.0
_FINEST = 0.001  # standard deviation of a sitting; a smaller one does not get more weight
_LAST = 30  # sittings that count: a machine may change
_SITTING = 600.0  # seconds from the first measurement of a sitting to the last


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
        ratio: Of a ratio to the dense network, as the anchor shows it.
        ratio_freedom: Its degrees of freedom.
        scale: Of the dense network's time.
        scale_freedom: Its degrees of freedom.
        sittings: Sittings that were seen.
    """

    ratio: float = PRIOR_RATIO**2
    ratio_freedom: float = _RATIO_FREEDOM
    scale: float = PRIOR_SCALE**2
    scale_freedom: float = _SCALE_FREEDOM
    sittings: int = 0

    @classmethod
    def of(cls, measured: Sequence[Sitting]) -> Scatter:
        """Return the scatter of sittings, together with the prior."""
        sittings = _apart(measured)
        ratio = _between([s.ratio for s in sittings], PRIOR_RATIO, _RATIO_FREEDOM)
        scale = _between([s.scale for s in sittings], PRIOR_SCALE, _SCALE_FREEDOM)
        return cls(*ratio, *scale, len(sittings))


@dataclass(frozen=True)
class Sitting:
    """What one sitting found of the anchor pair, without the scatter between sittings.

    Attributes:
        ratio: The anchor over the dense network.
        scale: The dense network's time.
        time: When it was measured, in seconds since 1970.
    """

    ratio: Estimate
    scale: Estimate
    time: float


def _apart(measured: Sequence[Sitting]) -> list[Sitting]:
    """Return one sitting for all that were measured within ten minutes, in order of time."""
    groups: list[list[Sitting]] = []
    for sitting in sorted(measured, key=lambda s: s.time):
        if groups and sitting.time - groups[-1][0].time < _SITTING:
            groups[-1].append(sitting)
        else:
            groups.append([sitting])
    return [Sitting(_mean([s.ratio for s in g]), _mean([s.scale for s in g]), g[0].time) for g in groups]


def _mean(found: Sequence[Estimate]) -> Estimate:
    """Return the mean of independent estimates, weighted by their precision."""
    weights = np.asarray([1 / max(e.variance, _FINEST**2) for e in found])
    logs = np.asarray([e.log for e in found])
    return Estimate(float((weights * logs).sum() / weights.sum()), float(1 / weights.sum()))


def _between(found: Sequence[Estimate], prior: float, counts: float) -> tuple[float, float]:
    """Return the variance between estimates beyond their own variances, with a prior, and its degrees of freedom.

    The estimates are weighted by their precision (DerSimonian and Laird, 1986): a disturbed sitting, which knows its
    own ratio badly, says little about how much sittings differ. The prior counts for ``counts`` further ones.
    """
    more = max(len(found) - 1, 0)
    seen = 0.0
    if more:
        logs = np.asarray([e.log for e in found])
        weights = 1 / np.maximum(np.asarray([e.variance for e in found]), _FINEST**2)
        mean = float((weights * logs).sum() / weights.sum())
        excess = float((weights * (logs - mean) ** 2).sum()) - more
        seen = max(excess / float(weights.sum() - (weights**2).sum() / weights.sum()), 0.0)
    freedom = counts + more
    return (counts * prior**2 + more * seen) / freedom, freedom


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
        found = [sitting for k, sitting in [*self._read(), *self._memory] if k == key]
        return Scatter.of(_apart(found)[-_LAST:])

    def add(self, key: str, sitting: Sitting) -> None:
        """Append a sitting; where that is impossible, it is known to this process only."""
        row = {
            "key": key,
            "time": sitting.time,
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
                when = float(row["time"])
                if math.isfinite(when) and all(math.isfinite(e.log) and 0 <= e.variance < math.inf for e in parts):
                    found.append((str(row["key"]), Sitting(parts[0], parts[1], when)))
        return found
