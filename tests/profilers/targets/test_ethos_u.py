"""Ethos-U: Vela's files, the target with a stand-in worker, and, where the environment is installed, the real thing."""

from __future__ import annotations

import signal
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsa_hw.channels import find_groups, shrink
from dsa_hw.cli import setup
from dsa_hw.errors import DsaError, MeasurementError, MissingDependencyError, ModelError, ProfileError
from profilers import latency, load_tables, measure, profile
from profilers.litert.client import PACKAGES, Worker, environment_folder, python_of, versions
from profilers.litert.convert import TfliteFile, convert, to_bytes
from profilers.litert.worker.vela import VelaError, parse
from profilers.networks.builder import ConfigurationBuilder
from profilers.targets import resolve
from tests.fakes.litert_env import make_fake, real

# Written by Vela 5.2.0 for a MobileNetV2; columns that nobody reads are left out, two operations are made up.
SUMMARY = """experiment,network,accelerator_configuration,core_clock,inference_time,sram_memory_used,dram_memory_used,\
on_chip_flash_memory_used,off_chip_flash_memory_used,nn_macs,cycles_npu,cycles_total
default,q,Ethos_U55_128,500000000.0,0.000227910,274.40625,0.0,0.0,3399.15625,2654208,57503,113955
"""
LAYERS = """Original Operator,NNG Operator,Target,Op Cycles,NPU,SRAM AC,DRAM AC,OnFlash AC,OffFlash AC,MAC Count,Name
Conv2D,Conv2D,NPU,57503,57503,33512,0,0,16576,1990656,a;b;12
Conv2D,Relu6,NPU,0,0,0,0,0,0,0,a;b;12
DepthwiseConv2D,DepthwiseConv2D,NPU,56452,56452,24560,0,0,8960,663552,a;b;23
"""


def test_vela_csv() -> None:
    found = parse(SUMMARY, LAYERS)
    assert found["seconds"] == pytest.approx(found["cycles"] / found["clock"])
    assert found["memory"]["off_chip_flash"] == 3399.15625 * 1024
    assert [o["name"] for o in found["operations"]] == ["0:Conv2D", "2:DepthwiseConv2D"]
    assert sum(o["cycles"] for o in found["operations"]) == found["cycles"]
    assert found["operations"][1]["busy"] == {"npu": 56452, "sram": 24560, "off_chip_flash": 8960}
    assert found["on_cpu"] == []


def test_vela_csv_with_operations_left_to_the_cpu() -> None:
    assert parse(SUMMARY, LAYERS + "ArgMax,ArgMax,CPU,0,0,0,0,0,0,0,x\n")["on_cpu"] == ["ArgMax"]


@pytest.mark.parametrize(
    ("summary", "layers"), [("", LAYERS), (SUMMARY.replace("cycles_total", "c"), LAYERS), (SUMMARY, "Target\nNPU\n")]
)
def test_vela_csv_of_another_version_is_refused(summary: str, layers: str) -> None:
    with pytest.raises(VelaError, match="expected format"):
        parse(summary, layers)


def test_without_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path))
    for device in ("ethos-u55-128", "auto/ethos-u85-256", "ethos_u/ethos-u65-512", "litert/cpu"):
        with pytest.raises(MissingDependencyError, match="dsa-hw setup ethos-u"):
            resolve(device)
    assert latency.main(["--device", "ethos-u55-128"]) == 2
    assert "dsa-hw setup ethos-u" in capsys.readouterr().err


