"""Comparisons of measurements."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsa_hw.errors import ProfileError
from profilers import compare_measurements
from profilers.measuring.bench import DENSE, Bench
from profilers.measuring.measurement import Measurement, Samples
from profilers.measuring.rules import MeasuringRules
from profilers.measuring.sittings import Scatter
from tests.fakes.machine import Machine, Simulated, bursts

KNOWN = Scatter(ratio=0.001**2, ratio_freedom=30, scale=0.05**2, scale_freedom=30)


def measured(*seconds: float, machine: Machine | None = None, **rules: Any) -> list[Measurement]:
    """Measure networks beside one of 2 ms, on a machine whose sittings are known to agree on ratios."""
    machine = machine or Machine()
    bench = Bench(Simulated(), rules=MeasuringRules(**rules), environment={"target": "t"}, clock=machine.clock)
    bench.scatter = KNOWN
    networks = {f"{1e3 * s:g} ms": machine.network(s) for s in seconds}
    found = bench.measure(networks, machine.network(2e-3))
    return [found[name] for name in networks]


def test_verdict_is_faster_slower_same_or_inconclusive() -> None:
    a, same, faster, slower = measured(1e-3, 1.0005e-3, 0.9e-3, 1.2e-3)
    assert compare_measurements(a, faster).verdict == "faster"
    assert compare_measurements(a, slower).verdict == "slower"
    assert compare_measurements(a, same, margin=0.03).verdict == "same"
    assert compare_measurements(a, same, margin=1e-4).verdict == "inconclusive"
    found = compare_measurements(a, slower)
    assert found.low < 1.2 < found.high
    assert found.ratio == pytest.approx(1.2, rel=0.01)
    assert not found.reason
    assert str(found).startswith("slower: ratio 1.20")


def test_time_of_the_dense_network_cancels_only_within_the_same_measurement() -> None:
    a, b = measured(1e-3, 0.9e-3)
    (other,) = measured(0.9e-3)
    together, apart = compare_measurements(a, b), compare_measurements(a, other)
    assert together.verdict == "faster"
    assert apart.verdict == "inconclusive", "the dense network's time differs by 5% between sittings"
    assert apart.high / apart.low > together.high / together.low


def test_busy_machine_does_not_decide_the_comparison() -> None:
    """Bursts double the time of some runs; the two networks differ by 4%."""
    verdicts = []
    for seed in range(5):
        machine = Machine(bursts(0.1, 0.3, 2.0), seed=seed)
        a, b = measured(1e-3, 0.96e-3, machine=machine)
        found = compare_measurements(a, b)
        assert found.low < 0.96 < found.high
        verdicts.append(found.verdict)
    assert verdicts.count("faster") >= 3


def test_untrusted_and_missing_measurements_are_inconclusive_with_a_reason() -> None:
    a, b = measured(1e-3, 0.5e-3)
    strict = replace(b, rules=MeasuringRules(require=1e-6))
    found = compare_measurements(a, strict)
    assert found.verdict == "inconclusive"
    assert "0.5 ms: the 95% interval is" in found.reason
    assert found.ratio == pytest.approx(0.5, rel=0.01)
    nothing = compare_measurements(a, replace(b, samples=Samples.empty()))
    assert nothing.verdict == "inconclusive"
    assert "not measured" in nothing.reason
    assert math.isnan(nothing.ratio)
    assert (nothing.low, nothing.high) == (0.0, math.inf)


def test_different_targets_are_named_and_different_statistics_refused() -> None:
    a, b = measured(1e-3, 0.5e-3)
    assert "targets differ (simulated/cpu fp32 x1 and u)" in compare_measurements(a, replace(b, target="u")).reason
    with pytest.raises(ProfileError, match="'quiet' and 'median'"):
        compare_measurements(a, replace(b, rules=MeasuringRules(statistic="median")))


def test_tails_are_compared() -> None:
    a, b = measured(1e-3, 0.4e-3, statistic="p95")
    found = compare_measurements(a, b)
    assert found.low < 0.4 < found.high
    assert found.ratio == pytest.approx(np.quantile(b.samples.values, 0.95) / np.quantile(a.samples.values, 0.95))


def test_dense_network_is_compared_with_others() -> None:
    machine = Machine()
    bench = Bench(Simulated(), environment={"target": "t"}, clock=machine.clock)
    found = bench.measure({"a": machine.network(1e-3)}, machine.network(2e-3))
    assert compare_measurements(found[DENSE], found["a"]).verdict == "faster"
    assert compare_measurements(found["a"], found[DENSE]).verdict == "slower"
