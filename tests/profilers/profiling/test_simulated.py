"""Profiles on simulated machines: true ratios, use of the time limit, precision, sittings, interruptions."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import budgets
import profilers
from dsa_hw import find_groups, shrink
from dsa_hw.errors import MeasurementError
from dsa_hw.profiles import Profile
from profilers.measuring.rules import MeasuringRules
from profilers.measuring.sittings import SittingFile
from profilers.profiling import api, job
from profilers.profiling.events import Event
from profilers.targets import Loaded
from tests.fakes.machine import Machine, SimulatedDevice, bursts, sittings_an_hour_apart

Network = tuple[nn.Module, tuple[torch.Tensor, ...]]
Run = Callable[..., Profile]


@pytest.fixture
def run(tiny: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Profile `tiny` on a simulated device, with limits in simulated seconds and an hour between sittings."""
    sittings_an_hour_apart(monkeypatch)

    def profile(device: SimulatedDevice, **options: Any) -> Profile:
        clock = device.machine.clock
        for module in (api, job):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, perf_counter=clock))
        defaults: dict[str, Any] = {"samples": 14, "holdout": 2, "grid": 2, "out": tmp_path / "p.sqlite"}
        return profilers.profile(*tiny, device, **{**defaults, **options})

    return profile


def truth(tiny: Network, profile: Profile) -> list[float]:
    groups = find_groups(*tiny)
    rows = profile.table[list(groups.names)].to_numpy()
    return [SimulatedDevice.truth(shrink(tiny[0], groups, [torch.arange(int(w)).numpy() for w in row])) for row in rows]


def ratios(profile: Profile, seconds: Any = None) -> Any:
    """Return the ratios to the dense network."""
    values = profile.table["seconds"].to_numpy() if seconds is None else np.asarray(seconds)
    return values / values[profile.table["split"].to_numpy() == "dense"]


def test_busy_machine_gives_the_true_ratios(run: Run, tiny: Network) -> None:
    device = SimulatedDevice(Machine(bursts(0.15, 0.4, 1.8)))
    found = run(device)
    assert len(found) == 16
    assert found.untrusted == 0
    assert ratios(found) == pytest.approx(ratios(found, truth(tiny, found)), rel=0.01)
    assert found.noise > 0.2, "the runs were disturbed"
    model = budgets.fit(found, find_groups(*tiny))
    assert model.provenance.configurations == 14


def test_errors_are_those_of_the_ratios(run: Run, tiny: Network) -> None:
    """The column `error` is a standard deviation: true errors are about as large."""
    device = SimulatedDevice(Machine(load_effect=0.02))
    found = run(device, samples=30)
    errors = found.table["error"].to_numpy()
    dense = found.table["split"].to_numpy() == "dense"
    assert (errors[~dense] > 0).all()
    assert errors[dense].tolist() == [0.0]
    off = np.log(ratios(found) / ratios(found, truth(tiny, found)))
    assert 0.4 < np.sqrt(np.mean((off[~dense] / errors[~dense]) ** 2)) < 2.0


def test_every_configuration_has_a_value_however_short_the_time(run: Run, tiny: Network) -> None:
    """All networks are visited in the first round; a wide interval is a result."""
    short, usual = (run(SimulatedDevice(Machine(jitter=0.02)), time_limit=t, out=None) for t in (1e-3, 600.0))
    assert len(short) == len(usual) == 16
    assert short.interval > 1.1 * usual.interval
    assert ratios(short) == pytest.approx(ratios(short, truth(tiny, short)), rel=0.1)


def test_configurations_that_do_not_fit_into_the_time_are_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(job, "_WAVE", 18)  # as many are in memory at once; other waves need time that is not there
    with caplog.at_level(logging.WARNING):
        found = run(SimulatedDevice(Machine()), samples=40, holdout=8, time_limit=1e-3)
    assert re.search(r"[1-9]\d* of \d+ configurations were not measured within the time limit", caplog.text)
    assert "The same command continues" in caplog.text
    assert 12 <= len(found) < 48
    caplog.clear()
    more = run(SimulatedDevice(Machine()), samples=40, holdout=8)
    assert len(more) == 48
    assert "not measured" not in caplog.text


