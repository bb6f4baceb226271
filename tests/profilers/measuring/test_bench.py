"""Measurements on simulated machines whose true times are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsa_hw.errors import MeasurementError
from profilers.measuring.bench import Bench
from profilers.measuring.measurement import Measurement, Samples
from profilers.measuring.reference import ReferenceFile
from profilers.measuring.rules import MeasuringRules
from tests.fakes.machine import Machine, Simulated

CONTROL = 5e-4


def bench_on(machine: Machine, path: Path, seed: int = 0, **rules: float) -> Bench:
    return Bench(
        Simulated(),
        rules=MeasuringRules(**rules),  # type: ignore[arg-type]
        references=ReferenceFile(path / "references.json"),
        control=machine.network(CONTROL),
        environment={"target": "simulated"},
        seed=seed,
        clock=machine.clock,
        waited=machine.waited,
    )


def quiet_reference(path: Path) -> None:
    bench_on(Machine(), path).calibrate()


def square(period: float, duty: float = 0.5, factor: float = 1.5) -> Callable[[float], float]:
    return lambda t: factor if (t % period) < duty * period else 1.0


def test_quiet_machine_gives_the_true_time(tmp_path: Path) -> None:
    machine = Machine()
    networks = {"a": machine.network(2e-3), "b": machine.network(0.03)}
    found = bench_on(machine, tmp_path).measure(networks, limit=60)
    for name, truth in (("a", 2e-3), ("b", 0.03)):
        assert found[name].trusted
        assert found[name].finished
        assert found[name].seconds == pytest.approx(truth, rel=0.01)
        assert found[name].low <= found[name].seconds <= found[name].high
        assert found[name].warning is None


@pytest.mark.parametrize("period", [1.0, 0.2, 0.1])
def test_bursts_longer_than_a_run_are_rejected(tmp_path: Path, period: float) -> None:
    quiet_reference(tmp_path)
    machine = Machine(square(period))
    # Forty runs take longer than a quiet half period, so that the disturbed one is met too.
    found = bench_on(machine, tmp_path, least_runs=40).measure({"net": machine.network(0.02)}, limit=60)["net"]
    assert found.trusted, found.doubt
    assert found.seconds == pytest.approx(0.02, rel=0.02)
    assert found.rejected > 0.2
    assert found.samples.values.mean() > 1.05 * 0.02, "the plain mean must be wrong, or the test shows nothing"


@pytest.mark.parametrize("period", [0.004, 0.01])
def test_bursts_within_every_control_reading_reject_all_runs(tmp_path: Path, period: float) -> None:
    quiet_reference(tmp_path)
    machine = Machine(square(period))  # readings take 4 ms and more
    bench = bench_on(machine, tmp_path)
    found = bench.measure({"net": machine.network(0.04)}, limit=20)["net"]
    assert found.samples.values.mean() > 1.1 * 0.04, "the runs are disturbed, or the test shows nothing"
    assert found.runs == 0
    assert not found.trusted
    error = bench.explain({"net": found}, 20)
    assert isinstance(error, MeasurementError)
    assert error.exit_code == 4
    assert "--time-limit" in str(error)


def test_bursts_between_control_readings_are_refused_as_hidden_inflation(tmp_path: Path) -> None:
    quiet_reference(tmp_path)
    machine = Machine(square(0.02, duty=0.2, factor=2.0))  # 20 ms contain 16 + 4 / 2 = 18 ms of work
    found = bench_on(machine, tmp_path).measure_once({"net": machine.network(0.04)}, limit=20)["net"]
    assert found.flaw is None, "runs are accepted"
    assert found.seconds == pytest.approx(0.04 * 20 / 18, rel=0.03)
    assert found.hidden == pytest.approx(20 / 18 - 1, abs=0.05)
    assert "too short for the control workload to detect" in str(found.doubt)


def test_permanent_interference_is_refused_by_the_stored_reference(tmp_path: Path) -> None:
    quiet_reference(tmp_path)
    machine = Machine(lambda t: 1.3)
    found = bench_on(machine, tmp_path).measure({"net": machine.network(0.005)}, limit=5)["net"]
    assert found.runs == 0
    assert not found.trusted
    assert "1.30 times its reference" in str(found.doubt)


def test_first_session_sets_the_reference_and_a_faster_one_lowers_it(tmp_path: Path) -> None:
    slow = Machine(lambda t: 1.3)
    first = bench_on(slow, tmp_path)
    assert first.reference.seconds == pytest.approx(1.3 * CONTROL, rel=0.01)
    fast = bench_on(Machine(), tmp_path)
    assert fast.reference.seconds == pytest.approx(CONTROL, rel=0.01)
    again = bench_on(slow, tmp_path)
    assert again.reference.seconds == pytest.approx(CONTROL, rel=0.01)
    again.references.reset(again.key)
    assert bench_on(slow, tmp_path).reference.seconds == pytest.approx(1.3 * CONTROL, rel=0.01)


def test_run_that_waited_for_a_processor_is_rejected_despite_quiet_controls(tmp_path: Path) -> None:
    quiet_reference(tmp_path)
    # Another process takes the core for 3 ms in every 60 ms, mostly during the 24 ms run and not during the controls.
    machine = Machine(steals=lambda t: (t % 0.06) < 0.003)
    found = bench_on(machine, tmp_path).measure({"net": machine.network(0.024)}, limit=60)["net"]
    assert found.trusted, found.doubt
    assert found.seconds == pytest.approx(0.024, rel=0.01)
    held = found.samples.wait > found.rules.waiting
    assert held.any()
    assert found.samples.values[held].min() > 1.05 * 0.024
    assert not found.samples.accepted(found.reference, found.rules)[held].any()


@settings(max_examples=40, deadline=None)
@given(
    period=st.floats(0.05, 2.0),
    duty=st.floats(0.05, 0.5),
    factor=st.floats(1.1, 2.0),
    seconds=st.floats(1e-3, 0.02),
    seed=st.integers(0, 99),
)
@example(period=0.05078125, duty=0.5, factor=1.125, seconds=0.0078125, seed=0)  # bursts in step with the visits
def test_measurement_is_within_two_percent_or_refused(
    tmp_path_factory: pytest.TempPathFactory, period: float, duty: float, factor: float, seconds: float, seed: int
) -> None:
    path = tmp_path_factory.mktemp("reference")
    quiet_reference(path)
    machine = Machine(square(period, duty, factor), seed=seed)
    found = bench_on(machine, path, seed=seed).measure({"net": machine.network(seconds)}, limit=15)["net"]
    assert not found.trusted or abs(found.seconds / seconds - 1) <= 0.02, repr(found)


def test_rounds_are_random_and_visit_every_network(tmp_path: Path) -> None:
    machine = Machine()
    networks = {name: machine.network(1e-3) for name in "abcdef"}
    order: list[str] = []
    bench = bench_on(machine, tmp_path, precision=0.0)
    bench.measure(networks, limit=1.0, on_visit=lambda name, samples, so_far: order.append(name))
    rounds = [order[i : i + 6] for i in range(0, len(order) - 6, 6)]
    assert len(rounds) > 3
    assert all(sorted(r) == list("abcdef") for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1


def test_time_limit_ends_a_measurement_with_a_warning(tmp_path: Path) -> None:
    machine = Machine(jitter=0.2)
    found = bench_on(machine, tmp_path).measure({"net": machine.network(0.2)}, limit=1.0)["net"]
    assert machine.now < 5
    assert not found.finished
    assert not found.trusted
    assert "WARNING: do not use this value" in repr(found)


def test_lower_reference_resumes_finished_networks(tmp_path: Path) -> None:
    # For 4 s everything takes 6% longer. Network a is finished by then (6 rounds), the others are not (12 rounds).
    machine = Machine(lambda t: 1.06 if t < 4 else 1.0)
    bench = bench_on(machine, tmp_path)
    networks = {"a": machine.network(2e-3), **{f"b{i}": machine.network(0.03) for i in range(12)}}
    finished: list[float] = []

    def note(name: str, _: Samples, so_far: Measurement) -> None:
        if name == "a":
            finished.append(machine.now)

    found = bench.measure_once(networks, limit=120, on_visit=note)
    assert max(np.diff(finished)) > 1, "a was finished, and was taken up again"
    assert bench.reference.seconds < 1.03 * CONTROL
    for name, one in found.items():
        assert one.trusted, one.doubt
        assert one.seconds == pytest.approx(2e-3 if name == "a" else 0.03, rel=0.02)
    assert machine.now < 30, "it stops once all are finished"


def test_interference_that_ends_is_waited_out(tmp_path: Path) -> None:
    quiet_reference(tmp_path)
    bursts = square(0.02, 0.2, 2.0)  # shorter than a visit of 40 ms: every accepted run holds some
    machine = Machine(lambda t: bursts(t) if t < 6 else 1.0)
    bench = bench_on(machine, tmp_path)
    found = bench.measure({"net": machine.network(0.04)}, limit=100)["net"]
    assert found.trusted, found.doubt
    assert found.seconds == pytest.approx(0.04, rel=0.02)
    assert 6 < machine.now < 100


def test_interference_that_does_not_end_uses_the_time_limit(tmp_path: Path) -> None:
    quiet_reference(tmp_path)
    machine = Machine(square(0.02, 0.2, 2.0))
    bench = bench_on(machine, tmp_path)
    begin = machine.now
    found = bench.measure({"net": machine.network(0.04)}, limit=20)["net"]
    assert not found.trusted
    assert machine.now - begin >= 20


def test_hidden_inflation_is_that_of_the_same_measurement(tmp_path: Path) -> None:
    """A quiet measurement before a disturbed one does not lower the inflation of the second."""
    quiet_reference(tmp_path)
    machine = Machine(lambda t: square(0.02, 0.2, 2.0)(t) if t >= 40 else 1.0)
    bench = bench_on(machine, tmp_path)
    network = machine.network(0.04)
    assert bench.measure_once({"net": network}, limit=30)["net"].hidden < 0.01
    machine.now = 40.0
    found = bench.measure_once({"net": network}, limit=30)["net"]
    assert found.hidden > 0.02 or found.runs < found.rules.least_runs


def test_earlier_runs_are_counted(tmp_path: Path) -> None:
    machine = Machine()
    bench = bench_on(machine, tmp_path)
    network = machine.network(3e-3)
    first = bench.measure({"net": network}, limit=30)["net"]
    before = machine.now
    second = bench.measure({"net": network}, limit=30, earlier={"net": first.samples})["net"]
    assert second.runs == first.runs
    assert machine.now - before < 0.05
