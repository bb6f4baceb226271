"""Recorded power of real boards, replayed as a device with an energy counter.

The traces are submissions to MLPerf Tiny v1.2: energy in microjoules at 1 kHz, the moments at which five windows of
inferences began and ended, and the energy that the benchmark's own software reported for each window.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from profilers.measuring.counters import Counter
from profilers.networks.loaded import Loadable
from profilers.targets import Loaded

Floats = np.ndarray[Any, np.dtype[np.float64]]

_WARM_UP = 500  # samples at the end of an idle period in which the board already runs one inference


@dataclass(frozen=True)
class Trace:
    """A recording: watts of the idle periods and of the windows, and what the benchmark reported of the windows."""

    idle: list[Floats]
    windows: list[Floats]
    rate: float
    inferences: int
    reported: Floats  # joules of one inference in each window

    @property
    def seconds(self) -> float:
        """Return the time of one inference."""
        return float(np.mean([len(w) for w in self.windows])) / self.rate / self.inferences

    @classmethod
    def read(cls, folder: Path) -> Trace:
        content = (folder / "trace1-energy.bin").read_bytes()
        rate = float(np.frombuffer(content[1:5], "<f4")[0])
        watts = np.frombuffer(content[5:], "<f4").astype(np.float64) * 1e-6 * rate
        stamps = [round(rate * t) for t in json.loads((folder / "trace1-timestamps.json").read_text())]
        report = (folder / "results.txt").read_text()
        joules = [1e-6 * float(v) for v in re.findall(r"Energy/Inf\. +: +([0-9.]+) uJ", report)]
        counts = {int(n) for n in re.findall(r"# Inferences +: +([0-9]+)", report)}
        assert len(joules) == 5
        assert len(counts) == 1
        assert len(stamps) == 11
        periods = [watts[a:b] for a, b in itertools.pairwise(stamps)]
        idle = [p[:-_WARM_UP] for p in periods[0::2]]
        return cls(idle, periods[1::2], rate, counts.pop(), np.asarray(joules))


class Board:
    """Replays a trace: running a network plays the samples of its windows, waiting those of the idle periods.

    The counter shows the samples that have passed completely, so it moves once per sample. Where the samples end, they
    start again.
    """

    def __init__(self, trace: Trace, windows: slice = slice(None)) -> None:
        self.now, self.joules = 0.0, 0.0
        self._trace = trace
        self._watts = {"idle": np.concatenate(trace.idle), "busy": np.concatenate(trace.windows[windows])}
        self._played = dict.fromkeys(self._watts, 0.0)  # seconds

    def play(self, load: str, seconds: float) -> None:
        """Let time pass; energy arrives whole samples at a time."""
        watts, rate = self._watts[load], self._trace.rate
        begin = int(self._played[load] * rate + 1e-6)
        self._played[load] += seconds
        end = int(self._played[load] * rate + 1e-6)
        self.joules += float(watts[np.arange(begin, end) % len(watts)].sum()) / rate
        self.now += seconds

    def counter(self) -> Counter:
        return Counter("recorded", lambda: self.joules, clock=lambda: self.now, sleep=lambda s: self.play("idle", s))

    def network(self) -> Loadable:
        def clock(n: int) -> Floats:
            self.play("busy", n * self._trace.seconds)
            return np.full(n, self._trace.seconds)

        return Loadable(lambda: Loaded(lambda: None, clock=clock))
