"""The bench of a fleet, with boards that are called directly instead of through Dask."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dsa_hw.errors import MeasurementError
from dsa_hw.utils.files import cache_folder
from profilers import machine
from profilers.fleet import bench as bench_module
from profilers.fleet import on_worker, tasks
from profilers.fleet.bench import FleetBench, FleetTarget, _Batch, _next
from profilers.fleet.members import FleetMember, group_by_type
from profilers.measuring.bench import DENSE
from profilers.measuring.measurement import Measurement, Samples
from profilers.measuring.rules import MeasuringRules
from profilers.networks.chains import Layer, artefact_of, input_of
from profilers.networks.loaded import Loadable
from tests.fakes import fleet_board

WIDTH = 100
RULES = MeasuringRules(least_seconds=0.0)


class Done:
    """A future that has its result."""

    status = "finished"

    def __init__(self, found: Any) -> None:
        self.result = lambda: found

    def done(self) -> bool:
        return True


class Hanging:
    """A future that is never done."""

    status = "pending"
    cancelled = False

    def done(self) -> bool:
        return False

    def cancel(self) -> None:
        self.cancelled = True


class DirectFleet:
    """Boards that measure a batch in this process when it is submitted.

    Args:
        factors: By how much each board is slower than the formula, by name.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **factors: float) -> None:
        self.precision, self.threads, self.stop = "fp32", 1, threading.Event()
        self.factors, self.submitted = factors, list[tuple[str, tuple[Any, ...]]]()
        self._monkeypatch = monkeypatch
        self.answers: dict[str, Any] = {}  # by name of a board, what it answers; `...`: nothing
        self.banned: list[tuple[str, str]] = []
        about = on_worker.describe("boardformula/cpu", "fp32", 1)
        members = [FleetMember(f"tcp://{name}", "boardformula/cpu", name, about) for name in factors]
        (self.board_type,) = group_by_type(members)

    def update(self) -> None:
        pass

    def ban(self, member: FleetMember, reason: str) -> None:
        self.board_type.members.pop((member.address, member.resource))
        self.banned.append((member.name, reason))

    def submit(self, member: FleetMember, function: Any, *arguments: Any) -> Any:
        assert function is tasks.measure_batch
        self.submitted.append((member.name, arguments))
        self._monkeypatch.setenv("FLEET_FACTOR", str(self.factors[member.name]))
        if member.name in self.answers:
            answer = self.answers[member.name]
            return Hanging() if answer is ... else Done(answer)
        return Done(function(*arguments))

    def bench(self, **options: Any) -> FleetBench:
        return FleetBench(FleetTarget(self, self.board_type), **{"rules": RULES, **options})  # type: ignore[arg-type]

    @property
    def batches(self) -> list[list[str]]:
        """The names of the networks of each batch."""
        return [list(arguments[3]) for _, arguments in self.submitted]

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """The fewest and most blocks that were asked of each batch."""
        return [(arguments[5]["least_blocks"], arguments[5]["most_blocks"]) for _, arguments in self.submitted]


def network(bench: FleetBench, width: int) -> Loadable:
    chain = (Layer(width, width),)
    return Loadable(lambda: bench.target.load(artefact_of(chain, bench.target), (input_of(chain),)))


def networks(bench: FleetBench, *widths: int) -> dict[str, Loadable]:
    return {str(width): network(bench, width) for width in widths}


def seconds(width: int) -> float:
    """The formula of the boards."""
    return 1e-3 + 1e-7 * width**2


