"""Fleets: workers in processes of their own, one of which dies; types; restarts; TLS; one network for two devices."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

pytest.importorskip("distributed")

import dask
import yaml
from distributed import Client, LocalCluster, Scheduler, Security

import budgets
import dsa_hw
import profilers
from dsa_hw.errors import MeasurementError, MissingDependencyError, ProfileError
from dsa_hw.profiles import Profile
from profilers import latency
from profilers.fleet import members, on_worker, profile, profile_fleet, tasks
from profilers.fleet.bench import FleetBench
from profilers.fleet.members import Fleet, FleetMember, group_by_type
from profilers.fleet.profile import check_address
from profilers.measuring.measurement import Samples
from profilers.measuring.rules import MeasuringRules
from profilers.networks.onnx_narrow import template
from profilers.storage.store import Store
from tests.fakes import fleet_board
from tests.fakes.outputs import printed_json

Network = tuple[nn.Module, tuple[torch.Tensor, ...]]
ROOT = Path(__file__).parents[3]
RULES = MeasuringRules(least_seconds=0.0)
SLOW = 1.2
_MADE: dict[str, Any] = {}
SMALL: dict[str, Any] = {"samples": 8, "holdout": 2, "grid": 4, "time_limit": 90.0, "rules": RULES, "name": "tiny"}


@pytest.fixture(autouse=True)
def exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has the same network: it is traced and exported in the first one."""

    def remembered(name: str, real: Any) -> Any:
        def once(*arguments: Any, **options: Any) -> Any:
            if name not in _MADE:
                _MADE[name] = real(*arguments, **options)
            return _MADE[name]

        return once

    monkeypatch.setattr(template, "export", remembered("export", template.export))
    monkeypatch.setattr(profile, "find_groups", remembered("groups", profile.find_groups))


class Processes:
    """A scheduler and workers, each a process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "scheduler.json"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._start("scheduler", "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--no-show",
                    "--scheduler-file", str(self.file))  # fmt: skip
        _until(self.file.exists)

    @property
    def address(self) -> str:
        return str(json.loads(self.file.read_text())["address"])

    def worker(self, name: str, resources: str, **variables: str) -> None:
        self._start(name, "worker", "--scheduler-file", str(self.file), "--no-nanny", "--nthreads", "1", "--name", name,
                    "--resources", resources, "--no-dashboard", "--local-directory", str(self.folder / name),
                    "--preload", "tests.profilers.fleet.mortal",
                    DSA_HW_CACHE=str(self.folder / f"cache-{name}"), DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED="False",
                    **variables)  # fmt: skip

    def _start(self, name: str, *command: str, **variables: str) -> None:
        log = (self.folder / f"{name}.log").open("wb")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        self.running[name] = subprocess.Popen(
            [sys.executable, "-m", "dask", *command], stdout=log, stderr=log, env=environment
        )

    def wait(self) -> None:
        with Client(self.address, set_as_default=False) as client:
            client.wait_for_workers(len(self.running) - 1, timeout=60)

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait()


def _until(true: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    made = Processes(tmp_path_factory.mktemp("fleet"))
    try:
        made.worker("one", "boardformula/cpu=1,onnxruntime/cpu=1")
        made.worker("mortal", "boardformula/cpu=1", FLEET_DIES_AT="1")
        made.worker("slow", "boardformula/cpu=1", FLEET_FACTOR=str(SLOW))
        made.wait()
        yield made
    finally:
        made.close()


@pytest.fixture
def here() -> Iterator[str]:
    """The address of a fleet of two workers in this process."""
    resources = {"boardformula/cpu": 1, "stepped/cpu": 1}
    with (
        dask.config.set({"distributed.worker.profile.enabled": False}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, protocol="tcp://", host="127.0.0.1",
            dashboard_address=":0", resources=resources,
        ) as cluster,
    ):  # fmt: skip
        yield cluster.scheduler_address


def by_hand(row: Any, names: list[str], sizes: list[int], per: float = 1e-7) -> float:
    stem, inner = (int(row[name]) for name, _ in sorted(zip(names, sizes, strict=True), key=lambda item: item[1]))
    return 1e-3 + per * (27 * stem + 18 * stem * inner + 5 * stem)


def check_profile(found: Profile, between: tuple[float, float]) -> tuple[float, list[float]]:
    """Check size and scale of a profile; return the dense network's time, and the true ratios to it."""
    table, names, sizes = found.table, list(found.names), list(found.sizes)
    assert table["split"].value_counts().to_dict() == {"train": 7, "holdout": 2, "dense": 1}
    dense = float(table[table["split"] == "dense"]["seconds"].iloc[0])
    true = by_hand(dict(zip(names, sizes, strict=True)), names, sizes)
    assert 0.997 * between[0] * true < dense < 1.003 * between[1] * true
    return dense, [by_hand(row, names, sizes) / true for _, row in table.iterrows()]


