"""Ethos-U with a fake worker and, where the environment is installed, with Vela."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import budgets
from dsa_hw.channels import find_groups, shrink
from dsa_hw.errors import MeasurementError, MissingDependencyError, ProfileError
from profilers import latency, load_tables, measure, profile
from profilers.litert.convert import TfliteFile, convert
from profilers.networks.builder import ConfigurationBuilder
from profilers.targets import resolve
from profilers.targets.ethos_u import EthosU
from tests.fakes.litert_env import make_fake, real


def test_missing_environment_names_the_setup_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path))
    for device in ("ethos-u55-128", "auto/ethos-u85-256", "ethos_u/ethos-u65-512", "litert/cpu"):
        with pytest.raises(MissingDependencyError, match="dsa-hw setup ethos-u"):
            resolve(device)
    assert latency.main(["--device", "ethos-u55-128"]) == 2
    assert "dsa-hw setup ethos-u" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "error", "text"),
    [
        ("ethos-u55-512", MissingDependencyError, "Available devices: ethos-u55-32"),
        ("ethos-u77-128", MissingDependencyError, "Unknown device"),
        ("ethos-u55-128?clock=2", ProfileError, "got 'clock'"),
        ("ethos-u55-128?config=own.ini", ProfileError, "which system= and memory="),
        ("ethos-u55-128?config=nowhere.ini&system=A&memory=B", ProfileError, "no file nowhere.ini"),
        ("onnxruntime/ethos-u55-128", ProfileError, "Omit --runtime"),
    ],
)
def test_invalid_devices_are_errors(
    device: str, error: type[Exception], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fake(tmp_path, monkeypatch)
    with pytest.raises(error, match=text):
        resolve(device)


def test_environment_has_vela_and_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch)
    default = resolve("ethos-u55-128")
    other = resolve("ethos-u55-128?system=Ethos_U55_Deep_Embedded&memory=Sram_Only")
    assert default.estimated == "estimated by Vela 5.2.0"
    assert default.title != other.title
    assert other.describe()["system"] == "Ethos_U55_Deep_Embedded"
    own = tmp_path / "own.ini"
    own.write_text("[System_Config.Mine]")
    first = resolve(f"ethos-u55-128?config={own}&system=Mine&memory=Mine").describe()
    own.write_text("[System_Config.Mine]\ncore_clock=1e9")
    assert first != resolve(f"ethos-u55-128?config={own}&system=Mine&memory=Mine").describe()
    with pytest.raises(ProfileError, match="runs int8"):
        resolve("ethos-u55-128", precision="fp16")


def test_profile_has_exact_estimates(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path / "home", monkeypatch)
    monkeypatch.setattr(ConfigurationBuilder, "check", lambda self, seed: None)  # the fake has no outputs to compare
    model, inputs = tiny
    groups = find_groups(model, inputs)
    out = tmp_path / "p.sqlite"
    found = profile(model, inputs, "ethos-u55-128", samples=5, holdout=2, out=out, groups=groups)
    assert found.estimated == "estimated by Vela 5.2.0"
    assert found.prepared == "narrowed"
    table = found.table
    assert set(table["split"]) == {"dense", "train", "holdout"}
    for _, row in table.iterrows():
        kept = [np.arange(int(row[name])) for name in groups.names]
        indices = sum(len(i) for cuts in groups.slices(kept).values() for i in cuts.values())
        assert row["seconds"] == row["low"] == row["high"]
        assert row["seconds"] == pytest.approx((1000 * indices or 1e6) / 5e8, rel=1e-12)
    assert load_tables(out).profile.table["seconds"].tolist() == table["seconds"].tolist()


def test_operations_on_the_cpu_are_an_error(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch, "cpu")
    with pytest.raises(MeasurementError, match=r"cannot run 1 operation.*ArgMax: too odd.*no time"):
        measure(*tiny, "ethos-u55-128")


ESTIMATE = {"seconds": 1e-3, "cycles": 5e5, "clock": 5e8, "operations": [], "on_cpu": [], "reasons": []}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seconds", None), ("seconds", 0), ("seconds", -1.0), ("seconds", 1e-300), ("seconds", 1e9), ("seconds", "1"),
        ("cycles", -1), ("clock", []), ("operations", {}), ("operations", [1]), ("on_cpu", "x"), ("on_cpu", [1]),
        ("reasons", None),
    ],
)  # fmt: skip
def test_invalid_estimates_are_errors(
    name: str, value: Any, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fake(tmp_path, monkeypatch)
    target = EthosU("ethos-u55-128")
    ask = type(target.worker).ask

    def lying(self: Any, do: str, **request: Any) -> Any:
        return {**ESTIMATE, name: value} if do == "vela" else ask(self, do, **request)

    file, _ = convert(target.worker, *tiny)
    monkeypatch.setattr(type(target.worker), "ask", lying)
    with pytest.raises(MeasurementError, match="sent an invalid answer"):
        target.estimate(file, tiny[1])
    target.worker.close()


def test_network_that_cannot_be_narrowed_is_converted_each_time(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    make_fake(tmp_path, monkeypatch, "rigid")
    model, inputs = tiny
    groups = find_groups(model, inputs)
    builder = ConfigurationBuilder(model, groups, inputs, resolve("ethos-u55-128"))
    assert builder.load(groups.sizes.tolist()).run(1)[0] == 1e6 / 5e8
    assert "PACK 'x': this operator is not supported" in builder.how
    assert "slower but equally accurate" in caplog.text


@real
def test_narrowed_file_has_the_cycles_of_a_converted_one() -> None:
    """The same cycles and the same memory as a full conversion of the shrunk network."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU6(),
        torch.nn.Conv2d(16, 16, 3, padding=1, groups=16),
        torch.nn.Conv2d(16, 40, 1),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(40, 5),
    ).eval()
    inputs = (torch.randn(1, 3, 16, 16),)
    groups = find_groups(model, inputs)
    target = resolve("ethos-u55-128")
    builder = ConfigurationBuilder(model, groups, inputs, target)
    assert builder.how == "narrowed"
    assert builder.check(rounds=1) is not None
    assert builder.how == "narrowed"
    rng = np.random.default_rng(0)
    kept = [np.sort(rng.permutation(int(c))[: int(c) // 2 + 1]) for c in groups.sizes]
    narrowed = builder.artefact(kept)
    assert isinstance(narrowed, TfliteFile)
    converted, _ = convert(target.worker, shrink(builder.model, groups, kept), inputs)
    first, second = target.estimate(narrowed, inputs), target.estimate(converted, inputs)
    assert (first["cycles"], first["memory"]) == (second["cycles"], second["memory"])
    assert [o["cycles"] for o in first["operations"]] == [o["cycles"] for o in second["operations"]]
    assert target.estimate(narrowed, inputs) == first  # deterministic
    table = pd.DataFrame([[len(k) for k in kept]], columns=list(groups.names))
    arena, flash = budgets.arena(groups).predict(table)[0], budgets.flash(groups).predict(table)[0]
    # Vela also prefetches weights to SRAM, all of them in a network as small as this one.
    assert arena <= first["memory"]["sram"] <= arena + flash
    assert 0.5 * flash <= first["memory"]["off_chip_flash"] <= 2 * flash + 4096
    target.worker.close()
