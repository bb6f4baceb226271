"""Energy: a simulated counter with known physics, the real measuring code; then counters, and the command line."""

from __future__ import annotations

import json
import sys
import time
import types
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
from dsa_hw.errors import MeasurementError, MissingDependencyError, ProfileError
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.rounding import round_widths
from profilers import energy
from profilers.measuring import counters
from profilers.measuring import energy_bench as metering
from profilers.measuring.counters import Counter, Total
from profilers.measuring.energy_bench import EnergyBench, EnergyMeasurement, update_period
from profilers.measuring.measurement import Samples
from profilers.measuring.reference import ReferenceFile
from profilers.measuring.rules import MeasuringRules
from profilers.storage.store import Store
from tests.fakes.powered import IDLE, Chip, Device, physics

Network = tuple[nn.Module, tuple[torch.Tensor, ...]]


def bench_on(device: Device, **options: Any) -> EnergyBench:
    return EnergyBench(Chip(device), device.counter(), control=device.network(1e-3, 30.0), **options)


# The measuring code --------------------------------------------------------------------------------------------------


def test_a_control_that_takes_longer_than_an_update() -> None:
    device = Device(tick=0.02, noise=0.003)
    bench = EnergyBench(Chip(device), device.counter(), control=device.network(0.031, 16.0))
    assert bench.calibrate().seconds == pytest.approx(0.031 * 16.0, rel=0.015)
    found = bench.measure({"a": device.network(0.047, 25.0)}, limit=1e5)["a"]
    assert found.rejected == 0
    assert found.value == pytest.approx(0.047 * 25.0, rel=0.02)


@pytest.mark.parametrize("tick", [0.1, 0.001])
@pytest.mark.parametrize("seconds", [0.0003, 0.15])
def test_joules_are_recovered_within_two_per_cent(tick: float, seconds: float) -> None:
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


def test_networks_are_told_apart_in_one_go() -> None:
    device = Device(seed=3)
    true = {"a": (1e-3, 20.0), "b": (1e-3, 24.0), "c": (2e-3, 12.0)}
    found = bench_on(device).measure({n: device.network(*p) for n, p in true.items()}, limit=1e5)
    for name, (seconds, watts) in true.items():
        assert found[name].value == pytest.approx(seconds * watts, rel=0.02)


@pytest.mark.parametrize("tick", [0.1, 0.001])
def test_the_least_time_is_enough(tick: float) -> None:
    device = Device(tick=tick)
    bench = bench_on(device)
    least = bench.least_seconds(2)
    networks = {"a": device.network(1e-3, 20.0), "b": device.network(2e-3, 20.0)}
    found = bench.measure(networks, limit=least)
    assert all(m.trusted for m in found.values())
    assert 0.5 * least < device.now < 1.2 * least


def test_the_update_period_is_measured() -> None:
    for tick in (0.1, 0.02, 0.001):
        assert update_period(Device(tick=tick).counter()) == pytest.approx(tick, rel=0.05)


def test_a_neighbour_now_and_then_is_rejected() -> None:
    device = Device(others=lambda t: 12.0 if (t % 60) > 30 else 0.0)
    found = bench_on(device).measure({"a": device.network(2e-3, 25.0)}, limit=1e5)["a"]
    assert found.trusted
    assert found.value == pytest.approx(0.05, rel=0.02)
    assert found.rejected > 0


def test_a_neighbour_that_never_rests_is_refused(tmp_path: Path) -> None:
    references = ReferenceFile(tmp_path / "r.json")
    bench_on(Device(), references=references).calibrate()
    device = Device(others=lambda t: 12.0)
    bench = bench_on(device, references=references)
    found = bench.measure({"a": device.network(2e-3, 25.0)}, limit=100)
    assert not found["a"].trusted
    assert "control workload took 1.4" in str(found["a"].doubt)
    assert isinstance(bench.explain(found, 100), MeasurementError)


def test_a_counter_that_stops_is_an_error() -> None:
    device = Device()
    bench = bench_on(device)
    bench.calibrate()
    device.tick = device._next = 1e9
    with pytest.raises(MeasurementError, match="stands still"):
        bench.measure({"a": device.network(2e-3, 25.0)}, limit=1e5)


