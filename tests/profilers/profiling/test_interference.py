"""Runs are judged by what was true when they were taken, whatever happened to the session or happens later.

Each stored run carries the dense runs beside it, so that a slowdown cancels in their ratio: nothing that is written
later (a reference, the end of a session, another session) is needed to judge it, and nothing written later changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import profilers
from dsa_hw import find_groups, shrink
from dsa_hw.profiles import Profile
from profilers.profiling import api, job
from profilers.profiling.events import Event
from tests.fakes.machine import Machine, SimulatedDevice, bursts

Network = tuple[nn.Module, tuple[torch.Tensor, ...]]
Run = Callable[..., Profile]

INTERFERENCE = {
    "always twice as slow": lambda t: 2.0,
    "slower with time": lambda t: 1.0 + 0.5 * t,
    "bursts": bursts(0.1, 0.5, 2.0),
}


@pytest.fixture
def run(tiny: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Profile `tiny` on a simulated device, with limits in simulated seconds."""

    def profile(device: SimulatedDevice, **options: Any) -> Profile:
        clock = device.machine.clock
        for module in (api, job):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, perf_counter=clock))
        defaults: dict[str, Any] = {"samples": 14, "holdout": 2, "grid": 2, "out": tmp_path / "p.sqlite"}
        return profilers.profile(*tiny, device, **{**defaults, **options})

    return profile


def ratios(profile: Profile) -> dict[tuple[int, ...], float]:
    """Return the ratio to the dense network of each configuration."""
    table = profile.table
    dense = table["seconds"][table["split"] == "dense"].item()
    widths = table[list(profile.names)].to_numpy()
    return {tuple(map(int, row)): float(s) / dense for row, s in zip(widths, table["seconds"], strict=True)}


def true_ratios(tiny: Network, configurations: Any) -> dict[tuple[int, ...], float]:
    groups = find_groups(*tiny)

    def seconds(row: Any) -> float:
        return SimulatedDevice.truth(shrink(tiny[0], groups, [np.arange(w) for w in row]))

    dense = seconds(groups.sizes)
    return {row: seconds(row) / dense for row in configurations}


# In bursts some pairs of runs are torn apart; their ratios are known after a few more rounds.
@pytest.mark.parametrize(
    ("name", "rounds"), [("always twice as slow", 2), ("slower with time", 2), ("slower with time", 5), ("bursts", 6)]
)
def test_store_of_a_killed_session_has_true_ratios(
    name: str, rounds: int, run: Run, tiny: Network, tmp_path: Path
) -> None:
    """R1: what a kill leaves behind was judged by the dense runs beside it; nothing else has to be written first."""
    seen = 0

    def kill(event: Event) -> None:
        nonlocal seen
        seen += event.stage == "measuring"
        if seen == rounds:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(SimulatedDevice(Machine(INTERFERENCE[name])), listener=kill)
    stored = profilers.load_profile(tmp_path / "p.sqlite")
    found, true = ratios(stored), true_ratios(tiny, ratios(stored))
    assert len(found) >= 8
    off = np.array([np.log(found[row] / true[row]) for row in found])
    assert (np.abs(off) <= 4 * stored.table["error"].to_numpy() + 0.01).all(), "within its own error"
    assert np.median(np.abs(off)) < 0.02
    finished = ratios(run(SimulatedDevice(Machine())))
    assert finished == pytest.approx(true_ratios(tiny, finished), rel=0.03)


def test_later_session_does_not_change_how_earlier_runs_are_judged(run: Run, tiny: Network, tmp_path: Path) -> None:
    """R2: a session on a machine slowed by a half, then a quiet one with more configurations."""
    path = tmp_path / "p.sqlite"
    first = run(SimulatedDevice(Machine(lambda t: 1.5)), samples=14)
    second = run(SimulatedDevice(Machine(seed=1)), samples=24)
    assert len(profilers.load_tables(path).sessions) == 2
    before, after = ratios(first), ratios(second)
    assert set(before) < set(after)
    assert {row: after[row] for row in before} == pytest.approx(before, rel=0.01), "the same runs, the same ratios"
    assert after == pytest.approx(true_ratios(tiny, after), rel=0.02)


def test_order_of_sessions_does_not_matter(run: Run, tmp_path: Path) -> None:
    found = []
    for name, slow in (("a", (1.5, 1.0)), ("b", (1.0, 1.5))):
        for seed, factor in enumerate(slow):
            machine = Machine(lambda t, factor=factor: factor, seed=seed)  # type: ignore[misc]
            last = run(SimulatedDevice(machine), samples=14 + 10 * seed, out=tmp_path / f"{name}.sqlite")
        found.append(ratios(last))
    assert found[0] == pytest.approx(found[1], rel=0.02)
