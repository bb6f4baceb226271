"""Profiles, measurements and self-checks of a small network."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import profilers
from dsa_hw.channels import find_groups
from dsa_hw.errors import MeasurementError, ModelError, ProfileError
from profilers.measuring import environment as environments
from profilers.measuring.rules import MeasuringRules
from profilers.measuring.sittings import anchor_widths
from profilers.targets import Loaded, Target
from tests.fakes.processes import eventually
from tests.fakes.stores import stored_runs

Network = tuple[nn.Module, tuple[torch.Tensor, ...]]


def test_profile_has_a_row_per_configuration(tiny: Network, lenient: MeasuringRules, tmp_path: Path) -> None:
    out = tmp_path / "p.sqlite"
    stages: list[str] = []
    found = profilers.profile(
        *tiny,
        target="onnxruntime/cpu",
        samples=4,
        holdout=1,
        grid="auto",
        out=out,
        rules=lenient,
        time_limit=120,
        name="tiny",
        listener=lambda event: stages.append(event.stage),
    )
    table, names, sizes = found.table, list(found.names), np.asarray(found.sizes)
    assert list(table.columns) == [*names, "seconds", "low", "high", "error", "split", "runs"]
    assert table["split"].value_counts().to_dict() == {"train": 3, "holdout": 1, "dense": 1}
    widths = table[names].to_numpy()
    grid = np.asarray([found.grid[n] for n in names])
    assert ((widths % grid == 0) | (widths == sizes)).all()
    assert len({tuple(r) for r in widths.tolist()}) == len(table), "hold-out and training do not share configurations"
    assert (table[table["split"] == "dense"][names].to_numpy() == sizes).all()
    assert (table["low"] <= table["seconds"]).all()
    assert (table["seconds"] <= table["high"]).all()
    assert found.prepared == "narrowed"
    assert found.agreement is not None
    assert found.agreement < 1e-4
    assert {"channel groups", "export", "grid", "measure"} <= set(found.breakdown)
    assert found.grid_evidence
    assert found.quantity == "latency"
    assert {"finding the grid", "measuring"} <= set(stages)
    tables = profilers.load_tables(out, rules=lenient)
    assert tables.profile.table[names].equals(table[names])
    assert np.allclose(tables.profile.table["seconds"], table["seconds"])
    assert len(tables.grid) == len(found.grid_evidence)
    assert len(tables.samples) >= table["runs"].sum()
    json.dumps(found.metadata())  # plain data that can be written to any file


def test_anchor_is_measured_but_not_part_of_the_profile(tiny: Network, lenient: MeasuringRules, tmp_path: Path) -> None:
    out = tmp_path / "p.sqlite"
    found = profilers.profile(*tiny, "torch/cpu", samples=4, holdout=2, grid=4, out=out, rules=lenient)
    groups = find_groups(*tiny)
    anchor = anchor_widths(groups.sizes)
    assert anchor not in {tuple(row) for row in found.table[list(groups.names)].to_numpy().tolist()}
    tables = profilers.load_tables(out)
    known = {tuple(json.loads(widths)): id for id, widths in tables.configurations[["id", "widths"]].to_numpy()}
    assert known[anchor] in set(tables.samples["configuration"])
    assert len(found) == 6


def test_continued_profile_measures_nothing_twice_and_reports_a_changed_environment(
    tiny: Network,
    lenient: MeasuringRules,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options: dict[str, Any] = {"grid": 4, "out": tmp_path / "p.sqlite", "rules": lenient, "time_limit": 60}
    first = profilers.profile(*tiny, target="torch/cpu", samples=4, holdout=2, **options)
    runs = len(profilers.load_tables(options["out"]).samples)
    second = profilers.profile(*tiny, target="torch/cpu", samples=4, holdout=2, **options)
    assert second.table.equals(first.table)
    assert len(profilers.load_tables(options["out"]).samples) == runs
    more = profilers.profile(*tiny, target="torch/cpu", samples=6, holdout=2, **options)
    assert len(more) == len(first) + 2
    kept = more.table.merge(first.table, on=[*first.names, "split"])
    assert len(kept) == len(first), "the hold-out stays the same"
    assert (kept["runs_x"] == kept["runs_y"])[kept["split"] != "dense"].all(), "nothing is measured twice"
    assert "kept separately" not in caplog.text
    real = environments.environment
    monkeypatch.setattr(environments, "environment", lambda target: {**real(target), "torch": "99.0"})
    with caplog.at_level(logging.WARNING):
        third = profilers.profile(*tiny, target="torch/cpu", samples=4, holdout=2, **options)
    assert f"torch {torch.__version__} -> 99.0" in caplog.text
    assert "kept separately" in caplog.text
    assert third.environment["torch"] == "99.0"
    assert len(third) == 6
    assert third.table["seconds"].tolist() != first.table["seconds"].tolist()
    assert len(profilers.load_tables(options["out"]).profiles) == 2


def test_measure_returns_a_report_and_its_runs(tiny: Network, lenient: MeasuringRules) -> None:
    found = profilers.measure(*tiny, target="onnxruntime/cpu", rules=lenient, name="tiny", time_limit=20)
    assert repr(found).startswith("tiny on onnxruntime/cpu fp32 x1: ")
    assert found.median > 0
    assert found.environment["onnxruntime"]
    assert len(found.samples) == found.runs > 0


def test_measurement_that_is_less_precise_than_required_is_refused(tiny: Network) -> None:
    rules = MeasuringRules(require=1e-6, rounds=1, least_seconds=0.0)
    with pytest.raises(MeasurementError, match=r"1 measurement .*Tiny: the 95% interval is .*--require") as error:
        profilers.measure(*tiny, target="torch/cpu", rules=rules, time_limit=1)
    assert error.value.exit_code == 4


class Drifting(Target):
    """A target whose second session takes 3% longer than the first, for one configuration only."""

    runtime = "drifting"
    estimated = "estimated by a formula"

    def __init__(self) -> None:
        super().__init__("cpu")
        self.loaded = 0

    def load(self, artefact: nn.Module, inputs: tuple[Any, ...]) -> Loaded:
        self.loaded += 1
        weights = sum(p.numel() for p in artefact.parameters())
        return Loaded.exact(1e-6 * weights * (1.03 if self.loaded == 6 else 1.0))


def test_self_check_reports_the_difference_between_two_sessions(tiny: Network) -> None:
    check = profilers.self_check(*tiny, target=Drifting(), configurations=4)
    assert check.table["difference"].tolist() == pytest.approx([0.0, 0.03, 0.0, 0.0])
    assert check.table["ratio_difference"].tolist() == pytest.approx([0.0, 0.03, 0.0, 0.0])
    assert check.largest == pytest.approx(0.03)
    assert check.median == pytest.approx(0.0)
    assert check.target == "drifting/cpu fp32 x1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples": 1}, "at least 2"),
        ({"time_limit": 0}, "positive"),
        ({"grid": "coarse"}, "auto"),
        ({"grid": 0}, "auto"),
    ],
)
def test_invalid_arguments_are_refused(tiny: Network, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        profilers.profile(*tiny, target="torch/cpu", **options)


def test_inputs_other_than_tensors_are_refused(tiny: Network) -> None:
    with pytest.raises(ModelError, match="tensor"):
        profilers.measure(tiny[0], ("text",), target="torch/cpu")


_SLOW = """
import sys, time
import numpy as np
import torch
import profilers
from profilers.targets import Loaded, Target
from tests.fakes.machine import SimulatedDevice, Tiny