def test_what_is_estimated_has_no_energy() -> None:
    device = Device()
    target = Chip(device)
    target.estimated = "the table's word"
    with pytest.raises(ProfileError, match="analytic"):
        EnergyBench(target, device.counter())


# The whole job -------------------------------------------------------------------------------------------------------


def test_profile_fit_and_a_budget_that_is_met(tiny: Network, tmp_path: Path) -> None:
    model, inputs = tiny
    device = Device(tick=0.1, noise=0.005)
    out = tmp_path / "energy.sqlite"
    options: dict[str, Any] = {"quantity": "energy", "counter": device.counter(), "time_limit": 1e7}
    table = profilers.profile(model, inputs, Chip(device), samples=14, holdout=4, out=out, name="tiny", **options)
    groups = find_groups(model, inputs)
    assert table.attrs["quantity"] == "energy"
    assert table.attrs["unit"] == "J"
    assert table.attrs["estimated"] is None
    columns = ["joules", "low", "high", "split", "runs", "net", "watts", "idle_watts", "temperature"]
    assert list(table.columns) == [*groups.names, *columns]
    for _, row in table.iterrows():
        kept = [np.arange(int(row[name])) for name in groups.names]
        seconds, watts = physics(shrink(model, groups, kept), inputs)
        assert row["joules"] == pytest.approx(seconds * watts, rel=0.02)
        assert row["net"] == pytest.approx(seconds * (watts - IDLE), rel=0.04)
    spent = device.now
    again = profilers.profile(model, inputs, Chip(device), samples=14, holdout=4, out=out, name="tiny", **options)
    pd.testing.assert_frame_equal(again, table)
    assert device.now - spent < 0.05 * spent, "only the calibration is done again"
    stored = profilers.load_tables(out)
    assert np.allclose(stored.profile["joules"], table["joules"])

    cost = budgets.fit(table, groups)
    budget = budgets.EnergyBudget("60%")
    limit = budget.limit(cost.dense)
    ratios = np.linspace(1, 0.1, 91)
    alpha = next(r for r in ratios if float(cost(np.full(len(groups), r))) <= 0.98 * limit)
    costs = CostSet([cost], groups.sizes, [0.98 * limit])
    widths = round_widths(np.full(len(groups), alpha), costs, np.full(len(groups), 2))
    small = shrink(model, groups, [np.arange(w) for w in widths])
    found = profilers.measure(small, inputs, Chip(device), **options)
    assert isinstance(found, EnergyMeasurement)
    assert found.high <= limit
    seconds, watts = physics(small, inputs)
    assert seconds * watts <= limit, "and it is true on the simulated device"


def test_runs_with_and_without_notes_are_joined(tmp_path: Path) -> None:
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


# Counters ------------------------------------------------------------------------------------------------------------


def test_wraps_are_added_up() -> None:
    values = iter([250.0, 290.0, 10.0, 10.0, 60.0])
    total = Total(Counter("c", lambda: next(values), wraps_at=300.0))
    assert [total.read() for _ in range(4)] == [True, True, False, True]
    assert total.joules == pytest.approx(40 + 20 + 50)


@pytest.mark.parametrize(
    ("values", "wraps_at", "words"),
    [
        ([5.0, None], None, "returned None instead of joules"),
        ([5.0, float("nan")], None, "returned nan"),
        ([5.0, 4.0], None, "went back"),
        ([500.0, 4.0], 300.0, "correct wraps_at"),
        ([5.0], None, "cannot be read"),
    ],
)
def test_nonsense_is_an_error_and_never_zero(values: list[Any], wraps_at: float | None, words: str) -> None:
    left = list(values)
    total = Total(Counter("c", lambda: left.pop(0), wraps_at=wraps_at))
    with pytest.raises(MeasurementError, match=words):
        total.read()


@pytest.mark.parametrize("value", [0.0, 17.0])
def test_standing_still_is_an_error(value: float) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += 0.01

    with pytest.raises(MeasurementError, match=r"stands still.*--counter"):
        update_period(Counter("c", lambda: value, clock=lambda: now[0], sleep=sleep))


