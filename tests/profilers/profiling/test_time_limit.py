"""Profiles on simulated machines: use of the time limit, and configurations that cannot be trusted."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import budgets
import profilers
from dsa_hw import find_groups, shrink
from dsa_hw.errors import MeasurementError
from dsa_hw.profiles import Profile
from profilers.measuring.reference import ReferenceFile
from profilers.measuring.rules import MeasuringRules
from profilers.profiling import api, job
from profilers.storage.store import Store
from profilers.targets import Loaded
from tests.fakes.machine import Machine, SimulatedBench, SimulatedDevice

Network = tuple[nn.Module, tuple[torch.Tensor, ...]]
Run = Callable[..., Profile]


@pytest.fixture
def run(tiny: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Profile `tiny` on a simulated device, with limits in simulated seconds."""

    def profile(device: SimulatedDevice, **options: Any) -> Profile:
        clock = device.machine.clock
        for module in (api, job):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, perf_counter=clock))
        defaults: dict[str, Any] = {"samples": 16, "holdout": 2, "grid": 2, "out": tmp_path / "p.sqlite"}
        return profilers.profile(*tiny, device, **{**defaults, **options})

    return profile


def truth(tiny: Network, profile: Profile) -> list[float]:
    groups = find_groups(*tiny)
    rows = profile.table[list(groups.names)].to_numpy()
    return [SimulatedDevice.truth(shrink(tiny[0], groups, [torch.arange(int(w)).numpy() for w in row])) for row in rows]


def test_configurations_are_measured_again_after_the_reference_fell(run: Run, tiny: Network) -> None:
    # 6% slower at first: within the tolerance of its own reference, outside that of the quiet machine afterwards.
    device = SimulatedDevice(Machine(lambda t: 1.06 if t < 2 else 1.0))
    found = run(device, time_limit=300)
    assert len(found) == 18
    assert found.untrusted == 0
    assert found.table["seconds"].tolist() == pytest.approx(truth(tiny, found), rel=0.02)
    assert 2 < device.machine.now < 60, "it continues after the reference fell and stops when all are trusted"


class _Restless(SimulatedDevice):
    """A device on which some networks, by the order of their first run, have runs that vary by half."""

    def __init__(self, machine: Machine, restless: Callable[[int], bool]) -> None:
        super().__init__(machine)
        self.restless = restless
        self.numbers: dict[float, int] = {}

    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        seconds = self.truth(artefact)
        calm, loud = self.machine.network(seconds), Machine(jitter=1.0).network(seconds)

        def clock(n: int) -> Any:
            if not self.restless(self.numbers.setdefault(seconds, len(self.numbers))):
                return calm.run(n)
            took = loud.run(n)
            self.machine.now += float(took.sum())
            return took

        return Loaded(lambda: None, clock=clock)


def test_configuration_with_a_wide_interval_is_left_out_after_the_time_limit(
    run: Run, tiny: Network, caplog: pytest.LogCaptureFixture
) -> None:
    device = _Restless(Machine(), lambda number: number == 5)
    with caplog.at_level(logging.WARNING):
        found = run(device, time_limit=12, rules=MeasuringRules(precision=3e-3, worst=5e-3))
    assert device.machine.now >= 12
    assert len(found) == 17, "the second part of the design had its share of the time"
    assert "1 of 18 configurations could not be measured precisely enough and are left out" in caplog.text
    assert found.table["seconds"].tolist() == pytest.approx(truth(tiny, found), rel=0.01)
    model = budgets.fit(found, find_groups(*tiny))
    assert model.provenance.configurations >= 14


@pytest.mark.parametrize(
    ("samples", "usable", "refused"), [(16, 12, False), (16, 11, True), (10, 9, False), (10, 8, True)]
)
def test_profile_is_refused_only_with_too_few_trusted_configurations(
    run: Run, tiny: Network, samples: int, usable: int, refused: bool
) -> None:
    device = _Restless(Machine(), lambda number: number >= usable)
    options: dict[str, Any] = {"time_limit": 10, "rules": MeasuringRules(precision=3e-3, worst=5e-3), "holdout": 0}
    if not refused:
        assert len(run(device, samples=samples, **options)) == usable
        return
    with pytest.raises(MeasurementError, match="cannot be trusted") as error:
        run(device, samples=samples, **options)
    assert error.value.exit_code == 4
    assert device.machine.now >= 10, "refused only after the time was used"


def test_profile_without_time_is_refused(run: Run) -> None:
    with pytest.raises(MeasurementError, match=r"Only 0 of 12 configurations were measured.*--time-limit"):
        run(SimulatedDevice(Machine()), time_limit=1e-6)


@pytest.mark.parametrize("doubled", [False, True])
def test_interrupted_runs_are_judged_by_the_reference_of_their_session(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doubled: bool
) -> None:
    """The job is interrupted at the fourth transaction; only what is stored is left."""
    quiet = SimulatedDevice(Machine())
    SimulatedBench(quiet, references=ReferenceFile()).calibrate()  # a reference of the undisturbed machine is stored
    device = SimulatedDevice(Machine(lambda t: 2.0 if doubled else 1.0))
    real, count = Store.add_samples, 0

    def mortal(*arguments: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        if count > 3:
            raise KeyboardInterrupt
        real(*arguments, **options)

    monkeypatch.setattr(Store, "add_samples", mortal)
    with pytest.raises(KeyboardInterrupt):
        run(device, time_limit=100, rules=MeasuringRules(precision=1e-4))
    tables = profilers.load_tables(tmp_path / "p.sqlite")
    assert len(tables.samples) > 0
    with sqlite3.connect(tmp_path / "p.sqlite") as connection:
        ((reference,),) = connection.execute("SELECT seconds FROM reference").fetchall()
        judged = connection.execute("SELECT count(*) FROM inflation").fetchone()[0]
    assert reference == pytest.approx(quiet.control, rel=0.01)
    assert judged == tables.samples["configuration"].nunique()
    assert (len(tables.profile) == 0) == doubled
