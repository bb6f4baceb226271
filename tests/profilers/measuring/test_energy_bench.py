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
from profilers.measuring.energy_bench import EnergyBench, EnergyMeasurement, update_period
from profilers.measuring.measurement import Samples
from profilers.measuring.reference import ReferenceFile
from profilers.storage.store import Store
from tests.fakes.powered import IDLE, Chip, Device, physics

Network = tuple[nn.Module, tuple[torch.Tensor, ...]]


def bench_on(device: Device, **options: Any) -> EnergyBench:
    return EnergyBench(Chip(device), device.counter(), control=device.network(1e-3, 30.0), **options)


def test_control_may_take_longer_than_an_update() -> None:
    device = Device(tick=0.02, noise=0.003)
    bench = EnergyBench(Chip(device), device.counter(), control=device.network(0.031, 16.0))
    assert bench.calibrate().seconds == pytest.approx(0.031 * 16.0, rel=0.015)
    found = bench.measure({"a": device.network(0.047, 25.0)}, limit=1e5)["a"]
    assert found.rejected == 0
    assert found.value == pytest.approx(0.047 * 25.0, rel=0.02)


@pytest.mark.parametrize("tick", [0.1, 0.001])
@pytest.mark.parametrize("seconds", [0.0003, 0.15])
def test_joules_are_recovered_within_two_percent(tick: float, seconds: float) -> None:
    device = Device(tick=tick, wraps_at=150.0)
    found = bench_on(device).measure({"a": device.network(seconds, 25.0)}, limit=1e5)["a"]
    assert isinstance(found, EnergyMeasurement)
    assert found.trusted
    assert found.joules == pytest.approx(25.0 * seconds, rel=0.02)
    assert found.net == pytest.approx((25.0 - IDLE) * seconds, rel=0.02)
    assert found.seconds == pytest.approx(seconds, rel=0.02)
    assert found.low <= found.joules <= found.high <= 1.02 * found.joules
    assert found.temperature == 41.0
    assert found.environment["power cap"] == "60 W"
    assert device.wraps >= 1, "the counter wrapped while we measured"
    spans = found.samples.extra["inferences"] * found.samples.extra["seconds"]
    assert (spans >= 50 * tick).all(), "windows of at least fifty updates"
    assert "net of idling" in repr(found)


def test_networks_are_measured_together() -> None:
    device = Device(seed=3)
    true = {"a": (1e-3, 20.0), "b": (1e-3, 24.0), "c": (2e-3, 12.0)}
    found = bench_on(device).measure({n: device.network(*p) for n, p in true.items()}, limit=1e5)
    for name, (seconds, watts) in true.items():
        assert found[name].value == pytest.approx(seconds * watts, rel=0.02)


@pytest.mark.parametrize("tick", [0.1, 0.001])
def test_least_seconds_are_enough(tick: float) -> None:
    device = Device(tick=tick)
    bench = bench_on(device)
    least = bench.least_seconds(2)
    networks = {"a": device.network(1e-3, 20.0), "b": device.network(2e-3, 20.0)}
    found = bench.measure(networks, limit=least)
    assert all(m.trusted for m in found.values())
    assert 0.5 * least < device.now < 1.2 * least


def test_update_period_is_measured() -> None:
    for tick in (0.1, 0.02, 0.001):
        assert update_period(Device(tick=tick).counter()) == pytest.approx(tick, rel=0.05)


def test_windows_with_other_load_are_rejected() -> None:
    device = Device(others=lambda t: 12.0 if (t % 60) > 30 else 0.0)
    found = bench_on(device).measure({"a": device.network(2e-3, 25.0)}, limit=1e5)["a"]
    assert found.trusted
    assert found.value == pytest.approx(0.05, rel=0.02)
    assert found.rejected > 0


def test_permanent_other_load_is_refused(tmp_path: Path) -> None:
    references = ReferenceFile(tmp_path / "r.json")
    bench_on(Device(), references=references).calibrate()
    device = Device(others=lambda t: 12.0)
    bench = bench_on(device, references=references)
    found = bench.measure({"a": device.network(2e-3, 25.0)}, limit=100)
    assert not found["a"].trusted
    assert "control workload took 1.4" in str(found["a"].doubt)
    assert isinstance(bench.explain(found, 100), MeasurementError)


def test_counter_that_stops_is_an_error() -> None:
    device = Device()
    bench = bench_on(device)
    bench.calibrate()
    device.tick = device._next = 1e9
    with pytest.raises(MeasurementError, match="did not move"):
        bench.measure({"a": device.network(2e-3, 25.0)}, limit=1e5)


def test_energy_of_estimated_targets_is_refused() -> None:
    device = Device()
    target = Chip(device)
    target.estimated = "estimated from a table"
    with pytest.raises(ProfileError, match="EstimatedEnergyBudget"):
        EnergyBench(target, device.counter())


def test_profile_fit_and_energy_budget_that_is_met(tiny: Network, tmp_path: Path) -> None:
    model, inputs = tiny
    device = Device(tick=0.1, noise=0.005)
    out = tmp_path / "energy.sqlite"
    options: dict[str, Any] = {"quantity": "energy", "counter": device.counter(), "time_limit": 1e7}
    found = profilers.profile(model, inputs, Chip(device), samples=14, holdout=4, out=out, name="tiny", **options)
    table = found.table
    groups = find_groups(model, inputs)
    assert (found.quantity, found.unit, found.estimated) == ("energy", "J", None)
    columns = ["joules", "low", "high", "split", "runs", "net", "watts", "idle_watts", "temperature"]
    assert list(table.columns) == [*groups.names, *columns]
    for _, row in table.iterrows():
        kept = [np.arange(int(row[name])) for name in groups.names]
        seconds, watts = physics(shrink(model, groups, kept), inputs)
        assert row["joules"] == pytest.approx(seconds * watts, rel=0.02)
        assert row["net"] == pytest.approx(seconds * (watts - IDLE), rel=0.04)
    spent = device.now
    again = profilers.profile(model, inputs, Chip(device), samples=14, holdout=4, out=out, name="tiny", **options)
    pd.testing.assert_frame_equal(again.table, table)
    assert device.now - spent < 0.05 * spent, "only the calibration is done again"
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
    assert measured.high <= limit
    seconds, watts = physics(small, inputs)
    assert seconds * watts <= limit, "and it is true on the simulated device"


def test_runs_with_and_without_extra_values_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    with Store(path) as store:
        store.add_environment("e", {"target": "t"})
        store.add_network("n", "n", {})
        (configuration,) = store.add_design("n", "e", [[1]], "train")
        session = store.add_session("e", "test", {}, reference=1.0)
        plain = Samples.of_visit(np.asarray([1.0]), 0, 1.0, 1.0, np.nan)
        noted = Samples(plain.values, plain.visit, plain.before, plain.after, plain.wait, {"watts": np.asarray([9.0])})
        runs = [(configuration.id, plain), (configuration.id, noted)]
        store.add_samples(session, runs, reference=1.0, hidden={configuration.id: 0.0})
        ((found, hidden),) = store.samples("e", "n")[configuration.id]
    assert hidden == 0.0
    assert np.isnan(found.extra["watts"][0])
    assert found.extra["watts"][1] == 9.0
