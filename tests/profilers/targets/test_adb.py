"""A phone over adb, with a fake adb executable."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import profilers
from dsa_hw.errors import MeasurementError, MissingDependencyError, ProfileError
from profilers.measuring.bench import DENSE, Bench
from profilers.measuring.rules import MeasuringRules
from profilers.networks.loaded import Loadable
from profilers.targets import resolve
from profilers.targets.adb import Adb

# The phone is a folder; times depend on the size of the file and on the threads, so that the truth is known.
FAKE = """#!{python} -SE
import hashlib, os, re, shlex, shutil, sys, time
root = {root!r}
words = sys.argv[1:]
if os.path.exists(os.path.join(root, "hangs")):
    time.sleep(600)
while os.path.exists(os.path.join(root, "floods")):
    os.write(1, b"x" * 65536)
open(os.path.join(root, "log"), "a").write(shlex.join(words) + "\\n")
assert words[:2] == ["-s", "PHONE1"], words
where = lambda path: os.path.join(root, path.lstrip("/"))
if words[2] == "get-state":
    if os.path.exists(where("offline")):
        sys.exit("error: device unauthorized.")
    print("device")
elif words[2] == "push":
    if os.path.exists(where("full")):
        sys.exit("adb: error: failed to copy: No space left on device")
    shutil.copy(words[3], where(words[4]))
elif words[2] == "shell":
    for command in words[3].split("; "):
        parts = shlex.split(command.replace("2>&1", ""))
        if parts[0] == "test":
            sys.exit(0 if os.path.exists(where(parts[2])) else 1)
        elif parts[0] == "mkdir":
            os.makedirs(where(parts[2]), exist_ok=True)
        elif parts[0] == "touch":
            os.utime(where(parts[1]))
        elif parts[0] == "cd":
            folder = where(parts[1])
            for name in sorted(os.listdir(folder)) if parts[3] == "stat" else ():
                about = os.stat(os.path.join(folder, name))
                print(int(about.st_mtime), about.st_size, name)
            for name in parts[5:] if parts[3] == "rm" else ():
                os.unlink(os.path.join(folder, name))
        elif parts[0] == "sha256sum":
            if not os.path.exists(where(parts[1])):
                sys.exit("sha256sum: no such file")
            print(hashlib.sha256(open(where(parts[1]), "rb").read()).hexdigest(), parts[1])
        elif parts[0] == "getprop":
            print({{"ro.product.model": "Pixel 0", "ro.soc.model": "Tensor"}}.get(parts[1], ""))
        elif parts[0] == "echo":
            print(parts[1])
        elif parts[0].endswith("benchmark_model"):
            flags = dict(p.lstrip("-").split("=") for p in parts[1:])
            data = open(where(flags["graph"]), "rb").read()
            if data == b"broken":
                print("ERROR: The model is not a valid Flatbuffer file")
            else:
                us = 1e4 * len(data) / int(flags["num_threads"])
                print("INFO: count=%s avg=1" % flags["warmup_runs"])
                print("INFO: Inference timings in us: Init: 5685, First inference: 18535, Warmup (avg): 14462.3, "
                      "Inference (avg): %s" % (data[4:].decode() if data[:4] == b"say " else "%g" % us))
        else:
            sys.exit(127)
