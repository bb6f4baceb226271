"""Trust: on simulated machines, where the truth is known to the digit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsa_hw.errors import MeasurementError, ProfileError
from profilers import compare_measurements
from profilers.measuring import statistics
from profilers.measuring.bench import Bench, Scan, inflation, sensitivity, slope
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


def test_quiet_machine_gives_the_truth(tmp_path: Path) -> None:
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
def test_bursts_longer_than_a_run_are_seen_and_left_out(tmp_path: Path, period: float) -> None:
    quiet_reference(tmp_path)
    machine = Machine(square(period))
    # Forty runs take longer than a quiet half period, so that the disturbed one is met too.
    found = bench_on(machine, tmp_path, least_runs=40).measure({"net": machine.network(0.02)}, limit=60)["net"]
    assert found.trusted, found.doubt
    assert found.seconds == pytest.approx(0.02, rel=0.02)
    assert found.rejected > 0.2
    assert found.samples.values.mean() > 1.05 * 0.02, "no test of the method if the plain mean is right too"


@pytest.mark.parametrize("period", [0.004, 0.01])
def test_bursts_shorter_than_a_run_cannot_be_escaped_and_are_refused(tmp_path: Path, period: float) -> None:
    quiet_reference(tmp_path)
    machine = Machine(square(period))
    bench = bench_on(machine, tmp_path)
    found = bench.measure({"net": machine.network(0.04)}, limit=20)["net"]
    assert found.seconds > 1.1 * 0.04 or np.isnan(found.seconds)
    assert not found.trusted
    assert found.hidden > 0.1 or found.runs < found.rules.least_runs
    error = bench.explain({"net": found}, 20)
    assert isinstance(error, MeasurementError)
    assert error.exit_code == 4
    assert "--time-limit" in str(error)


def test_a_machine_disturbed_all_the_time_is_refused_by_the_stored_reference(tmp_path: Path) -> None:
    quiet_reference(tmp_path)
    machine = Machine(lambda t: 1.3)
    found = bench_on(machine, tmp_path).measure({"net": machine.network(0.005)}, limit=5)["net"]
    assert found.runs == 0
    assert not found.trusted
    assert "1.30 times its reference" in str(found.doubt)


def test_without_a_stored_reference_the_first_session_sets_it_and_a_better_one_replaces_it(tmp_path: Path) -> None:
    slow = Machine(lambda t: 1.3)
    first = bench_on(slow, tmp_path)
    assert first.reference.seconds == pytest.approx(1.3 * CONTROL, rel=0.01)
    fast = bench_on(Machine(), tmp_path)
    assert fast.reference.seconds == pytest.approx(CONTROL, rel=0.01)
    again = bench_on(slow, tmp_path)
    assert again.reference.seconds == pytest.approx(CONTROL, rel=0.01)
    again.references.reset(again.key)
    assert bench_on(slow, tmp_path).reference.seconds == pytest.approx(1.3 * CONTROL, rel=0.01)


def test_waiting_for_a_processor_rejects_a_run_even_if_the_controls_are_fine(tmp_path: Path) -> None:
    quiet_reference(tmp_path)
    # A neighbour takes the core for 3 ms in every 60 ms: it mostly falls inside the 25 ms run, not on the controls.
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
def test_right_within_two_per_cent_or_refused(
    tmp_path_factory: pytest.TempPathFactory, period: float, duty: float, factor: float, seconds: float, seed: int
) -> None:
    path = tmp_path_factory.mktemp("reference")
    quiet_reference(path)
    machine = Machine(square(period, duty, factor), seed=seed)
    found = bench_on(machine, path, seed=seed).measure({"net": machine.network(seconds)}, limit=15)["net"]
    assert not found.trusted or abs(found.seconds / seconds - 1) <= 0.02, repr(found)


def test_rounds_are_random_and_every_network_is_visited(tmp_path: Path) -> None:
    machine = Machine()
    networks = {name: machine.network(1e-3) for name in "abcdef"}
    order: list[str] = []
    bench = bench_on(machine, tmp_path, precision=0.0)
    bench.measure(networks, limit=1.0, on_visit=lambda name, samples, so_far: order.append(name))
    rounds = [order[i : i + 6] for i in range(0, len(order) - 6, 6)]
    assert len(rounds) > 3
    assert all(sorted(r) == list("abcdef") for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1


def test_limit_is_kept_and_an_unfinished_measurement_says_so(tmp_path: Path) -> None:
    machine = Machine(jitter=0.2)
    found = bench_on(machine, tmp_path).measure({"net": machine.network(0.2)}, limit=1.0)["net"]
    assert machine.now < 5
    assert not found.finished
    assert not found.trusted
    assert "WARNING: do not use this number" in repr(found)


def test_networks_that_a_lower_reference_makes_doubtful_are_measured_again(tmp_path: Path) -> None:
    # For 4 s everything takes 6 % longer. Network a is finished by then (6 rounds), the others are not (12 rounds).
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


def test_a_disturbance_that_ends_is_outlasted(tmp_path: Path) -> None:
    quiet_reference(tmp_path)
    bursts = square(0.02, 0.2, 2.0)  # shorter than a visit of 40 ms: every accepted run holds some
    machine = Machine(lambda t: bursts(t) if t < 6 else 1.0)
    bench = bench_on(machine, tmp_path)
    found = bench.measure({"net": machine.network(0.04)}, limit=100)["net"]
    assert found.trusted, found.doubt
    assert found.seconds == pytest.approx(0.04, rel=0.02)
    assert 6 < machine.now < 100


def test_a_disturbance_that_does_not_end_uses_all_the_time(tmp_path: Path) -> None:
    quiet_reference(tmp_path)
    machine = Machine(square(0.02, 0.2, 2.0))
    bench = bench_on(machine, tmp_path)
    begin = machine.now
    found = bench.measure({"net": machine.network(0.04)}, limit=20)["net"]
    assert not found.trusted
    assert machine.now - begin >= 20


def test_disturbance_of_an_earlier_measurement_is_not_part_of_this_one(tmp_path: Path) -> None:
    """And the quiet of an earlier one does not excuse this one."""
    quiet_reference(tmp_path)
    machine = Machine(lambda t: square(0.02, 0.2, 2.0)(t) if t >= 40 else 1.0)
    bench = bench_on(machine, tmp_path)
    network = machine.network(0.04)
    assert bench.measure_once({"net": network}, limit=30)["net"].hidden < 0.01
    machine.now = 40.0
    found = bench.measure_once({"net": network}, limit=30)["net"]
    assert found.hidden > 0.02 or found.runs < found.rules.least_runs


def test_earlier_runs_count(tmp_path: Path) -> None:
    machine = Machine()
    bench = bench_on(machine, tmp_path)
    network = machine.network(3e-3)
    first = bench.measure({"net": network}, limit=30)["net"]
    before = machine.now
    second = bench.measure({"net": network}, limit=30, earlier={"net": first.samples})["net"]
    assert second.runs == first.runs
    assert machine.now - before < 0.05


# Statistics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("q", "n"), [(0.25, 40), (0.5, 40), (0.9, 60)])
def test_intervals_cover(q: float, n: int) -> None:
    rng = np.random.default_rng(1)
    truth = float(np.quantile(rng.gamma(2.0, 1.0, 2_000_000), q))
    hits = 0
    for _ in range(300):
        values = rng.gamma(2.0, 1.0, n)
        low, high = statistics.interval(values, np.arange(n), q)
        hits += low <= truth <= high
    assert hits / 300 >= 0.93


def test_intervals_of_runs_that_come_in_alike_visits_are_wider() -> None:
    rng = np.random.default_rng(2)
    moments = np.repeat(rng.normal(1, 0.05, 20), 5)
    visits = np.repeat(np.arange(20), 5)
    low, high = statistics.interval(moments, visits, 0.5)
    alone_low, alone_high = statistics.interval(moments, np.arange(100), 0.5)
    assert high - low > 1.3 * (alone_high - alone_low)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60), st.sampled_from([0.25, 0.5, 0.95]))
@settings(max_examples=40, deadline=None)
def test_interval_contains_the_statistic(values: list[float], q: float) -> None:
    array = np.asarray(values)
    low, high = statistics.interval(array, np.arange(len(array)), q)
    ordered = np.sort(array)
    assert low <= ordered[min(int(np.ceil(q * len(array))), len(array) - 1)]
    assert low <= high


def test_few_runs_know_nothing_about_the_upper_end() -> None:
    assert statistics.interval(np.asarray([1.0, 2.0]), np.arange(2), 0.9)[1] == np.inf
    assert statistics.interval(np.zeros(0), np.zeros(0, np.int64), 0.5) == (0.0, np.inf)


def test_unknown_statistic_is_refused() -> None:
    with pytest.raises(ProfileError, match="quiet, median"):
        statistics.order_of("mean")


def made(seconds: np.ndarray, what: str = "net", target: str = "t") -> Measurement:
    n = len(seconds)
    one = np.full(n, CONTROL)
    return Measurement(what, target, Samples(seconds, np.arange(n), one, one, np.zeros(n)), CONTROL)


def test_compare_says_faster_slower_same_or_cannot_tell() -> None:
    rng = np.random.default_rng(0)
    base = 1e-2 * (1 + 0.004 * rng.random(60))
    a = made(base)
    assert compare_measurements(a, made(base * 1.05)).verdict == "slower"
    assert compare_measurements(a, made(base * 0.95)).verdict == "faster"
    assert compare_measurements(a, made(base[::-1] * 1.0005)).verdict == "same"
    vague = made(1e-2 * (1 + 0.4 * rng.random(14)))
    verdict = compare_measurements(a, vague)
    assert verdict.verdict == "cannot tell"
    assert verdict.reason
    assert compare_measurements(a, made(base[:3])).verdict == "cannot tell"
    assert compare_measurements(a, made(np.zeros(0))).verdict == "cannot tell"
    assert "different targets" in compare_measurements(a, made(base, target="u")).reason
    assert "times as long" in str(compare_measurements(a, made(base)))


def test_repr_is_the_report() -> None:
    rng = np.random.default_rng(0)
    text = repr(made(1e-2 * (1 + 0.004 * rng.random(60)), "resnet18", "onnxruntime/cpu"))
    for part in ("resnet18 on onnxruntime/cpu", "ms [", "median", "p90", "p95", "p99", "60 runs", "rejected"):
        assert part in text
    assert "WARNING" not in text
    assert "WARNING" in repr(made(np.asarray([0.01, 0.02])))


def test_inflation_of_hand_made_scans() -> None:
    rules, block = MeasuringRules(tolerance=0.05), 8
    n = 1000
    quiet = np.full(n, CONTROL)

    def scan(seconds: np.ndarray) -> Scan:
        return Scan(np.concatenate([[0.0], np.cumsum(seconds)[:-1]]), seconds, np.zeros(n))

    assert inflation([scan(quiet)], CONTROL, rules, 0.02, block) == pytest.approx(0)
    every_second = np.where(np.arange(n) % 2, 2 * CONTROL, CONTROL)
    assert inflation([scan(every_second)], CONTROL, rules, 0.02, block) == np.inf, "no reading is ever quiet"
    # Bursts of 10 ms in every 30 ms: quiet readings fit in between, but a visit of 60 ms holds two bursts.
    short_bursts = np.where(np.arange(n) % 50 < 10, 2 * CONTROL, CONTROL)
    assert inflation([scan(short_bursts)], CONTROL, rules, 0.06, block) == pytest.approx(0.2, abs=0.05)
    long_bursts = np.where(np.arange(n) % 400 < 200, 2 * CONTROL, CONTROL)
    assert inflation([scan(long_bursts)], CONTROL, rules, 0.02, block) == pytest.approx(0)
    assert inflation([scan(2 * quiet), scan(quiet)], CONTROL, rules, 0.02, block) == pytest.approx(0)
    assert inflation([scan(2 * quiet)], CONTROL, rules, 0.02, block) == np.inf
    assert inflation([scan(every_second)], CONTROL, rules, 100.0, block) == pytest.approx(0.5, abs=0.05)


def test_sensitivity_is_the_slope_of_seconds_over_control() -> None:
    rng = np.random.default_rng(0)

    def visits(slope: float, n: int = 60) -> Samples:
        control = CONTROL * (1 + 0.05 * rng.random(n))
        seconds = 0.01 * (control / CONTROL) ** slope * (1 + 0.001 * rng.normal(size=n))
        return Samples(seconds, np.arange(n), control, control, np.zeros(n))

    assert sensitivity([visits(0.3), visits(0.3)]) == pytest.approx(0.3, abs=0.05)
    assert sensitivity([visits(1.0)]) == pytest.approx(1.0, abs=0.05)
    assert sensitivity([visits(5.0)]) == 1.5
    assert sensitivity([visits(0.3, 5)]) == 1.0, "too few visits to tell"
    assert sensitivity([]) == 1.0
    assert slope([visits(0.3, 5)]) is None
    assert slope([visits(-0.5)]) is None, "out of step with the control"
    assert sensitivity([visits(-0.5)]) == 1.0
    missed = []
    for truth in np.linspace(0.2, 1.2, 40):
        found = slope([visits(truth)])
        assert found is not None
        missed.append(abs(found[0] - truth) > 2 * found[1])
    assert np.mean(missed) < 0.2, "two standard errors hold the truth nearly always"


def test_damaged_reference_file_is_said_and_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "references.json"
    path.write_text('{"a": {"seconds"')
    references = ReferenceFile(path)
    assert references.get("a") is None
    assert "cannot be read" in caplog.text
    references.lower("a", 0.5)
    assert ReferenceFile(path).get("a") == references.get("a")
    found = references.get("a")
    assert found is not None
    assert found.seconds == 0.5


def test_reference_that_cannot_be_kept_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    references = ReferenceFile(tmp_path / "file" / "references.json")
    references.lower("a", 0.5)
    assert "DSA_HW_CACHE" in caplog.text
    assert references.lower("a", 0.7).seconds == 0.5