def test_profile_with_too_few_configurations_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_WAVE", 4)
    with pytest.raises(MeasurementError, match=r"Only \d of \d+ configurations were measured.*--time-limit") as error:
        run(SimulatedDevice(Machine()), time_limit=1e-3)
    assert error.value.exit_code == 4
    assert len(run(SimulatedDevice(Machine()))) == 16, "the same command continues"


def test_required_precision_that_is_not_reached_is_an_error_that_names_the_option(run: Run) -> None:
    with pytest.raises(MeasurementError) as error:
        run(SimulatedDevice(Machine()), rules=MeasuringRules(require=1e-4))
    text = str(error.value)
    assert error.value.exit_code == 4
    assert re.match(r"16 measurements on simulated/cpu fp32 x1 cannot be used \(time limit 600 s\)\. ", text)
    assert re.search(r"(train|holdout|anchor|dense) \d+,\d+: the 95% interval is \+/-\d", text), "it names widths"
    assert "+/-0.01% is required" in text
    assert "--require" in text


def test_repeating_the_command_reaches_the_required_precision(run: Run, tmp_path: Path) -> None:
    rules = MeasuringRules(require=0.02)
    with pytest.raises(MeasurementError, match="Repeat the command, which continues"):
        run(SimulatedDevice(Machine(load_effect=0.005)), rules=rules)
    for seed in range(1, 12):
        with contextlib.suppress(MeasurementError):
            found = run(SimulatedDevice(Machine(load_effect=0.005, seed=seed)), rules=rules)
            break
    else:
        pytest.fail("the required precision was not reached")
    assert len(profilers.load_tables(tmp_path / "p.sqlite").sessions) == 1 + seed
    dense = found.table[found.table["split"] == "dense"].iloc[0]
    assert (dense["high"] - dense["low"]) / 2 <= 0.02 * dense["seconds"]
    assert len(found) == 16
    assert found.untrusted == 0


def test_wide_interval_of_the_dense_network_is_refused_when_the_time_is_over(run: Run) -> None:
    """It is the scale of all values."""
    options: dict[str, Any] = {"time_limit": 1e-3, "out": None}
    with pytest.raises(MeasurementError, match=r"the dense network: the 95% interval is .*\(\+/-10% is required\)"):
        run(SimulatedDevice(Machine(load_effect=0.25)), **options)
    accepted = run(SimulatedDevice(Machine(load_effect=0.25)), rules=MeasuringRules(require=10.0), **options)
    assert len(accepted) == 16, "unless the user accepts it"


def test_dense_network_is_measured_until_its_interval_is_narrow_enough(run: Run, tiny: Network) -> None:
    """A repetition of the command would do the same, so the first one does it."""
    found = run(SimulatedDevice(Machine(load_effect=0.25)))
    assert len(found) == 16
    dense = found.table["split"] == "dense"
    value, exact = found.table["seconds"][dense].item(), np.asarray(truth(tiny, found))[dense].item()
    assert value == pytest.approx(exact, rel=0.15)