"""


@pytest.fixture
def phone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "phone"
    binary = root / "data/local/tmp/benchmark_model"
    binary.parent.mkdir(parents=True)
    binary.write_bytes(b"a binary")
    adb = tmp_path / "bin" / "adb"
    adb.parent.mkdir()
    adb.write_text(FAKE.format(python=sys.executable, root=str(root)))
    adb.chmod(adb.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(adb.parent))
    return root


def convert(module: Any, inputs: tuple[Any, ...]) -> bytes:
    """Not a converter: as many bytes as the module has channels, in hundreds."""
    return b"x" * (sum(p.numel() for p in module.parameters()) // 100)


def target(**options: Any) -> Adb:
    return Adb("adb:PHONE1?runtime=litert", **{"convert": convert, **options})


def test_network_is_pushed_once_and_timed_on_the_phone(phone: Path) -> None:
    found = target(threads=2)
    found.check()
    assert found.title == "litert/adb:PHONE1 fp32 x2"
    loaded = found.load(b"network", ())
    name = hashlib.sha256(b"network").hexdigest()
    assert (phone / f"data/local/tmp/dsa_hw/{name}.tflite").read_bytes() == b"network"
    assert loaded.run(3) == pytest.approx([0.035] * 3)
    dense = found.load(b"dense...", ())
    seconds = found.sequence([(dense, 1), (dense, 1), (loaded, 9), (dense, 4)])
    assert [s.tolist() for s in seconds] == [pytest.approx([t]) for t in (0.04, 0.04, 0.035, 0.04)]
    last = (phone / "log").read_text().splitlines()[-1]
    assert last.count("--graph=") == 4, "a short round is one command"
    assert "--warmup_runs=3 --num_runs=9" in last
    assert "--num_threads=2" in last
    long = found.sequence([(dense, 1), (loaded, 1)] * 20)
    assert [float(s[0]) for s in long] == pytest.approx([0.04, 0.035] * 20)
    assert [line.count("--graph=") for line in (phone / "log").read_text().splitlines()[-3:]] == [16, 16, 8]
    found.load(b"network", ())
    assert (phone / "log").read_text().count("push") == 2, "what is there is not sent again"
    (phone / f"data/local/tmp/dsa_hw/{name}.tflite").write_bytes(b"damaged")
    found.load(b"network", ())
    assert (phone / f"data/local/tmp/dsa_hw/{name}.tflite").read_bytes() == b"network"


def test_environment_of_a_profile_says_how_it_was_tested(
    phone: Path, tiny: tuple[nn.Module, tuple[torch.Tensor, ...]], lenient: MeasuringRules
) -> None:
    found = profilers.profile(*tiny, target=target(), samples=3, holdout=0, grid=8, rules=lenient, time_limit=60)
    table = found.table
    assert len(table) == 3
    widths = table[list(found.names)].to_numpy()
    assert (np.diff(table["seconds"].to_numpy()[np.argsort(widths.sum(axis=1))]) >= 0).all()
    about = found.environment
    assert "fake adb executable" in about["adb"]
    assert (about["board"], about["cpu"], about["kernel"]) == ("Pixel 0", "Tensor", "not visible")
    assert about["python"] == "not visible", "nothing of this computer passes for the phone's"


def test_bench_measures_ratios_on_the_phone(phone: Path) -> None:
    found = target()
    networks = {name: Loadable(partial(found.load, name.encode(), ())) for name in ("a", "bcd")}
    rules = MeasuringRules(rounds=2, least_seconds=0.0)
    measured = Bench(found, rules=rules).measure(networks, Loadable(partial(found.load, b"dense", ())))
    assert {name: m.seconds for name, m in measured.items()} == pytest.approx({"a": 0.01, "bcd": 0.03, DENSE: 0.05})
    assert measured["bcd"].ratio.value == pytest.approx(0.6)


def test_errors_name_the_remedy(phone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_HW_CACHE", str(phone / "nothing"))
    with pytest.raises(MissingDependencyError, match="dsa-hw setup ethos-u"):
        resolve("adb:PHONE1?runtime=litert")
    with pytest.raises(MeasurementError, match="not a valid Flatbuffer"):
        target().load(b"broken", ()).run(1)
    (phone / "full").touch()
    with pytest.raises(MeasurementError, match="No space left on device"):
        target().load(b"another", ())
    (phone / "data/local/tmp/benchmark_model").unlink()
    with pytest.raises(MissingDependencyError, match="push benchmark_model"):
        target().check()
    (phone / "offline").touch()
    with pytest.raises(MissingDependencyError, match=r"unauthorized.*USB debugging"):
        target().check()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingDependencyError, match="platform-tools"):
        target().check()


@pytest.mark.parametrize("said", ["1e999", "1.2.3", ".", "-5", "nan", "inf", "0", "1e-300", "1e30", "", "5x", "1e"])
def test_invalid_times_are_errors(phone: Path, said: str) -> None:
    found = target()
    loaded = found.load(f"say {said}".encode(), ())
    with pytest.raises(MeasurementError, match=r"benchmark_model on PHONE1 (gave no time|sent an invalid answer)"):
        found.sequence([(loaded, 1)])


@pytest.mark.parametrize("said", ["12", "12.5", "1.2e+4", "3e2"])
def test_times_of_benchmark_model_are_read(phone: Path, said: str) -> None:
    assert target().load(f"say {said}".encode(), ()).run(1) == pytest.approx([1e-6 * float(said)])


def test_phone_that_hangs_or_floods_is_an_error(phone: Path) -> None:
    found = target()
    (phone / "hangs").touch()
    with pytest.raises(MeasurementError, match="did not answer for 0 s"):
        found._shell("test -x x", limit=0.3)
    (phone / "hangs").unlink()
    (phone / "floods").touch()
    with pytest.raises(MeasurementError, match="printed more than"):
        found.load(b"network", ())


def test_files_on_the_phone_have_a_limit_and_an_age(phone: Path) -> None:
    folder = phone / "data/local/tmp/dsa_hw"
    found = Adb("adb:PHONE1?room=1", convert=convert)
    assert found.name.endswith("&room=1")
    sizes = {i: bytes([i]) * 400_000 for i in range(4)}
    names = {i: f"{hashlib.sha256(data).hexdigest()}.tflite" for i, data in sizes.items()}

    def there() -> set[int]:
        return {i for i, name in names.items() if (folder / name).exists()}

    kept = found.load(sizes[0], ())
    found.load(sizes[1], ())
    now = time.time()
    os.utime(folder / names[0], (now - 200, now - 200))
    os.utime(folder / names[1], (now - 100, now - 100))
    (folder / "other.txt").touch()
    other = found.load(sizes[2], ())
    assert there() == {0, 2}, "the least recently used that is not needed is deleted"
    with pytest.raises(MeasurementError, match="1 MB are allowed"):
        found.load(sizes[3], ())
    del kept, other
    for i in (0, 2):
        os.utime(folder / names[i], (1, 1))
    found.load(b"small", ())
    assert there() == set(), "what was not used for a month is deleted"
    assert (folder / "other.txt").exists(), "other files are not touched"


@pytest.mark.parametrize(
    "address",
    [
        "adb:X?room=0",
        "adb:X?room=many",
        "adb:",
        "adb:-d",
        "adb:a b",
        "adb:X?runtime=torch",
        "adb:X?shell=sh",
        "adb:X?y",
    ],
)
def test_invalid_addresses_are_errors(address: str) -> None:
    with pytest.raises(ProfileError):
        Adb(address)
