"""The whole job, on a small network and with lenient rules; then the command line."""

from __future__ import annotations

import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import profilers
from dsa_hw.errors import MeasurementError, ModelError, ProfileError
from profilers import latency
from profilers.measuring import environment as environments
from profilers.measuring.rules import MeasuringRules

Network = tuple[nn.Module, tuple[torch.Tensor, ...]]


def test_profile_on_onnxruntime(tiny: Network, lenient: MeasuringRules, tmp_path: Path) -> None:
    out = tmp_path / "p.sqlite"
    stages: list[str] = []
    table = profilers.profile(
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
    names, sizes = table.attrs["names"], np.asarray(table.attrs["sizes"])
    assert list(table.columns) == [*names, "seconds", "low", "high", "split", "runs"]
    assert table["split"].value_counts().to_dict() == {"train": 3, "holdout": 1, "dense": 1}
    widths = table[names].to_numpy()
    grid = np.asarray([table.attrs["grid"][n] for n in names])
    assert ((widths % grid == 0) | (widths == sizes)).all()
    assert len({tuple(r) for r in widths.tolist()}) == len(table), "hold-out and training do not share configurations"
    assert (table[table["split"] == "dense"][names].to_numpy() == sizes).all()
    assert (table["low"] <= table["seconds"]).all()
    assert (table["seconds"] <= table["high"]).all()
    assert table.attrs["prepared"] == "narrowed"
    assert table.attrs["agreement"] < 1e-4
    assert {"channel groups", "export", "grid", "prepare", "measure"} <= set(table.attrs["breakdown"])
    assert table.attrs["grid_evidence"]
    assert table.attrs["quantity"] == "latency"
    assert {"finding the grid", "measuring"} <= set(stages)
    tables = profilers.load_tables(out, rules=lenient)
    assert tables.profile[names].equals(table[names])
    assert np.allclose(tables.profile["seconds"], table["seconds"])
    assert len(tables.grid) == len(table.attrs["grid_evidence"])
    assert len(tables.samples) >= table["runs"].sum()
    json.dumps(table.attrs)  # plain data: it can go into any file


def test_continuing_measures_nothing_twice_and_names_a_changed_environment(
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
    assert second.equals(first)
    assert len(profilers.load_tables(options["out"]).samples) == runs
    more = profilers.profile(*tiny, target="torch/cpu", samples=6, holdout=2, **options)
    assert len(more) == len(first) + 2
    kept = more.merge(first, on=[*first.attrs["names"], "seconds", "split"])
    assert len(kept) == len(first), "what was measured stays as it was, hold-out included"
    assert "kept apart" not in caplog.text
    real = environments.environment
    monkeypatch.setattr(environments, "environment", lambda target: {**real(target), "torch": "99.0"})
    with caplog.at_level(logging.WARNING):
        third = profilers.profile(*tiny, target="torch/cpu", samples=4, holdout=2, **options)
    assert f"torch {torch.__version__} -> 99.0" in caplog.text
    assert "kept apart" in caplog.text
    assert third.attrs["environment"]["torch"] == "99.0"
    assert len(third) == 6
    assert third["seconds"].tolist() != first["seconds"].tolist()
    assert len(profilers.load_tables(options["out"]).profiles) == 2


def test_a_profile_that_cannot_be_trusted_is_refused_and_kept(tiny: Network, tmp_path: Path) -> None:
    strict = MeasuringRules(tolerance=-0.9, visit=1e-4, warm_in=1e-5)  # no control run is ever that fast
    out = tmp_path / "p.sqlite"
    with pytest.raises(MeasurementError, match="cannot be trusted") as error:
        profilers.profile(*tiny, target="torch/cpu", samples=3, holdout=0, grid=8, rules=strict, out=out, time_limit=3)
    assert error.value.exit_code == 4
    assert "0 of" in str(error.value)
    assert len(profilers.load_tables(out).samples) > 0, "the raw runs are there"
    assert len(profilers.load_tables(out).profile) == 0, "but no number is offered"
    with pytest.raises(MeasurementError, match="cannot be trusted"):
        profilers.measure(*tiny, target="torch/cpu", rules=strict, time_limit=0.5)


def test_runs_that_were_disturbed_throughout_are_made_again(
    tiny: Network, lenient: MeasuringRules, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"grid": 4, "out": tmp_path / "p.sqlite", "samples": 6, "holdout": 2, "time_limit": 60}
    first = profilers.profile(*tiny, "onnxruntime/cpu", rules=lenient, **options)
    before = _samples(tmp_path / "p.sqlite")
    hidden = 2 * lenient.worst
    with sqlite3.connect(tmp_path / "p.sqlite") as connection:
        connection.execute("UPDATE inflation SET hidden = ?", (hidden,))
    profilers.profile(*tiny, "onnxruntime/cpu", rules=replace(lenient, worst=2 * hidden), **options)
    assert _samples(tmp_path / "p.sqlite") == before, "allowed: nothing is measured again"
    table = profilers.profile(*tiny, "onnxruntime/cpu", rules=lenient, **options)
    assert before < _samples(tmp_path / "p.sqlite"), "raw runs are kept"
    assert len(table) == len(first) == 8
    assert not set(table["seconds"]) & set(first["seconds"]), "but do not count"


def _samples(path: Path) -> set[float]:
    with sqlite3.connect(path) as connection:
        return {seconds for (seconds,) in connection.execute("SELECT id + seconds FROM samples")}


def test_measure_and_self_check(tiny: Network, lenient: MeasuringRules) -> None:
    found = profilers.measure(*tiny, target="onnxruntime/cpu", rules=lenient, name="tiny", time_limit=20)
    assert repr(found).startswith("tiny on onnxruntime/cpu fp32 x1: ")
    assert found.median > 0
    assert found.environment["onnxruntime"]
    assert len(found.samples) >= found.runs > 0
    table = profilers.self_check(*tiny, target="torch/cpu", configurations=3, rules=lenient, time_limit=20)
    assert len(table) == 3
    assert (table[["first", "second"]] > 0).all().all()
    assert table["difference"].tolist() == pytest.approx((table["second"] / table["first"] - 1).tolist())
    assert table.attrs["largest"] >= table.attrs["median"] >= 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples": 1}, "at least 2"),
        ({"time_limit": 0}, "positive"),
        ({"grid": "coarse"}, "auto"),
        ({"grid": 0}, "auto"),
    ],
)
def test_bad_arguments(tiny: Network, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        profilers.profile(*tiny, target="torch/cpu", **options)


def test_inputs_that_are_no_tensors_are_refused(tiny: Network) -> None:
    with pytest.raises(ModelError, match="tensor"):
        profilers.measure(tiny[0], ("text",), target="torch/cpu")


# Command line --------------------------------------------------------------------------------------------------------

MODEL = "tests.fakes.machine:Tiny"


def command(*arguments: str) -> list[str]:
    return ["--model", MODEL, "--input", "1x3x16x16", "--runtime", "torch", *arguments]


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch, lenient: MeasuringRules) -> None:
    """No option of the command weakens its rules as far as a test on a busy machine needs."""
    monkeypatch.setattr(MeasuringRules, "allowing", lambda share, statistic="quiet": lenient)


