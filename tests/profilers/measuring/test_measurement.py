"""Measurements of simulated sittings: runs vary, every loaded copy is a little different, and so is every sitting."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_hw.utils.arrays import Floats
from profilers.measuring.measurement import Measurement, Samples, pooled
from profilers.measuring.rules import MeasuringRules
from profilers.measuring.sittings import Scatter, Sitting
from profilers.measuring.statistics import Estimate

DENSE = 1e-2
ANCHOR = math.log(0.4)
VISIT = 0.01  # mean of the exponential variation of a run
LOAD = 0.005  # standard deviation of a loaded copy
ALONE = Scatter(ratio=0.0, scale=0.0)


class Machine:
    """A machine whose sittings change the ratio of the anchor by ``ratio`` and all times by ``scale``."""

    def __init__(self, seed: int, ratio: float = 0.0, scale: float = 0.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.ratio, self.scale = ratio, scale

    def sitting(self, *logs: float, number: int = 0, blocks: int = 3, rounds: int = 5) -> list[Measurement]:
        """Measure networks with the given logarithms of true ratios, in one sitting."""
        rng, count = self.rng, len(logs)
        tilt, speed = self.ratio * rng.normal(), math.exp(self.scale * rng.normal())
        runs: list[list[Samples]] = [[] for _ in logs]
        dense = []
        for block in range(blocks):
            pivot = DENSE * speed * math.exp(LOAD * rng.normal()) * self._vary((rounds, count + 1))
            for i, log in enumerate(logs):
                # A sitting shifts wide and narrow networks by about as much, see docs/benchmarks/profilers.md.
                time = DENSE * speed * math.exp(log + tilt + LOAD * rng.normal())
                runs[i].append(Samples.of(time * self._vary((rounds,)), pivot[:, i], pivot[:, i + 1], block, number))
            edge = np.full((rounds, 1), np.inf)
            before, after = np.hstack([edge, pivot[:, :-1]]), np.hstack([pivot[:, 1:], edge])
            before[1:, 0] = pivot[:-1, -1]  # the last run of the round before
            dense.append(Samples.of(pivot.ravel(), before.ravel(), after.ravel(), block, number))
        whole, each = Samples.joined(dense), [Samples.joined(parts) for parts in runs]
        variance = pooled(each, whole)
        return [Measurement("net", "t", samples, whole, block_variance=variance) for samples in each]

    def recorded(self, sittings: int) -> list[Sitting]:
        """Return what a number of sittings found of the anchor."""
        found = (replace(self.sitting(ANCHOR)[0], scatter=ALONE) for _ in range(sittings))
        return [Sitting(anchor.within, anchor.scale, 3600.0 * hour) for hour, anchor in enumerate(found)]

    def scatters(self, sittings: int, count: int) -> list[Scatter]:
        """Return the scatters that earlier sittings showed to ``count`` users, each drawn from 200 sittings."""
        pool = self.recorded(200)
        drawn = (self.rng.choice(200, sittings, replace=False) for _ in range(count))
        return [Scatter.of([pool[i] for i in each]) for each in drawn]

    def _vary(self, shape: tuple[int, ...]) -> Floats:
        return 1 + VISIT * self.rng.exponential(size=shape)


def covered(found: Estimate, log: float) -> bool:
    low, high = found.interval()
    return low <= math.exp(log) <= high


@pytest.mark.parametrize("scatter", [0.0, 0.01])
def test_interval_of_a_ratio_covers_the_truth_after_several_sittings(scatter: float) -> None:
    machine, logs = Machine(0, scatter), (ANCHOR, 1.5 * ANCHOR)
    # A machine without scatter needs many sittings to show it: the prior counts for several.
    hits = [
        [covered(replace(m, scatter=known).ratio, log) for m, log in zip(machine.sitting(*logs), logs, strict=True)]
        for known in machine.scatters(12 if scatter else 30, 400)
    ]
    assert (np.mean(hits, axis=0) >= 0.9).all()
    assert np.mean(hits) <= 0.995


def test_first_interval_covers_a_scatter_as_large_as_the_prior() -> None:
    machine, hits, alone = Machine(0, 0.008), [], []
    for _ in range(400):
        (found,) = machine.sitting(ANCHOR)
        hits.append(covered(found.ratio, ANCHOR))
        alone.append(covered(found.within, ANCHOR))
    assert np.mean(hits) >= 0.92
    assert np.mean(alone) < 0.9, "without the scatter between sittings, the interval would be too narrow"


def test_interval_of_a_time_covers_sittings_of_different_speed() -> None:
    truth = math.log(DENSE) + ANCHOR + math.log(1 + VISIT * -math.log(0.75))  # the lower quartile of the dense runs
    machine = Machine(0, 0.01, 0.03)
    hits = [
        covered(replace(machine.sitting(ANCHOR)[0], scatter=known).absolute, truth)
        for known in machine.scatters(8, 400)
    ]
    assert 0.9 <= np.mean(hits) <= 0.99


def test_interval_shrinks_with_the_recorded_sittings_of_a_dedicated_machine() -> None:
    machine = Machine(0)
    (found,) = machine.sitting(ANCHOR, blocks=20)
    widths = [
        np.median([replace(found, scatter=known).ratio.halfwidth() for known in machine.scatters(sittings, 20)])
        for sittings in (0, 4, 30)
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.7 * widths[0]
    assert widths[-1] > found.within.halfwidth()


def test_interval_grows_where_recorded_sittings_differ_more_than_assumed() -> None:
    (found,) = Machine(0).sitting(ANCHOR)
    known = Scatter.of(Machine(1, 0.05).recorded(10))
    assert replace(found, scatter=known).ratio.halfwidth() > 2 * found.ratio.halfwidth()


def test_several_sittings_of_one_network_are_averaged() -> None:
    errors, hits, widths = [], [], []
    machine = Machine(0, 0.01)
    for known in machine.scatters(10, 200):
        parts = [machine.sitting(ANCHOR, number=number)[0] for number in range(4)]
        joined = Measurement(
            "net",
            "t",
            Samples.joined([m.samples for m in parts]),
            Samples.joined([m.dense for m in parts]),
            scatter=known,
            block_variance=parts[0].block_variance,
        )
        assert joined.samples.blocks == 12, "blocks of different sittings have the same numbers"
        errors.append([m.ratio.log - ANCHOR for m in (parts[0], joined)])
        widths.append([replace(parts[0], scatter=known).ratio.halfwidth(), joined.ratio.halfwidth()])
        hits.append(covered(joined.ratio, ANCHOR))
    single, together = np.std(errors, axis=0)
    assert together < 0.65 * single, "four sittings have half of the error of one"
    assert np.mean(widths, axis=0)[1] < 0.65 * np.mean(widths, axis=0)[0]
    assert 0.9 <= np.mean(hits) <= 0.99


def test_interference_that_slows_neighbouring_runs_alike_does_not_change_the_ratio() -> None:
    rng = np.random.default_rng(0)
    (found,) = Machine(0).sitting(ANCHOR, rounds=40)
    slow = np.where(rng.random(len(found.samples)) < 0.6, rng.uniform(1.2, 3.0, len(found.samples)), 1.0)
    samples = found.samples
    busy = replace(samples, values=slow * samples.values, before=slow * samples.before, after=slow * samples.after)
    disturbed = replace(found, samples=busy)
    assert disturbed.within.interval() == pytest.approx(found.within.interval(), rel=1e-9)
    assert disturbed.median > 1.05 * found.median, "or the test shows nothing"


@given(st.floats(0.05, 1.0), st.integers(1, 4), st.integers(1, 3), st.sampled_from(["quiet", "median"]))
@settings(max_examples=30)
def test_exact_runs_give_the_exact_value_in_its_interval(ratio: float, blocks: int, sittings: int, name: str) -> None:
    parts, dense = [], []
    for sitting in range(sittings):
        for block in range(blocks):
            parts.append(Samples.of(np.full(3, ratio * DENSE), DENSE, DENSE, block, sitting))
            dense.append(Samples.of(np.full(6, DENSE), DENSE, DENSE, block, sitting))
    whole = Samples.joined(dense)
    found = Measurement("net", "t", Samples.joined(parts), whole, MeasuringRules(statistic=name))
    assert found.value == pytest.approx(ratio * DENSE)
    assert found.ratio.value == pytest.approx(ratio)
    assert found.low < found.value < found.high
    assert found.within.variance <= found.ratio.variance <= found.absolute.variance
    assert found.samples.blocks == blocks * sittings
    itself = Measurement("dense", "t", whole, whole, MeasuringRules(statistic=name))
    assert itself.ratio == Estimate(0.0), "the dense network is its own unit"
    assert itself.absolute == itself.scale


def test_value_is_the_statistic_of_the_dense_runs_times_the_ratio() -> None:
    (quiet,) = Machine(0).sitting(ANCHOR, blocks=1, rounds=200)
    median = replace(quiet, rules=MeasuringRules(statistic="median"))
    for found, order in ((quiet, 0.25), (median, 0.5)):
        assert found.value == pytest.approx(np.quantile(found.dense.values, order) * found.ratio.value)
        assert found.ratio.value == pytest.approx(math.exp(ANCHOR), rel=0.02)
    tail = replace(quiet, rules=MeasuringRules(statistic="p95"))
    assert tail.value == pytest.approx(np.quantile(tail.samples.values, 0.95))
    assert tail.ratio.value == pytest.approx(tail.value / np.quantile(tail.dense.values, 0.95))


def test_measurement_is_finished_when_it_is_precise_or_has_enough_blocks() -> None:
    machine = Machine(0)
    one, two, three = (machine.sitting(ANCHOR, blocks=blocks)[0] for blocks in (1, 2, 3))
    precise = MeasuringRules(precision=0.5)
    never = MeasuringRules(precision=0.0)
    assert not replace(one, rules=precise).finished, "one block does not show its error"
    assert replace(two, rules=precise).finished
    assert not replace(two, rules=never).finished
    assert replace(three, rules=never).finished, "more blocks are of little use"
    itself = Measurement("dense", "t", three.dense, three.dense, precise)
    assert itself.finished
    strict = MeasuringRules(precision=0.5, require=1e-4)
    assert not replace(three, rules=strict).finished, "more is worth its time where the user requires precision"
    assert replace(machine.sitting(ANCHOR, blocks=40)[0], rules=strict).finished, "but not without end"


def test_interval_allows_for_earlier_looks() -> None:
    (found,) = Machine(0).sitting(ANCHOR)
    assert found.absolute.interval() == (found.low, found.high), "a single look needs no allowance"
    assert [round(replace(found, look=look).confidence(), 4) for look in (0, 1, 2)] == [0.95, 0.975, 0.9917]
    widths = [replace(found, look=look).halfwidth for look in (0, 1, 2, 3)]
    assert widths == sorted(widths)
    assert len(set(widths)) == 4


def test_only_a_required_precision_makes_a_wide_interval_doubtful() -> None:
    (found,) = Machine(0).sitting(ANCHOR)
    wide = replace(found, scatter=Scatter(scale=0.5**2))
    assert wide.halfwidth > 0.5
    assert wide.trusted
    required = replace(wide, rules=MeasuringRules(require=1e-4))
    assert not required.trusted
    assert str(required.doubt).endswith("(+/-0.01% is required)")
    assert "WARNING: do not use this value" in repr(required)
    assert "WARNING" not in repr(wide)
    nothing = replace(found, samples=Samples.empty())
    assert not nothing.trusted
    assert math.isnan(nothing.value)
    assert "not measured within the time limit" in str(nothing.doubt)


def test_report_has_value_interval_percentiles_and_blocks() -> None:
    text = repr(replace(Machine(0).sitting(ANCHOR)[0], what="resnet18", target="onnxruntime/cpu"))
    for part in ("resnet18 on onnxruntime/cpu", "ms, 95% CI [", "median", "p90", "p95", "p99", "15 runs in 3 blocks"):
        assert part in text


def test_runs_with_and_without_extra_values_are_joined() -> None:
    plain = Samples.of(np.asarray([1.0]), 1.0, 1.0)
    noted = Samples.of(np.asarray([2.0, 3.0]), 1.0, 1.0, 1, 5, {"watts": np.asarray([9.0, 8.0])})
    found = Samples.joined([plain, noted])
    assert np.isnan(found.extra["watts"][0])
    assert found.extra["watts"][1:].tolist() == [9.0, 8.0]
    assert found.of_sitting(5).values.tolist() == [2.0, 3.0]
    assert found.of_sitting(5).extra["watts"].tolist() == [9.0, 8.0]
    assert (len(found.of_sitting(None)), found.blocks, Samples.empty().blocks) == (0, 2, 0)
