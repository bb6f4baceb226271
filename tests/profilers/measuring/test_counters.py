"""Energy counters of users, of GPUs and of processors."""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_hw.errors import MeasurementError, MissingDependencyError
from profilers.measuring import counters
from profilers.measuring.counters import Counter, Total
from profilers.measuring.energy_bench import update_period
from tests.fakes.powered import real_time


def test_total_counts_across_wraps() -> None:
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
        ([500.0, 4.0], 300.0, "Correct wraps_at"),
        ([5.0], None, "Cannot read counter"),
    ],
)
def test_invalid_reading_is_an_error(values: list[Any], wraps_at: float | None, words: str) -> None:
    left = list(values)
    total = Total(Counter("c", lambda: left.pop(0), wraps_at=wraps_at))
    with pytest.raises(MeasurementError, match=words):
        total.read()


@pytest.mark.parametrize("value", [0.0, 17.0])
def test_counter_without_updates_is_an_error(value: float) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += 0.01

    with pytest.raises(MeasurementError, match=r"did not move.*--counter"):
        update_period(Counter("c", lambda: value, clock=lambda: now[0], sleep=sleep))


class Lab:
    """An external meter."""

    name = "lab"
    wraps_at = 5.0

    def read_joules(self) -> float:
        return 20 * time.monotonic() % 5.0


def test_counter_from_function_object_or_name() -> None:
    assert Counter.of("tests.fakes.powered:real_time").read_joules() > 0
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
    with pytest.raises(MissingDependencyError, match="shows 1 GPUs"):
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
    with pytest.raises(MissingDependencyError, match=r"permission error. Make it readable \(sudo chmod.*zeusd"):
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
        with pytest.raises(MissingDependencyError, match=r"does not exist.*modprobe.*--counter.*EstimatedEnergyBudget"):
            counters.find("cpu")
    monkeypatch.setattr(counters, "_POWERCAP", (tmp_path,))
    for name in ("zeus.device.cpu", "zeus.device.gpu"):
        monkeypatch.setitem(sys.modules, name, None)
    for device in ("cpu", "cuda"):
        with pytest.raises(MissingDependencyError, match=r"pip install 'dsa-hw\[energy\]'"):
            counters.find(device)
    with pytest.raises(MissingDependencyError, match="cpu, cuda and mps"):
        counters.find("toaster")
