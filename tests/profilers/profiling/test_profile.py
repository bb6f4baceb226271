"""Profiles, measurements and self-checks of a small network."""

from __future__ import annotations

import json
import logging
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import profilers
from dsa_hw.errors import MeasurementError, ModelError, ProfileError
from profilers.measuring import environment as environments
from profilers.measuring.rules import MeasuringRules
from profilers.targets import Loaded, Target

Network = tuple[nn.Module, tuple[torch.Tensor, ...]]


def test_profile_has_a_trusted_row_per_configuration(tiny: Network, lenient: MeasuringRules, tmp_path: Path) -> None:
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
    assert list(table.columns) == [*names, "seconds", "low", "high", "split", "runs"]
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
    assert {"channel groups", "export", "grid", "prepare", "measure"} <= set(found.breakdown)
    assert found.grid_evidence
    assert found.quantity == "latency"
    assert {"finding the grid", "measuring"} <= set(stages)
    tables = profilers.load_tables(out, rules=lenient)
    assert tables.profile.table[names].equals(table[names])
    assert np.allclose(tables.profile.table["seconds"], table["seconds"])
    assert len(tables.grid) == len(found.grid_evidence)
    assert len(tables.samples) >= table["runs"].sum()
    json.dumps(found.metadata())  # plain data that can be written to any file


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
    kept = more.table.merge(first.table, on=[*first.names, "seconds", "split"])
    assert len(kept) == len(first), "configurations that were measured stay as they were, including the hold-out"
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


def test_untrusted_profile_is_refused_and_its_runs_are_kept(tiny: Network, tmp_path: Path) -> None:
    strict = MeasuringRules(tolerance=-0.9, visit=1e-4, warm_in=1e-5)  # no control run is ever that fast
    out = tmp_path / "p.sqlite"
    with pytest.raises(MeasurementError, match="cannot be trusted") as error:
        profilers.profile(*tiny, target="torch/cpu", samples=3, holdout=0, grid=8, rules=strict, out=out, time_limit=3)
    assert error.value.exit_code == 4
    assert "0 of" in str(error.value)
    assert len(profilers.load_tables(out).samples) > 0, "the raw runs are stored"
    assert len(profilers.load_tables(out).profile) == 0, "but there are no values"
    with pytest.raises(MeasurementError, match="cannot be trusted"):
        profilers.measure(*tiny, target="torch/cpu", rules=strict, time_limit=0.5)


def test_disturbed_runs_are_measured_again(tiny: Network, lenient: MeasuringRules, tmp_path: Path) -> None:
    options: dict[str, Any] = {"grid": 4, "out": tmp_path / "p.sqlite", "samples": 6, "holdout": 2, "time_limit": 60}
    first = profilers.profile(*tiny, "onnxruntime/cpu", rules=lenient, **options)
    before = _samples(tmp_path / "p.sqlite")
    hidden = 2 * lenient.worst
    with sqlite3.connect(tmp_path / "p.sqlite") as connection:
        connection.execute("UPDATE inflation SET hidden = ?", (hidden,))
    profilers.profile(*tiny, "onnxruntime/cpu", rules=replace(lenient, worst=2 * hidden), **options)
    assert _samples(tmp_path / "p.sqlite") == before, "allowed: nothing is measured again"
    again = profilers.profile(*tiny, "onnxruntime/cpu", rules=lenient, **options)
    assert before < _samples(tmp_path / "p.sqlite"), "raw runs are kept"
    assert len(again) == len(first) == 8
    assert not set(again.table["seconds"]) & set(first.table["seconds"]), "but do not count"


def _samples(path: Path) -> set[float]:
    with sqlite3.connect(path) as connection:
        return {seconds for (seconds,) in connection.execute("SELECT id + seconds FROM samples")}


def test_measure_returns_a_report_and_its_runs(tiny: Network, lenient: MeasuringRules) -> None:
    found = profilers.measure(*tiny, target="onnxruntime/cpu", rules=lenient, name="tiny", time_limit=20)
    assert repr(found).startswith("tiny on onnxruntime/cpu fp32 x1: ")
    assert found.median > 0
    assert found.environment["onnxruntime"]
    assert len(found.samples) >= found.runs > 0


class Drifting(Target):
    """A target whose second session takes 3% longer than the first, for the narrowest configuration only."""

    runtime = "drifting"
    estimated = "estimated by a formula"

    def __init__(self) -> None:
        super().__init__("cpu")
        self.loaded = 0

    def load(self, artefact: nn.Module, inputs: tuple[Any, ...]) -> Loaded:
        self.loaded += 1
        weights = sum(p.numel() for p in artefact.parameters())
        return Loaded.exact(1e-6 * weights * (1.03 if self.loaded == 5 else 1.0))


def test_self_check_reports_the_difference_between_two_sessions(tiny: Network) -> None:
    check = profilers.self_check(*tiny, target=Drifting(), configurations=3)
    assert check.table["difference"].tolist() == pytest.approx([0.0, 0.03, 0.0])
    assert check.largest == pytest.approx(0.03)
    assert check.median == 0.0
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