def test_boards_of_different_speed_measure_the_same_ratios(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = DirectFleet(monkeypatch, pi1=1.0, pi2=3.0)
    bench = fleet.bench()
    found = bench.measure(networks(bench, 10, 40, 70, 90), network(bench, WIDTH))
    assert {name for name, _ in fleet.submitted} == {"pi1", "pi2"}
    assert list(found) == [DENSE, "10", "40", "70", "90"]
    for width in (10, 40, 70, 90):
        assert found[str(width)].ratio.value == pytest.approx(seconds(width) / seconds(WIDTH), rel=0.003)
    assert seconds(WIDTH) < found[DENSE].seconds < 3 * seconds(WIDTH)
    assert "boardformula/cpu fp32 x1 differ in speed by more than 10%" in caplog.text
    assert re.search(r"takes 2(\.0\d*)? ms on pi1, 6(\.0\d*)? ms on pi2\.", caplog.text)
    caplog.clear()
    bench.measure(networks(bench, 20, 30), network(bench, WIDTH))
    assert "differ in speed" not in caplog.text, "the warning is given once"


def test_board_with_invalid_answers_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = DirectFleet(monkeypatch, good=1.0, liar=1.0)
    fleet.answers["liar"] = {"samples": {"10": {}}, "busiest": None}
    bench = fleet.bench()
    found = bench.measure(networks(bench, 10, 40), network(bench, WIDTH))
    assert found["10"].ratio.value == pytest.approx(seconds(10) / seconds(WIDTH), rel=0.003)
    assert "cannot measure (Invalid answer: runs of 2 networks are expected" in caplog.text
    fleet.answers["good"] = None
    with pytest.raises(MeasurementError, match=r"cannot measure\. Invalid answer"):
        bench.measure(networks(bench, 20), network(bench, WIDTH))


def test_board_that_hangs_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "_LATE", -1e6)
    fleet = DirectFleet(monkeypatch, good=1.0, hangs=1.0)
    fleet.answers["hangs"] = ...
    bench = fleet.bench()
    found = bench.measure(networks(bench, 10, 40), network(bench, WIDTH))
    assert found["40"].ratio.value == pytest.approx(seconds(40) / seconds(WIDTH), rel=0.003)
    assert fleet.banned == [("hangs", "it did not finish a batch in time")]
    monkeypatch.setattr(bench_module, "_PATIENCE", 0.05)
    fleet.answers["good"] = ...
    with pytest.raises(MeasurementError, match="No board of boardformula/cpu fp32 x1 is left"):
        bench.measure(networks(bench, 20), network(bench, WIDTH))


def test_boards_of_equal_speed_cause_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = DirectFleet(monkeypatch, pi1=1.0, pi2=1.05).bench()
    with caplog.at_level(logging.WARNING):
        found = bench.measure(networks(bench, 10, 40), network(bench, WIDTH))
    assert not caplog.text
    assert found["40"].seconds == pytest.approx(seconds(40), rel=0.06)


def test_every_batch_is_a_sitting_with_blocks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = DirectFleet(monkeypatch, pi1=1.0, pi2=1.0)
    bench = fleet.bench()
    told: list[Mapping[str, Samples]] = []
    wanted = networks(bench, 10, 20, 40, 70, 90)
    found = bench.measure(wanted, network(bench, WIDTH), sitting=7, on_round=told.append)
    assert [sorted(runs) for runs in told] == [sorted([*names, DENSE]) for names in fleet.batches]
    sittings = [np.unique(np.concatenate([s.sitting for s in runs.values()])).tolist() for runs in told]
    assert len({tuple(s) for s in sittings}) == len(told) == len(fleet.batches) > 2
    assert all(len(s) == 1 for s in sittings)
    blocks = [set(np.concatenate([s.block for s in runs.values()]).tolist()) for runs in told]
    assert sum(map(len, blocks)) == len(set().union(*blocks)), "no block number is used twice"
    joined = {name: Samples.joined([runs[name] for runs in told if name in runs]) for name in found}
    assert all(np.array_equal(found[name].samples.values, joined[name].values) for name in found)
    other = bench.measure(wanted, network(bench, WIDTH), sitting=8)
    assert not set(other[DENSE].samples.sitting.tolist()) & set(found[DENSE].samples.sitting.tolist())
    assert not set(other[DENSE].samples.block.tolist()) & set().union(*blocks)


def test_boards_store_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = DirectFleet(monkeypatch, pi1=1.0).bench(network=("fingerprint", []))
    found = bench.measure(networks(bench, 40), network(bench, WIDTH))
    assert not cache_folder().exists()
    bench.record(found["40"])
    assert [path.name for path in cache_folder().iterdir()] == ["sittings.jsonl"], "only the host keeps sittings"


def test_earlier_runs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = MeasuringRules(precision=1e-9, least_blocks=2, most_blocks=3, least_seconds=0.0)
    fleet = DirectFleet(monkeypatch, pi1=1.0)
    bench = fleet.bench(rules=rules)
    first = bench.measure(networks(bench, 10, 40), network(bench, WIDTH))
    assert {m.samples.blocks for m in (first["10"], first["40"])} == {3}
    fleet.submitted.clear()
    one = first["40"].samples
    earlier = {name: m.samples for name, m in first.items()} | {"40": one_block(one)}
    second = bench.measure(networks(bench, 10, 40), network(bench, WIDTH), earlier=earlier, sitting=1)
    assert fleet.batches == [["40"]], "the other is finished"
    assert fleet.blocks == [(1, 2)]
    assert second["10"].runs == first["10"].runs
    assert second["40"].samples.blocks == 3
    assert np.array_equal(second["40"].samples.values[: len(one_block(one))], one_block(one).values)