def test_continuing_a_profile_adds_a_sitting_and_narrows_it(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    first = run(SimulatedDevice(Machine(load_effect=0.01)), time_limit=1e-3)
    sessions = len(profilers.load_tables(path).sessions)
    second = run(SimulatedDevice(Machine(load_effect=0.01, seed=1)))
    assert sessions == 1
    assert len(profilers.load_tables(path).sessions) == 2
    both = first.table.merge(second.table, on=[*first.names, "split"])
    assert len(both) == len(second) == 16
    assert (both["runs_y"] > both["runs_x"]).all()
    widths = [(both[f"high_{k}"] - both[f"low_{k}"]) / both[f"seconds_{k}"] for k in "xy"]
    assert (widths[1] < 0.8 * widths[0]).all()
    assert second.interval < 0.9 * first.interval
    third = run(SimulatedDevice(Machine()))
    assert len(profilers.load_tables(path).sessions) == 2, "all are finished"
    assert third.table.equals(second.table)


def test_every_sitting_is_recorded_once(run: Run, tmp_path: Path) -> None:
    file = SittingFile(tmp_path / "s.jsonl")
    for seed in range(3):
        run(SimulatedDevice(Machine(seed=seed)), samples=3, out=None, sittings=file)
    lines = file.path.read_text().splitlines()
    assert len(lines) == 3
    (key,) = {key for key, _ in file._read()}
    assert file.scatter(key).sittings == 3
    whole, half = 3 * 16 * 9 + 2 * 16 * 24 * 9, 3 * 8 * 9 + 2 * 8 * 16 * 9  # weights: all groups, and the anchor's
    expected = (1e-3 + 4e-7 * half) / (1e-3 + 4e-7 * whole)
    assert [np.exp(s.ratio.log) for _, s in file._read()] == pytest.approx([expected] * 3, rel=0.01)
    assert [np.exp(s.scale.log) for _, s in file._read()] == pytest.approx([1e-3 + 4e-7 * whole] * 3, rel=0.01)
    run(SimulatedDevice(Machine()), samples=3, out=tmp_path / "p.sqlite", sittings=file)
    run(SimulatedDevice(Machine()), samples=3, out=tmp_path / "p.sqlite", sittings=file)
    assert len(file.path.read_text().splitlines()) == 4, "a profile that is complete is no sitting"


def test_sittings_that_differ_widen_later_profiles(run: Run) -> None:
    found = [
        run(SimulatedDevice(Machine(tilt=tilt, seed=i)), samples=3, out=None)
        for i, tilt in enumerate([0.0, 0.1, -0.1, 0.1, -0.1, 0.0])
    ]
    assert found[-1].interval > 1.5 * found[0].interval


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_runs_of_an_interrupted_profile_are_stored_and_usable(
    run: Run, tiny: Network, tmp_path: Path, error: type[BaseException]
) -> None:
    count = 0

    def stop(event: Event) -> None:
        nonlocal count
        count += event.stage == "measuring"
        if count == 8:
            raise error

    with pytest.raises(error):
        run(SimulatedDevice(Machine()), listener=stop)
    found = profilers.load_profile(tmp_path / "p.sqlite")
    assert (found.table["runs"][found.table["split"] != "dense"] == 8).all(), "every round is there"
    assert len(found) >= 12
    assert ratios(found) == pytest.approx(ratios(found, truth(tiny, found)), rel=0.02)
    assert budgets.fit(found, find_groups(*tiny)).provenance.configurations >= 10
    again = run(SimulatedDevice(Machine()))
    assert len(again) == 16
    assert len(profilers.load_tables(tmp_path / "p.sqlite").sessions) == 2


def test_progress_is_reported_from_nothing_to_all(run: Run) -> None:
    shares: list[float] = []
    run(SimulatedDevice(Machine()), listener=lambda e: shares.append(e.done) if e.done is not None else None)
    assert 0 < shares[0] < 0.2
    assert max(shares) == pytest.approx(1.0)


class _Computed(SimulatedDevice):
    """A device that computes its times, and counts how often."""

    estimated = "estimated by a formula"
    bench_class = None

    def __init__(self) -> None:
        super().__init__(Machine(jitter=0.0))
        self.asked: list[float] = []

    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        self.asked.append(self.truth(artefact))
        return Loaded.exact(self.asked[-1])


def test_computed_profile_is_exact_and_asks_for_every_network_once(tiny: Network, tmp_path: Path) -> None:
    device = _Computed()
    options: dict[str, Any] = {"samples": 10, "holdout": 2, "grid": 2, "out": tmp_path / "p.sqlite"}
    found = profilers.profile(*tiny, device, **options)
    assert len(device.asked) == len(found), "there is no anchor: sittings do not differ"
    assert found.table["seconds"].tolist() == pytest.approx(truth(tiny, found), rel=1e-12)
    assert (found.table["low"] == found.table["high"]).all()
    assert (found.table["error"] == 0).all()
    more = profilers.profile(*tiny, device, **{**options, "samples": 12})
    assert len(device.asked) == len(more) == 14