@pytest.mark.usefixtures("rules")
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "p.sqlite", tmp_path / "saw.png"
    arguments = command(
        "--samples", "4", "--holdout", "1", "--out", str(out), "--time-limit", "1min", "--plot", str(picture)
    )
    assert latency.main(arguments) == 0
    text = capsys.readouterr().out
    for part in ("dense", "ms [", "range", "grid", "noise", "rejected", "next: dsa-hw fit"):
        assert part in text
    assert out.exists()
    assert picture.stat().st_size > 5000
    assert latency.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["target"] == "torch/cpu fp32 x1"
    assert len(report["configurations"]) == 5
    assert report["next"]
    assert latency.main(command("--self-check", "--time-limit", "20s", "--out", str(out))) == 0
    assert "difference: median" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--runtime", "tensorrt"], 2, "pip install"),
        (["--device", "cuda"], 2, "CUDA"),
        (["--device", "quantum"], 2, "not known"),
        (["--model", "resnet81"], 2, "resnet"),
        (["--model", MODEL, "--input", "1x3x"], 2, "1x3x224x224"),
        (["--model", "no.such:thing"], 2, "imported"),
        (["--holdout", "-1"], 2, "0 or more"),
    ],
)
def test_one_line_and_exit_code(
    arguments: list[str], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available() and "cuda" in arguments:
        pytest.skip("there is CUDA here")
    found = latency.main([*arguments, "--out", str(tmp_path / "p.sqlite")])
    captured = capsys.readouterr()
    assert found == code
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    assert words in captured.err
    assert captured.out == ""


def test_foreign_store_is_refused_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.sqlite"
    path.write_text("something else entirely, and long enough to be a header " * 3)
    assert latency.main(command("--out", str(path), "--json")) == 2
    captured = capsys.readouterr()
    assert "not a profile store" in captured.err
    assert json.loads(captured.out) == {"error": captured.err.removeprefix("error: ").strip(), "exit_code": 2}


@pytest.mark.parametrize("text", ["0", "-3", "ten", "5 weeks"])
def test_bad_durations(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        latency.main([f"--time-limit={text}"])
    assert stop.value.code == 2
    assert "time" in capsys.readouterr().err


def test_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "p.sqlite"
    code = (
        "import sys; from profilers import latency; from profilers.measuring.rules import MeasuringRules\n"
        # Never finished: it measures until it is stopped.
        "rules = MeasuringRules(precision=0, tolerance=1e6, waiting=1e6)\n"
        "MeasuringRules.allowing = staticmethod(lambda *_: rules)\n"
        "sys.exit(latency.main(sys.argv[1:]))"
    )
    arguments = command("--samples", "3", "--holdout", "1", "--grid", "8", "--out", str(out))
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True, env=dict(os.environ),
        # Where the tests run in the background SIGINT is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (out.exists() and _runs(out)):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "same command continues" in errors
    assert str(out) in errors
    assert "Traceback" not in errors
    assert _runs(out) > 0


def _runs(path: Path) -> int:
    connection = sqlite3.connect(path, timeout=10)
    try:
        return int(connection.execute("SELECT count(*) FROM samples").fetchone()[0])
    except sqlite3.OperationalError:  # not created yet
        return 0
    finally:
        connection.close()


def test_importing_the_package_is_light() -> None:
    heavy = ("torch", "onnxruntime", "openvino", "matplotlib")
    code = f"import sys, profilers; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