def test_fleet_with_a_lost_and_a_slower_board(
    processes: Processes,
    tiny: Network,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "p.sqlite"
    real, unfinished = FleetBench.measure, []

    def measure(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        unfinished.extend(name for name, m in found.items() if not m.finished)
        return found

    monkeypatch.setattr(FleetBench, "measure", measure)
    with caplog.at_level(logging.INFO):
        (found,) = profile_fleet(*tiny, processes.address, "boardformula/cpu", out=out, **SMALL).values()
    assert processes.running["mortal"].wait(10) == 9
    assert not unfinished, "another board measured the batch of the lost one"
    assert "mortal" in caplog.text
    assert "is gone; other boards measure its configurations." in caplog.text
    assert re.search(r"differ in speed by more than 10%.* takes \S+ ms on one, \S+ ms on slow\.", caplog.text)
    assert found.target == "boardformula/cpu fp32 x1"
    # Every board compares with its own runs of the dense network: the ratios are those of the formula.
    dense, truth = check_profile(found, between=(1.0, SLOW))
    assert found.table["seconds"].to_numpy() / dense == pytest.approx(truth, rel=0.003)
    stored = profilers.load_tables(out, rules=RULES)
    assert len(stored.profiles) == 1
    # The same command again: the type is recognised by its environment, and nothing is measured twice.
    (again,) = profile_fleet(*tiny, processes.address, "boardformula/cpu", out=out, **SMALL).values()
    assert len(profilers.load_tables(out, rules=RULES).samples) == len(stored.samples)
    pd.testing.assert_frame_equal(again.table, found.table)


def test_onnxruntime_on_a_worker(processes: Processes, tiny: Network, lenient: MeasuringRules, tmp_path: Path) -> None:
    rules = {**SMALL, "samples": 3, "holdout": 1, "rules": lenient}
    (found,) = profile_fleet(*tiny, processes.address, "onnxruntime/cpu", out=tmp_path / "p.sqlite", **rules).values()
    assert len(found) == 4
    assert found.target == "onnxruntime/cpu fp32 x1"
    assert found.agreement is not None
    assert found.agreement < 1e-4
    assert (found.table["seconds"] > 0).all()
    assert found.environment["onnxruntime"]


def test_interrupted_run_continues(here: str, tiny: Network, tmp_path: Path) -> None:
    out = tmp_path / "p.sqlite"
    seen = []

    def impatient(event: Any) -> None:
        seen.append(event.stage)
        if seen.count("measuring") == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile_fleet(*tiny, here, "boardformula/cpu", out=out, listener=impatient, **SMALL)
    with Store(out) as store:
        before = store.table("samples")[1]
    assert before
    (found,) = profile_fleet(*tiny, here, "boardformula/cpu", out=out, **SMALL).values()
    dense, truth = check_profile(found, between=(1.0, 1.0))
    assert found.table["seconds"].to_numpy() / dense == pytest.approx(truth, rel=0.003)
    with Store(out) as store:
        after = store.table("samples")[1]
    assert after[: len(before)] == before
    twice = {row[2] for row in before} & {row[2] for row in after[len(before) :]}
    assert len(twice) == 1, "what was stored is not measured again, except the dense network beside the others"


def test_one_network_meets_the_budgets_of_two_devices(
    here: str, tiny: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**SMALL, "samples": 14, "holdout": 3}
    profiles = profile_fleet(*tiny, here, "auto/any", out=tmp_path / "p.sqlite", **options)
    assert set(profiles) == {"boardformula/cpu fp32 x1", "stepped/cpu fp32 x1"}
    dense = {kind: float(p.table[p.table["split"] == "dense"]["seconds"].iloc[0]) for kind, p in profiles.items()}
    one, two = (f"{kind}/cpu" for kind in ("boardformula", "stepped"))
    limits = {one: 0.75 * dense[f"{one} fp32 x1"], two: 0.6 * dense[f"{two} fp32 x1"]}
    wanted = [
        budgets.LatencyBudget(f"{1e3 * limits[target]!r}ms", target=target, profile=profiles[f"{target} fp32 x1"])
        for target in (one, two)
    ]
    monkeypatch.setattr(fleet_board.Formula, "artefact", "module")  # no exports for every correction
    result = dsa_hw.allocate(
        tiny[0], wanted, example_inputs=tiny[1], method="uniform", progress=False,
        profiling=dsa_hw.ProfileOptions(rules=RULES), refinement=dsa_hw.RefinementOptions(minimum=0.1),
    )  # fmt: skip
    assert result.certificate.verdict == "MET", str(result.certificate)
    assert [entry.target for entry in result.certificate.entries] == ["boardformula/cpu fp32 x1", "stepped/cpu fp32 x1"]
    for entry, target in zip(result.certificate.entries, (one, two), strict=True):
        measured = profilers.measure(result.model, tiny[1], target, rules=RULES).seconds
        assert measured == pytest.approx(entry.measured, rel=0.003)
        assert measured <= limits[target]
    assert max(entry.utilisation for entry in result.certificate.entries) > 0.8, "one of the two decides"


def test_command_prints_every_type(here: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--model", "tests.fakes.fleet_networks:tiny", "--fleet", here, "--device", "cpu"]
    rest = ["--samples", "4", "--holdout", "1", "--grid", "4", "--time-limit", "60"]
    common += ["--out", str(tmp_path / "p.sqlite")]
    command = [*common, "--runtime", "boardformula", *rest]
    assert latency.main([*command, "--json"]) == 0
    (kind,) = printed_json(capsys, "profile-fleet")["kinds"]
    assert kind["kind"] == kind["target"] == "boardformula/cpu fp32 x1"
    assert len(kind["configurations"]) == 5
    assert latency.main(command) == 0
    assert capsys.readouterr().out.startswith("kind: boardformula/cpu fp32 x1\nnetwork")
    assert latency.main([*common, "--runtime", "openvino"]) == 2
    text = capsys.readouterr().err
    assert "2 workers, which declare boardformula/cpu, stepped/cpu" in text
    assert '--resources "openvino/cpu=1"' in text
    assert latency.main([*command, "--self-check"]) == 2


def test_boards_that_cannot_measure_are_not_used(
    here: str, tiny: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(MeasurementError, match="No board of the fleet can measure"):
        profile_fleet(*tiny, here, "boardformula/cpu", **{**SMALL, "precision": "fp64"})
    assert "got 'fp64'" in caplog.text
    monkeypatch.setattr(fleet_board.Formula, "artefact", "module")
    with pytest.raises(MeasurementError, match="No board of the fleet can measure"):
        profile_fleet(*tiny, here, "boardformula/cpu", **SMALL)
    assert "Only ONNX files are sent to boards" in caplog.text
    monkeypatch.setattr(fleet_board.Formula, "artefact", "onnx")

    def broken(*_: Any) -> Any:
        raise ProfileError("this network is refused")

    monkeypatch.setattr(on_worker, "_inputs", broken)
    with pytest.raises(MeasurementError, match=r"cannot measure\. this network is refused"):
        profile_fleet(*tiny, here, "boardformula/cpu", **SMALL)


def test_grid_is_found_on_a_board(here: str, tiny: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_board.Stepped, "base", 0.0)
    monkeypatch.setattr(fleet_board.Stepped, "multiple", 4)
    (found,) = profile_fleet(
        *tiny, here, "stepped/cpu", **{**SMALL, "samples": 3, "holdout": 0, "grid": "auto"}
    ).values()
    assert set(found.grid.values()) == {4}
    assert found.grid_evidence


def described(name: str, **environment: str) -> FleetMember:
    about: dict[str, Any] = {"environment": {"target": "t", "cpu": "A72", "kernel": "6.1", **environment}}
    about |= {"title": "t", "estimated": None, "slow_to_load": False, "grid": None, "watched": True}
    return FleetMember(f"tcp://{name}", "boardformula/cpu", name, about)


def test_boards_are_grouped_by_environment() -> None:
    found = [described("c", kernel="6.2"), described("b"), described("a"), described("d", kernel="6.2", cpu="A76")]
    types = group_by_type(found)
    assert [sorted(m.name for m in one.members.values()) for one in types] == [["a", "b"], ["c"], ["d"]]
    assert types[0].environment == found[1].about["environment"]
    assert [str(one) for one in types] == ["t, cpu A72, kernel 6.1", "t, cpu A72, kernel 6.2", "t, cpu A76, kernel 6.2"]
    assert [str(one) for one in group_by_type(found[:3])] == ["t, kernel 6.1", "t, kernel 6.2"], "only what differs"
    assert [str(one) for one in group_by_type(found[1:3])] == ["t"]


class Scripted:
    """A client whose workers, given with their kernels, come and go, and describe themselves at once."""

    def __init__(self, **kernels: str) -> None:
        self.kernels = kernels
        self.answers: dict[str, Any] = {}  # by worker, what it returns instead of a description; `...`: nothing
        self.scheduler = SimpleNamespace(identity=self.identity)

    def sync(self, function: Any, callback_timeout: float, **options: Any) -> Any:
        return function(**options)

    def identity(self, n_workers: int) -> dict[str, Any]:
        assert n_workers == -1, "all of them"
        about = {"resources": {"boardformula/cpu": 1.0}, "nthreads": 2}
        return {"workers": {name: {**about, "name": name} for name in self.kernels}}

    def submit(self, function: Any, *_: Any, workers: list[str], **options: Any) -> Any:
        assert function is tasks.describe
        assert options["resources"] == {"boardformula/cpu": 1}
        about = self.answers.get(workers[0], described(workers[0], kernel=self.kernels[workers[0]]).about)
        return SimpleNamespace(
            done=lambda: about is not ..., status="finished", result=lambda: about, cancel=lambda: None
        )


def test_members_are_removed_and_added(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(members, "_UPDATE_EVERY", 0.0)
    client = Scripted(a="6.1", b="6.1", z="6.2")
    fleet = Fleet(client, "auto/any", "fp32", 1)
    kind, other = fleet.discover()
    assert [m.name for m in other.members.values()] == ["z"]
    assert "z is not of the type t, kernel 6.1: kernel 6.1 -> 6.2" in caplog.text
    assert "runs Dask's profiler" in caplog.text
    assert "--nthreads 1" in caplog.text
    client.kernels = {"b": "6.1", "c": "6.1", "odd": "5.0"}
    fleet.update()
    fleet.update()
    assert sorted(b.name for b in kind.members.values()) == ["b", "c"]
    assert not other.members
    assert "a (boardformula/cpu at a) is gone" in caplog.text
    assert "odd (boardformula/cpu at odd) has a new type" in caplog.text
    client.kernels = {"a": "6.1"}
    fleet.update()
    assert [b.name for b in kind.members.values()] == ["a"]


def test_boards_that_hang_or_lie_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(members, "_DESCRIBE", 0.1)
    client = Scripted(hangs="6.1", lies="6.1", good="6.1")
    client.answers = {"hangs": ..., "lies": {"environment": 1}}
    (board_type,) = Fleet(client, "auto/any", "fp32", 1).discover()
    assert [m.name for m in board_type.members.values()] == ["good"]
    assert "hangs (boardformula/cpu at hangs) is not used: it did not describe itself within 0.1 s" in caplog.text
    assert "lies (boardformula/cpu at lies) is not used: Invalid answer" in caplog.text
    client.answers["good"] = None
    with pytest.raises(MeasurementError, match="No board of the fleet can measure"):
        Fleet(client, "auto/any", "fp32", 1).discover()


@pytest.mark.parametrize("workers", [None, [], {"a": None}, {"a": {"nthreads": "many"}}, {"a": {"resources": 1}}])
def test_invalid_answer_of_the_scheduler_is_an_error(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Scripted()
    monkeypatch.setattr(client, "sync", lambda *_, **__: {"workers": workers})
    with pytest.raises(MeasurementError, match="scheduler of the fleet sent an invalid answer"):
        Fleet(client, "auto/any", "fp32", 1).discover()


def test_samples_and_inputs_round_trip_as_plain_data(tiny: Network) -> None:
    samples = Samples(
        np.asarray([1.1, 1.2]), np.asarray([1.0, 1.3]), np.asarray([1.5, 1.7]), np.asarray([0, 3]), np.asarray([7, 7]),
        {"celsius": np.asarray([50.0, 51.0])},
    )  # fmt: skip
    text = json.dumps(on_worker.pack_samples(samples))
    back = on_worker.unpack_samples(json.loads(text))
    for name in ("values", "before", "after", "block", "sitting"):
        assert np.array_equal(getattr(back, name), getattr(samples, name))
        assert getattr(back, name).dtype == getattr(samples, name).dtype
    assert {name: values.tolist() for name, values in back.extra.items()} == {"celsius": [50.0, 51.0]}
    half = (torch.randn(2, 3).half(), torch.arange(4))
    packed = on_worker.pack_inputs(half)
    assert all(isinstance(part, (str, list, bytes)) for one in packed for part in one)
    assert all(torch.equal(a, b) for a, b in zip(on_worker._inputs(packed), half, strict=True))


@pytest.mark.parametrize(
    "address",
    [
        "tcp://192.0.2.1:8786",
        "tcp://scheduler:8786",
        "scheduler:8786",
        "tcp://[2001:db8::1]:8786",
        "tcp://0.0.0.0:8786",
        "tcp://localhost.example:8786",
        "tcp://127.0.0.1.example:8786",
    ],
)
def test_plain_tcp_to_another_machine_is_refused(
    address: str, tiny: Network, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ProfileError, match=r"neither encrypted nor authenticated.*insecure=True"):
        profile_fleet(*tiny, address)
    check_address(address, insecure=True)
    out = str(tmp_path / "p.sqlite")
    assert latency.main(["--model", "resnet18", "--fleet", address, "--out", out]) == 2
    assert "--insecure" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:8786", "tcp://127.8.0.1:1", "tcp://localhost:8786", "tcp://[::1]:8786", "tls://a:8786"]
)
def test_loopback_and_tls_need_no_option(address: str) -> None:
    check_address(address)


def test_insecure_connection_is_made_where_it_is_asked_for(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_loopback", lambda host: False)  # as if the scheduler were on another computer
    with pytest.raises(ProfileError, match="neither encrypted"), profile.connected(here):
        pass
    with profile.connected(here, insecure=True) as client:
        assert len(client.scheduler_info()["workers"]) == 2


def test_insecure_without_a_fleet_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert latency.main(["--model", "resnet18", "--insecure"]) == 2
    assert "--insecure is an option of --fleet" in capsys.readouterr().err


def test_invalid_addresses_and_missing_packages_are_errors(tiny: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("http://x:1", "tcp://x", "tcp://:8786", "tcp://x:port", "inproc://x:1"):
        with pytest.raises(ProfileError, match="must be tcp://scheduler:8786"):
            check_address(address)
    with pytest.raises(ProfileError, match="at least 2"):
        profile_fleet(*tiny, "tcp://127.0.0.1:1", samples=1)
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'dsa-hw\[fleet\]'"):
        profile_fleet(*tiny, "tcp://127.0.0.1:1")


def test_tasks_import_neither_dask_nor_torch() -> None:
    """The command does without Dask, and Dask's scheduler, which imports the tasks, without torch."""
    code = "import sys, profilers.latency, profilers.fleet.tasks; sys.exit(bool({'dask', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


ROLES = ("scheduler", "worker", "client")


def certificates(folder: Path) -> dict[str, Any]:
    """Make an authority and certificates with the script of docs/guide/fleets.md; return its settings of Dask."""
    folder.mkdir()
    page = (ROOT / "docs/guide/fleets.md").read_text()
    (script,) = re.findall(r"```bash\n((?:(?!```).)*?openssl.*?)```", page, re.DOTALL)
    subprocess.run(["bash", "-e", "-c", script], check=True, cwd=folder, capture_output=True)
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    settings: dict[str, Any] = yaml.safe_load(text.replace("/etc/dsa-hw-fleet", str(folder)))
    pairs = [settings["distributed"]["comm"]["tls"][role] for role in ROLES]
    assert len({file for pair in pairs for file in pair.values()}) == 2 * len(ROLES), "roles share nothing"
    assert all(Path(file).is_file() for pair in pairs for file in pair.values())
    return {"distributed": dask.config.merge(dask.config.config, settings)["distributed"]}  # as Dask reads the file


def test_tls_uses_the_configuration_of_dask(tiny: Network, tmp_path: Path) -> None:
    settings, strangers = certificates(tmp_path / "ours"), certificates(tmp_path / "theirs")
    with dask.config.set(settings):
        cluster = LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, protocol="tls://", host="127.0.0.1",
            dashboard_address=":0", security=Security(), resources={"boardformula/cpu": 1},
        )  # fmt: skip
    with cluster:
        address = cluster.scheduler_address
        assert address.startswith("tls://")
        with dask.config.set(settings):
            few = {**SMALL, "samples": 3, "holdout": 0}
            (table,) = profile_fleet(*tiny, address, "boardformula/cpu", **few).values()
            assert len(table) == 3
            with pytest.raises(MeasurementError, match="Cannot reach the scheduler"):
                profile_fleet(*tiny, address.replace("tls", "tcp"), "boardformula/cpu", **SMALL)
        with pytest.raises(MeasurementError, match="certificates in Dask's configuration"):
            profile_fleet(*tiny, address, "boardformula/cpu", **SMALL)
        with dask.config.set(strangers), pytest.raises(MeasurementError, match="Cannot reach the scheduler"):
            profile_fleet(*tiny, address, "boardformula/cpu", **SMALL)


def test_certificate_of_a_client_cannot_be_a_member(tmp_path: Path) -> None:
    """It is for clients only: nobody can pass for the scheduler or a board with it."""
    settings = certificates(tmp_path / "ours")
    tls = settings["distributed"]["comm"]["tls"]
    impostor = Security(
        tls_ca_file=tls["ca-file"],
        tls_scheduler_cert=tls["client"]["cert"],
        tls_scheduler_key=tls["client"]["key"],
        require_encryption=True,
    )

    async def serve_until(done: threading.Event) -> None:
        async with Scheduler(
            protocol="tls", host="127.0.0.1", port=0, dashboard_address=":0", security=impostor
        ) as scheduler:  # fmt: skip
            address.append(scheduler.address)
            while not done.is_set():
                await asyncio.sleep(0.05)

    address: list[str] = []
    done = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve_until(done)))
    thread.start()
    try:
        _until(lambda: bool(address))
        with (
            dask.config.set(settings),
            pytest.raises(MeasurementError, match=r"Cannot reach the scheduler"),
            profile.connected(address[0]),
        ):
            pass
    finally:
        done.set()
        thread.join()