class Slow(Target):
    runtime, cache = "slow", 2**14

    def load(self, artefact, inputs):
        seconds = SimulatedDevice.truth(artefact)
        def clock(n):
            time.sleep(n * seconds)
            return np.full(n, seconds)
        return Loaded(lambda: None, clock=clock)

torch.manual_seed(0)
model, inputs = Tiny().eval(), (torch.randn(1, 3, 16, 16),)
rules = profilers.MeasuringRules(precision=0.0, most_blocks=10**6)  # never finished: it measures until it is killed
profilers.profile(model, inputs, Slow(), samples=4, holdout=2, grid=8, out=sys.argv[1], rules=rules)
"""


def test_killed_profile_keeps_its_runs_and_can_be_used(tmp_path: Path) -> None:
    out = tmp_path / "p.sqlite"
    process = subprocess.Popen([sys.executable, "-c", _SLOW, str(out)], env=dict(os.environ))
    try:
        assert eventually(lambda: stored_runs(out) > 50, 60)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    stored = stored_runs(out)
    found = profilers.load_profile(out)
    assert stored >= found.table["runs"].sum() > 40
    assert {"dense", "train", "holdout"} == set(found.table["split"])
    assert (found.table["low"] < found.table["seconds"]).all()
    assert found.table["error"][found.table["split"] != "dense"].gt(0).all()
