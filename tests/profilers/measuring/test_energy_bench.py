"""Energy measurements on a simulated device whose true power is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import budgets
import profilers
from dsa_hw.channels import find_groups, shrink
from dsa_hw.errors import MeasurementError, ProfileError
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.rounding import round_widths
from profilers.measuring.bench import DENSE, Bench
from profilers.measuring.energy_bench import EnergyBench, EnergyMeasurement, update_period
from profilers.measuring.sittings import SittingFile
from tests.fakes.powered import IDLE, Chip, Device, physics

Network = tuple[nn.Module, tuple[torch.Tensor, ...]]


def bench_on(device: Device, **options: Any) -> EnergyBench:
    return EnergyBench(Chip(device), device.counter(), **options)


def measured(device: Device, **networks: tuple[float, float]) -> dict[str, EnergyMeasurement]:
    """Measure networks of given seconds and watts, beside a dense one of 3 ms and 30 W."""
    found = bench_on(device).measure(
        {name: device.network(*about) for name, about in networks.items()}, device.network(3e-3, 30.0), limit=1e5
    )
    assert all(isinstance(m, EnergyMeasurement) for m in found.values())
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("tick", [0.1, 0.001])
@pytest.mark.parametrize("seconds", [0.0003, 0.15])
def test_joules_are_recovered_within_two_percent(tick: float, seconds: float) -> None:
    device = Device(tick=tick, wraps_at=150.0)
    found = measured(device, a=(seconds, 25.0))["a"]
    assert found.trusted
    assert found.joules == pytest.approx(25.0 * seconds, rel=0.02)
    assert found.net == pytest.approx((25.0 - IDLE) * seconds, rel=0.02)
    assert found.seconds == pytest.approx(seconds, rel=0.02)
    assert found.low <= 25.0 * seconds <= found.high
    assert found.ratio.value == pytest.approx(25.0 * seconds / 0.09, rel=0.02)
    assert found.temperature == 41.0
    assert found.idle_watts == pytest.approx(IDLE, rel=0.02)
    assert found.watts == pytest.approx(25.0, rel=0.02)
    assert found.environment["power cap"] == "60 W"
    assert device.wraps >= 1, "the counter wrapped while we measured"
    spans = found.samples.extra["inferences"] * found.samples.extra["seconds"]
    assert (spans >= 50 * tick).all(), "windows of at least fifty updates"
    assert "net of idling" in repr(found)


def test_run_may_take_longer_than_an_update() -> None:
    found = measured(Device(tick=0.02, noise=0.003), a=(0.047, 25.0))["a"]
    assert found.value == pytest.approx(0.047 * 25.0, rel=0.02)


def test_networks_are_measured_together() -> None:
    true = {"a": (1e-3, 20.0), "b": (1e-3, 24.0), "c": (2e-3, 12.0)}
    found = measured(Device(seed=3), **true)
    for name, (seconds, watts) in {**true, DENSE: (3e-3, 30.0)}.items():
        assert found[name].value == pytest.approx(seconds * watts, rel=0.02)
        assert found[name].net == pytest.approx(seconds * (watts - IDLE), rel=0.04)


def test_one_network_is_measured_without_another() -> None:
    device = Device()
    found = bench_on(device).measure({}, device.network(2e-3, 25.0), limit=1e5)[DENSE]
    assert found.value == pytest.approx(0.05, rel=0.02)


def test_window_counts_as_a_ratio_to_the_windows_of_the_dense_network() -> None:
    """Power rises slowly, as leakage does in a chip that becomes warm; a network of the same power rises alike."""
    device = Device(noise=0.002, others=lambda t: 0.06 * t)
    found = measured(device, a=(1.5e-3, 30.0))["a"]
    first, last = found.samples.values[[0, -1]]
    assert last > 1.05 * first, "or the test shows nothing"
    assert found.ratio.value == pytest.approx(0.5, rel=0.01)
    low, high = found.ratio.interval()
    assert low < 0.5 < high
    between = (found.samples.values > 0.5 * found.samples.before) & (found.samples.values < 0.5 * found.samples.after)
    assert between.mean() > 0.7, "the stored neighbours are the windows before and after"


def test_load_of_other_processes_cancels_in_the_ratio() -> None:
    """It comes and goes in minutes, longer than three windows."""
    device = Device(others=lambda t: 12.0 if (t % 60) > 30 else 0.0)
    found = measured(device, a=(1.5e-3, 30.0), b=(6e-4, 30.0))
    assert found["a"].spread > 0.2, "half of the windows contain the other process"
    for name, truth in (("a", 0.5), ("b", 0.2)):
        low, high = found[name].ratio.interval()
        assert low <= truth <= high or found[name].ratio.value == pytest.approx(truth, rel=0.02)
        assert found[name].trusted, "nothing is refused"


@pytest.mark.parametrize("tick", [0.1, 0.001])
def test_least_seconds_are_enough_for_the_required_blocks(tick: float) -> None:
    device = Device(tick=tick)
    bench = bench_on(device)
    least = bench.least_seconds(2)
    networks = {"a": device.network(1e-3, 20.0), "b": device.network(2e-3, 20.0)}
    begin = device.now
    found = bench.measure(networks, device.network(3e-3, 20.0), limit=least)
    assert all(m.samples.blocks >= bench.rules.least_blocks for m in found.values())
    assert 0.5 * least < device.now - begin < 1.6 * least


def test_update_period_is_measured() -> None:
    for tick in (0.1, 0.02, 0.001):
        assert update_period(Device(tick=tick).counter()) == pytest.approx(tick, rel=0.05)


def test_counter_that_stops_is_an_error() -> None:
    device = Device()
    bench = bench_on(device)
    device.tick = device._next = 1e9
    with pytest.raises(MeasurementError, match="did not move"):
        bench.measure({"a": device.network(2e-3, 25.0)}, device.network(3e-3, 30.0), limit=1e5)


def test_energy_of_estimated_targets_is_refused() -> None:
    device = Device()
    target = Chip(device)
    target.estimated = "estimated from a table"
    with pytest.raises(ProfileError, match="EstimatedEnergyBudget"):
        EnergyBench(target, device.counter())


def test_energy_and_time_of_one_network_have_sittings_of_their_own(tmp_path: Path) -> None:
    device, file = Device(), SittingFile(tmp_path / "s.jsonl")
    bench = bench_on(device, network=("f", []), sittings=file)
    bench.record(bench.measure({"a": device.network(1e-3, 20.0)}, device.network(3e-3, 30.0), limit=1e5)["a"])
    assert bench_on(device, network=("f", []), sittings=file).scatter.sittings == 1
    assert Bench(Chip(device), network=("f", []), sittings=file).scatter.sittings == 0


def test_profile_fit_and_energy_budget_that_is_met(tiny: Network, tmp_path: Path) -> None:
    model, inputs = tiny
    device = Device(tick=0.1, noise=0.005)
    out = tmp_path / "energy.sqlite"
    options: dict[str, Any] = {"quantity": "energy", "counter": device.counter(), "time_limit": 1e7}
    found = profilers.profile(model, inputs, Chip(device), samples=14, holdout=4, out=out, name="tiny", **options)
    table = found.table
    groups = find_groups(model, inputs)
    assert (found.quantity, found.unit, found.estimated) == ("energy", "J", None)
    columns = ["joules", "low", "high", "error", "split", "runs", "net", "watts", "idle_watts", "temperature"]
    assert list(table.columns) == [*groups.names, *columns]
    for _, row in table.iterrows():
        kept = [np.arange(int(row[name])) for name in groups.names]
        seconds, watts = physics(shrink(model, groups, kept), inputs)
        assert row["joules"] == pytest.approx(seconds * watts, rel=0.02)
        assert row["net"] == pytest.approx(seconds * (watts - IDLE), rel=0.04)
    spent = device.now
    again = profilers.profile(model, inputs, Chip(device), samples=14, holdout=4, out=out, name="tiny", **options)
    assert device.now - spent < 0.05 * spent, "only the period of the counter is measured again"
    pd.testing.assert_frame_equal(again.table, table)
    assert np.allclose(profilers.load_profile(out).table["joules"], table["joules"])

    cost = budgets.fit(found, groups)
    budget = budgets.EnergyBudget("60%")
    limit = budget.limit(cost.dense)
    ratios = np.linspace(1, 0.1, 91)
    alpha = next(r for r in ratios if float(cost(np.full(len(groups), r))) <= 0.98 * limit)
    costs = CostSet([cost], groups.sizes, [0.98 * limit])
    widths = round_widths(np.full(len(groups), alpha), costs, np.full(len(groups), 2))
    small = shrink(model, groups, [np.arange(w) for w in widths])
    measured = profilers.measure(small, inputs, Chip(device), **options)
    assert isinstance(measured, EnergyMeasurement)
    assert measured.value <= limit
    seconds, watts = physics(small, inputs)
    assert seconds * watts <= limit, "and it is true on the simulated device"