def one_block(samples: Samples) -> Samples:
    here = samples.block == samples.block[0]
    return Samples.of(samples.values[here], samples.before[here], samples.after[here], int(samples.block[0]))


def test_question_is_asked_after_2_4_and_8_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = DirectFleet(monkeypatch, pi1=1.0)
    bench = fleet.bench()
    looks: list[tuple[int, int]] = []

    def enough(found: Mapping[str, Measurement]) -> bool:
        looks.append((found["40"].samples.blocks, found["40"].look))
        return len(looks) == 3

    found = bench.measure(networks(bench, 40), network(bench, WIDTH), enough=enough)
    assert looks == [(2, 1), (4, 2), (8, 3)]
    assert found["40"].samples.blocks == 8
    fleet.submitted.clear()
    bench.measure(networks(bench, 40), network(bench, WIDTH), enough=lambda _: False, limit=0.0)
    assert len(fleet.submitted) == 1, "no time is left for another look"


def test_every_network_is_measured_once_when_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = MeasuringRules(precision=1e-9, least_seconds=0.0)
    fleet = DirectFleet(monkeypatch, pi1=1.0)
    bench = fleet.bench(rules=rules)
    widths = list(range(5, 100, 5))
    found = bench.measure(networks(bench, *widths), network(bench, WIDTH), limit=0.0)
    assert sorted(name for names in fleet.batches for name in names) == sorted(map(str, widths))
    assert all(m.runs for m in found.values())


def test_dense_network_alone_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = DirectFleet(monkeypatch, pi1=1.0)
    bench = fleet.bench()
    found = bench.measure({}, network(bench, WIDTH))
    assert list(found) == [DENSE]
    assert found[DENSE].seconds == pytest.approx(seconds(WIDTH), rel=0.003)
    assert found[DENSE].finished
    assert fleet.batches == [[]]


def test_computed_times_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_board.Formula, "estimated", "estimated by a formula")
    fleet = DirectFleet(monkeypatch, pi1=1.0, pi2=1.0)
    bench = fleet.bench()
    found = bench.measure(networks(bench, 10, 20, 40, 70), network(bench, WIDTH))
    assert len(fleet.submitted) > 1
    assert {m.runs for m in found.values()} == {1}
    assert found["40"].seconds == pytest.approx(seconds(40), rel=0.01)


def test_network_of_a_fleet_does_not_run_on_this_computer(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = DirectFleet(monkeypatch, pi1=1.0).bench()
    loaded = network(bench, 10).load()
    with pytest.raises(MeasurementError, match="runs on its boards"):
        loaded.run(1)
    assert bench.target.remote_device is not None
    with pytest.raises(MeasurementError, match="measures batches"):
        bench.target.remote_device.sequence([(loaded, 1)])


def test_imprecise_measurement_names_what_disturbed_a_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "busiest_process", lambda: "stress (pid 7) uses 99% of a core")
    rules = MeasuringRules(require=1e-9, least_seconds=0.0)
    bench = DirectFleet(monkeypatch, pi1=1.0).bench(rules=rules)
    found = bench.measure(networks(bench, 40), network(bench, WIDTH))
    error = bench.refuse({"40": found["40"]}, 60.0)
    assert "on pi1 stress (pid 7) uses 99% of a core" in str(error)


def test_no_board_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = DirectFleet(monkeypatch, pi1=1.0)
    bench = fleet.bench(clock=iter(range(0, 10**6, 10)).__next__)
    fleet.board_type.members.clear()
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(MeasurementError, match=r"No board of boardformula/cpu fp32 x1 is left.*within 60 s"):
        bench.measure(networks(bench, 40), network(bench, WIDTH))


def test_batch_prefers_boards_that_have_not_tried_it() -> None:
    a, b = (FleetMember(f"tcp://{name}", "boardformula/cpu", name) for name in "ab")
    tried, new = _Batch(["one"], seen={a.address}), _Batch(["two"])
    assert _next(deque([tried, new]), a, 2) is new
    assert _next(deque([tried, new]), b, 2) is tried
    assert _next(deque([tried]), a, 2) is None
    assert _next(deque([tried]), a, 1) is tried, "no other board is left"
    gone: Any = SimpleNamespace(status="cancelled", cancel=lambda: None)
    for _ in range(2):
        FleetBench._lost(gone, new, b)
    with pytest.raises(MeasurementError, match="3 boards were lost while they measured the same 1 networks"):
        FleetBench._lost(gone, new, b)
    broken: Any = SimpleNamespace(status="error", cancel=lambda: None, exception=lambda: ValueError("odd"))
    with pytest.raises(MeasurementError, match="failed: ValueError: odd"):
        FleetBench._lost(broken, tried, b)
