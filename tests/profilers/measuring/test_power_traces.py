"""The rules of energy measurement on recorded power of real boards (MLPerf Tiny v1.2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profilers.measuring.bench import DENSE
from profilers.measuring.energy_bench import EnergyBench, EnergyMeasurement, update_period
from profilers.targets import Loaded, Target
from tests.fakes.power_trace import Board, Trace

pytestmark = pytest.mark.needs_data

BOARDS = ("NUCLEO_H7A3ZI_Q_ic", "NUCLEO_H7A3ZI_Q_kws", "NUCLEO_U575ZI_Q_ic", "NUCLEO_U575ZI_Q_kws")


class Recorded(Target):
    """A target whose networks are given already loaded."""

    runtime = "recorded"

    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        raise NotImplementedError


@pytest.fixture(params=BOARDS)
def trace(request: pytest.FixtureRequest, shared_data: Callable[[str], Path]) -> Trace:
    return Trace.read(shared_data(f"power_traces/{request.param}"))


def measured(board: Board) -> EnergyMeasurement:
    found = EnergyBench(Recorded("cpu"), board.counter()).measure({}, board.network(), limit=1e5)[DENSE]
    assert isinstance(found, EnergyMeasurement)
    return found


def test_energy_is_that_of_the_benchmark_within_half_a_percent(trace: Trace) -> None:
    found = measured(Board(trace))
    assert found.joules == pytest.approx(np.median(trace.reported), rel=0.005)
    assert found.low <= np.median(trace.reported) <= found.high


def test_the_five_windows_agree_within_the_stated_interval(trace: Trace) -> None:
    """Each window alone, as if it were all that the board had done, against the interval of all of them."""
    whole = measured(Board(trace))
    for i, reported in enumerate(trace.reported):
        alone = measured(Board(trace, slice(i, i + 1)))
        assert alone.joules == pytest.approx(reported, rel=0.005)
        assert whole.low <= alone.joules <= whole.high


def test_idle_power_is_recognised(trace: Trace) -> None:
    found = measured(Board(trace))
    idle = float(np.mean(np.concatenate(trace.idle)))
    assert found.idle_watts == pytest.approx(idle, rel=0.02)
    assert found.watts > 1.3 * found.idle_watts, "or idle and load are not told apart"
    net = np.median(trace.reported) - idle * trace.seconds
    # An error of the idle power counts 2.4 times in what remains of the fourth board.
    assert found.net == pytest.approx(net, rel=0.04)


def test_update_period_of_the_recording_is_found(trace: Trace) -> None:
    assert update_period(Board(trace).counter()) == pytest.approx(1 / trace.rate, rel=0.05)