class Lab:
    """An external meter."""

    name = "lab"
    wraps_at = 5.0

    def read_joules(self) -> float:
        return 20 * time.monotonic() % 5.0


def real_time() -> float:
    """Twenty watts, whatever is done."""
    return 20 * time.monotonic()


def test_counters_of_the_user() -> None:
    assert Counter.of("tests.profilers.measuring.test_energy_bench:real_time").read_joules() > 0
    assert Counter.of(real_time).name.endswith(":real_time")
    lab = Counter.of(Lab())
    assert (lab.name, lab.wraps_at) == ("lab", 5.0)
    assert Counter.of(lab) is lab
    for bad in ("no.such:thing", "nocolon", "time:nothing", 3.5):
        with pytest.raises(MissingDependencyError, match="function"):
            Counter.of(bad)


@pytest.fixture
def zeus(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A stand-in for Zeus's three modules, with the parts of its interface that are used (0.16)."""
    parts = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "zeus", types.ModuleType("zeus"))
    monkeypatch.setitem(sys.modules, "zeus.device", types.ModuleType("zeus.device"))
    for name in ("gpu", "cpu", "soc"):
        module = types.ModuleType(f"zeus.device.{name}")
        setattr(parts, name, module)
        monkeypatch.setitem(sys.modules, f"zeus.device.{name}", module)
    monkeypatch.setattr(counters, "_soc", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return parts


class Gpu:
    total: Any = 5000

    def get_name(self) -> str:
        return "Simulated 100"

    def supports_get_total_energy_consumption(self) -> bool:
        return self.total is not None

    def get_total_energy_consumption(self) -> int:
        return int(self.total)

    def get_gpu_temperature(self) -> int:
        raise RuntimeError("no sensor")

    def get_power_management_limit(self) -> int:
        return 250_000


def test_gpu_through_zeus(zeus: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    zeus.gpu.get_gpus = lambda: types.SimpleNamespace(gpus=[gpu])
    found = counters.find("cuda")
    assert found.read_joules() == 5.0
    assert found.state() == {"power_cap": 250.0}
    assert "Simulated 100" in found.name
    with pytest.raises(MissingDependencyError, match="shows 1"):
        counters.find("cuda:3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "Another 7")
    with pytest.raises(MissingDependencyError, match="PCI_BUS_ID"):
        counters.find("cuda:0")
    monkeypatch.setattr(gpu, "total", None)
    with pytest.raises(MissingDependencyError, match="Volta"):
        counters.find("cuda")

    def absent() -> Any:
        raise RuntimeError("NVML and AMDSMI unavailable.")

    zeus.gpu.get_gpus = absent
    with pytest.raises(MissingDependencyError, match=r"AMDSMI unavailable.*nvidia-smi"):
        counters.find("cuda")


def zone(folder: Path, name: str, microjoules: int) -> types.SimpleNamespace:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text("262143328850\n")
    path = str(folder / "energy_uj")
    return types.SimpleNamespace(name=name, energy_uj_path=path, max_energy_range_uj=262143328850.0)


def test_rapl_through_zeus(zeus: types.SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_POWERCAP", (tmp_path,))
    package, dram = zone(tmp_path / "0", "package-0", 262143_000_000), zone(tmp_path / "0d", "dram", 1_000_000)
    cpus = [types.SimpleNamespace(rapl_file=package, dram=dram)]
    zeus.cpu.get_cpus = lambda: types.SimpleNamespace(cpus=cpus)
    found = counters.find("cpu")
    before = found.read_joules()
    (tmp_path / "0" / "energy_uj").write_text("671150\n")  # past the end of its range
    (tmp_path / "0d" / "energy_uj").write_text("1500000\n")
    assert found.read_joules() - before == pytest.approx(1.0 + 0.5, abs=1e-6)
    assert found.name == "RAPL, package-0 + dram"

    def forbidden() -> Any:
        raise RuntimeError("Can't read file due to permission error")

    zeus.cpu.get_cpus = forbidden
    with pytest.raises(MissingDependencyError, match=r"permission error; allow reading it \(sudo chmod.*zeusd"):
        counters.find("cpu")
    zeus.cpu.get_cpus = lambda: types.SimpleNamespace(cpus=[])
    with pytest.raises(MissingDependencyError, match="no RAPL zone"):
        counters.find("cpu")


def test_rapl_by_the_real_zeus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rapl = pytest.importorskip("zeus.device.cpu.rapl", reason="Zeus is not installed (pip install 'dsa-hw[energy]')")
    import zeus.device.cpu as module

    zone(tmp_path / "intel-rapl:0", "package-0", 7_000_000)
    zone(tmp_path / "intel-rapl:0" / "intel-rapl:0:0", "dram", 2_000_000)
    monkeypatch.setattr(rapl, "RAPL_DIR", str(tmp_path))
    monkeypatch.setattr(module, "_cpus", None)
    rapl.rapl_is_available.cache_clear()
    monkeypatch.setattr(counters, "_POWERCAP", (tmp_path,))
    monkeypatch.setattr(counters, "_soc", lambda: None)
    found = counters.find("cpu")
    before = found.read_joules()
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("9000000\n")
    assert found.read_joules() - before == pytest.approx(2.0)
    assert found.name == "RAPL, package-0 + dram"
    rapl.rapl_is_available.cache_clear()


def test_without_zeus_and_without_counter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(counters, "_soc", lambda: None)
    monkeypatch.setattr(counters, "_POWERCAP", (tmp_path / "absent",))
    if sys.platform == "linux":
        with pytest.raises(MissingDependencyError, match=r"does not exist.*modprobe.*--counter.*analytic"):
            counters.find("cpu")
    monkeypatch.setattr(counters, "_POWERCAP", (tmp_path,))
    for name in ("zeus.device.cpu", "zeus.device.gpu"):
        monkeypatch.setitem(sys.modules, name, None)
    for device in ("cpu", "cuda"):
        with pytest.raises(MissingDependencyError, match=r"pip install 'dsa-hw\[energy\]'"):
            counters.find(device)
    with pytest.raises(MissingDependencyError, match="cpu, cuda or mps"):
        counters.find("toaster")


# The command line ----------------------------------------------------------------------------------------------------


def command(tmp_path: Path, *arguments: str) -> list[str]:
    model = ["--model", "tests.fakes.machine:Tiny", "--input", "1x3x16x16", "--runtime", "torch"]
    return [*model, "--out", str(tmp_path / "energy.sqlite"), "--grid", "8", *arguments]


def test_command_with_a_meter_in_real_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = MeasuringRules(precision=0.5, worst=1e6, tolerance=1e6, least_windows=1)
    monkeypatch.setattr(MeasuringRules, "allowing", lambda share, statistic="quiet": rules)
    monkeypatch.setattr(metering, "_SETTLE", 0.01)
    monkeypatch.setattr(metering, "_LEAST_SECONDS", 0.03)
    meter = "tests.profilers.measuring.test_energy_bench:real_time"
    arguments = command(tmp_path, "--counter", meter, "--samples", "2", "--holdout", "1", "--time-limit", "2min")
    assert energy.main(arguments) == 0
    text = capsys.readouterr().out
    for part in ("mJ [", "net of idling", "next: dsa-hw fit"):
        assert part in text
    assert energy.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["quantity"] == "energy"
    assert report["unit"] == "J"
    for row in report["configurations"]:
        assert row["watts"] == pytest.approx(20.0, rel=0.05), "the meter's physics"
        assert abs(row["net"]) < 0.05 * row["joules"], "it counts the same when idle"


def test_the_error_on_a_machine_without_counter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        counters.find("cpu")
    except MissingDependencyError:
        pass
    else:
        pytest.skip("this machine has a CPU energy counter")
    assert energy.main(command(tmp_path, "--device", "cpu")) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "counter" in captured.err
    assert "--counter package.module:function" in captured.err
    assert not (tmp_path / "energy.sqlite").exists(), "refused before any work"


def test_a_meter_that_stands_still_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metering, "_STILL", 0.2)
    assert energy.main(command(tmp_path, "--counter", "tests.profilers.measuring.test_energy_bench:standing")) == 4
    assert "stands still" in capsys.readouterr().err


def standing() -> float:
    """A broken meter."""
    return 12.5
