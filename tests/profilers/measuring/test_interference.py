"""Estimates of interference that the control workload does not detect."""

from __future__ import annotations

import numpy as np
import pytest

from profilers.measuring.interference import Scan, inflation, sensitivity, slope
from profilers.measuring.measurement import Samples
from profilers.measuring.rules import MeasuringRules

CONTROL = 5e-4


def test_inflation_of_constructed_scans() -> None:
    rules, block = MeasuringRules(tolerance=0.05), 8
    n = 1000
    quiet = np.full(n, CONTROL)

    def scan(seconds: np.ndarray) -> Scan:
        return Scan(np.concatenate([[0.0], np.cumsum(seconds)[:-1]]), seconds, np.zeros(n))

    assert inflation([scan(quiet)], CONTROL, rules, 0.02, block) == pytest.approx(0)
    every_second = np.where(np.arange(n) % 2, 2 * CONTROL, CONTROL)
    assert inflation([scan(every_second)], CONTROL, rules, 0.02, block) == np.inf, "every reading is disturbed"
    # Bursts of 10 ms in every 30 ms: quiet readings fit in between, but a visit of 60 ms holds two bursts.
    short_bursts = np.where(np.arange(n) % 50 < 10, 2 * CONTROL, CONTROL)
    assert inflation([scan(short_bursts)], CONTROL, rules, 0.06, block) == pytest.approx(0.2, abs=0.05)
    long_bursts = np.where(np.arange(n) % 400 < 200, 2 * CONTROL, CONTROL)
    assert inflation([scan(long_bursts)], CONTROL, rules, 0.02, block) == pytest.approx(0)
    assert inflation([scan(2 * quiet), scan(quiet)], CONTROL, rules, 0.02, block) == pytest.approx(0)
    assert inflation([scan(2 * quiet)], CONTROL, rules, 0.02, block) == np.inf
    assert inflation([scan(every_second)], CONTROL, rules, 100.0, block) == pytest.approx(0.5, abs=0.05)


def test_sensitivity_is_the_slope_of_time_over_control() -> None:
    rng = np.random.default_rng(0)

    def visits(slope: float, n: int = 60) -> Samples:
        control = CONTROL * (1 + 0.05 * rng.random(n))
        seconds = 0.01 * (control / CONTROL) ** slope * (1 + 0.001 * rng.normal(size=n))
        return Samples(seconds, np.arange(n), control, control, np.zeros(n))

    assert sensitivity([visits(0.3), visits(0.3)]) == pytest.approx(0.3, abs=0.05)
    assert sensitivity([visits(1.0)]) == pytest.approx(1.0, abs=0.05)
    assert sensitivity([visits(5.0)]) == 1.5
    assert sensitivity([visits(0.3, 5)]) == 1.0, "too few visits"
    assert sensitivity([]) == 1.0
    assert slope([visits(0.3, 5)]) is None
    assert slope([visits(-0.5)]) is None, "out of step with the control"
    assert sensitivity([visits(-0.5)]) == 1.0
    missed = []
    for truth in np.linspace(0.2, 1.2, 40):
        found = slope([visits(truth)])
        assert found is not None
        missed.append(abs(found[0] - truth) > 2 * found[1])
    assert np.mean(missed) < 0.2, "two standard errors contain the true slope nearly always"