def test_half_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path))
    python_of(environment_folder()).parent.mkdir(parents=True)
    python_of(environment_folder()).touch()
    with pytest.raises(MissingDependencyError, match=r"lacks ai-edge-litert, .*--again"):
        versions()


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
def test_devices_that_do_not_exist(
    device: str, error: type[Exception], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fake(tmp_path, monkeypatch)
    with pytest.raises(error, match=text):
        resolve(device)


def test_target_says_whose_word_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_profile(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path / "home", monkeypatch)
    monkeypatch.setattr(
        ConfigurationBuilder, "check", lambda self, seed: None
    )  # the stand-in has no outputs to compare
    model, inputs = tiny
    groups = find_groups(model, inputs)
    out = tmp_path / "p.sqlite"
    table = profile(model, inputs, "ethos-u55-128", samples=5, holdout=2, out=out, groups=groups)
    assert table.attrs["estimated"] == "estimated by Vela 5.2.0"
    assert table.attrs["prepared"] == "narrowed"
    assert set(table["split"]) == {"dense", "train", "holdout"}
    for _, row in table.iterrows():
        kept = [np.arange(int(row[name])) for name in groups.names]
        indices = sum(len(i) for cuts in groups.slices(kept).values() for i in cuts.values())
        assert row["seconds"] == row["low"] == row["high"] == (1000 * indices or 1e6) / 5e8
    assert load_tables(out).profile["seconds"].tolist() == table["seconds"].tolist()


def test_operations_on_the_cpu_are_refused(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch, "cpu")
    with pytest.raises(MeasurementError, match=r"cannot run 1 operation.*ArgMax: too odd.*no time"):
        measure(*tiny, "ethos-u55-128")


def test_a_network_that_cannot_be_narrowed_is_converted_each_time(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    make_fake(tmp_path, monkeypatch, "rigid")
    model, inputs = tiny
    groups = find_groups(model, inputs)
    builder = ConfigurationBuilder(model, groups, inputs, resolve("ethos-u55-128"))
    assert builder.load(groups.sizes.tolist()).run(1)[0] == 1e6 / 5e8
    assert "PACK 'x': this operator is not supported" in builder.how
    assert "slower but equally accurate" in caplog.text


def test_a_worker_that_dies(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch, "dies")
    with pytest.raises(MeasurementError, match=r"ended at request 'convert'.*out of memory"):
        to_bytes(*tiny)


def test_a_worker_that_babbles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch, "babbles")
    with pytest.raises(MeasurementError, match="answered 'I am no JSON"):
        Worker().ask("forget", model="x")


def test_a_worker_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch)
    worker = Worker()
    with pytest.raises(MeasurementError, match="failed at request 'dance': no dance here"):
        worker.ask("dance")
    assert worker.ask("forget", model="x") == {}  # and goes on
    worker.close()


def test_interrupting_ends_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch, "sleeps")
    worker = Worker()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)  # SIGINT itself may be ignored where tests run in the background
    begin = time.monotonic()
    try:
        threading.Timer(1.0, lambda: signal.pthread_kill(main, signal.SIGUSR1)).start()
        with pytest.raises(KeyboardInterrupt):
            worker.ask("forget", model="x")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert worker.pid is None
    assert time.monotonic() - begin < 60  # it would have slept for ten minutes


def test_files_go_with_their_objects(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch)
    worker = Worker()
    file, reason = convert(worker, *tiny)
    assert reason == ""
    assert file.content() == b"1000000"
    path = worker.folder / file.name
    del file
    assert not path.exists()
    assert not list(worker.folder.glob("*.pt2"))
    worker.close()


def test_integer_inputs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch)
    with pytest.raises(ModelError, match="integers of shape"):
        convert(Worker(), torch.nn.Embedding(4, 2), (torch.zeros(1, 3, dtype=torch.long),))


def _options(*words: str) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    setup.add(parser.add_subparsers())
    return parser.parse_args(["setup", *words])


def test_setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path / "home"))
    pins = tmp_path / "pins.txt"
    pins.write_text("torch==2.13.0\n")
    calls: list[list[str]] = []

    def call(command: list[str], wrong: str) -> None:
        calls.append(command)
        if "pip" in command:
            make_fake(tmp_path / "home", monkeypatch)

    monkeypatch.setattr(setup, "_call", call)
    assert setup.run(_options("ethos-u", "--constraints", str(pins))) == 0
    assert calls[0][1:3] == ["-m", "venv"]
    assert calls[1][calls[1].index("-c") + 1] == str(pins)
    assert calls[1][-len(PACKAGES) :] == list(PACKAGES)
    assert f"torch=={torch.__version__.partition('+')[0]}" in calls[1]
    assert "ready: " in capsys.readouterr().out
    assert setup.run(_options("litert")) == 0  # the same environment: nothing to do
    assert len(calls) == 2
    assert setup.run(_options("litert", "--again")) == 0
    assert len(calls) == 4


def test_setup_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path / "home"))
    with pytest.raises(DsaError, match="no such file"):
        setup.run(_options("ethos-u", "--constraints", str(tmp_path / "nowhere.txt")))
    with pytest.raises(MissingDependencyError, match=r"cannot be made .* ended with 3"):
        setup._call(["sh", "-c", "exit 3"], "an environment cannot be made")


def test_the_extra_is_what_setup_installs() -> None:
    project = tomllib.loads((Path(setup.__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["ethos-u"] == list(PACKAGES)


@real
def test_narrowed_is_as_converted() -> None:
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
    target.worker.close()
