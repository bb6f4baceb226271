"""One ``log=`` for every back end: the adapters write what the records say, to back ends on this computer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dsa_hw
from dsa_hw.errors import DsaError
from dsa_hw.integrations.loggers import MLflowLog, TensorBoardLog, WandbLog
from dsa_hw.utils.records import numbers_in

Records = list[dict[str, Any]]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(128, 4)).eval()


def batches(model: nn.Module, count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    images = torch.randn(count, 64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return [(x, model(x).argmax(1)) for x in images]


@pytest.fixture(scope="module")
def records() -> Records:
    """The records of an allocation."""
    model, found = network(), []
    val = batches(model)
    result = dsa_hw.allocate(
        model, "flops=50%", val=val, options={"steps": 6}, progress=False, log=found.append
    )  # fmt: skip
    assert [r["loss"] for r in found if r["stage"] == "allocating"] == list(result.history["loss"])
    assert found[-1]["verdict"] == str(result.certificate.verdict)
    return found


def test_records_are_plain_and_cover_every_stage(records: Records) -> None:
    assert [r["step"] for r in records if r["stage"] == "allocating"] == [1, 2, 3, 4, 5, 6]
    assert {r["stage"] for r in records} == {"stages", "allocating", "measuring", "result"}
    assert any("allocation" in r["begins"] for r in records if r["stage"] == "stages")
    for record in records:
        assert isinstance(record["step"], int)
        json.dumps(record, allow_nan=True)  # plain data
    (last,) = [r for r in records if r["stage"] == "measuring" and r["verdict"] == "MET"][-1:]
    assert last["used_0"] <= 1


def test_trainer_logs_epochs_and_steps() -> None:
    model, found = network(), []
    groups = dsa_hw.find_groups(model, torch.zeros(1, 3, 8, 8))
    data, recipe = batches(model, 9), dsa_hw.Recipe(warm_up=0.5, allocation=1, finetune=0.5, lr=0.01)
    done = dsa_hw.Trainer(model, groups, "flops=50%", data[:6], data[6:], recipe, log=found.append).run()
    epochs = [r for r in found if r["stage"] == "training"]
    assert [r["loss"] for r in epochs] == list(done.log["loss"])
    assert [r["loss"] for r in found if r["stage"] == "allocating"] == list(done.allocator.history["loss"])


def test_minimize_logs_every_limit() -> None:
    model, found = network(), []
    images = torch.randn(400, 3, 8, 8)
    val = [(images, model(images).argmax(1))]
    result = dsa_hw.minimize(model, "flops", "60%", val=val, method="uniform", most=2, progress=False, log=found.append)
    limits = [r for r in found if r["stage"] == "limits"]
    assert sorted(r["share"] for r in limits) == sorted(result.front["share"])


def test_failing_log_does_not_end_the_work(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def log(record: dict[str, Any]) -> None:
        calls.append(record)
        raise ConnectionError("the server is gone")

    model = network()
    options: dict[str, Any] = {"example_inputs": torch.zeros(1, 3, 8, 8), "method": "uniform", "recovery": "none"}
    dsa_hw.allocate(model, "flops=50%", progress=False, log=log, **options)
    assert len(calls) == 1
    assert "ConnectionError: the server is gone" in caplog.text
    with pytest.raises(DsaError, match="`log` must be a function"):
        dsa_hw.allocate(model, "flops=50%", progress=False, log="tensorboard", **options)  # type: ignore[arg-type]


def expected(records: Records) -> dict[str, list[tuple[int, float]]]:
    """Return step and value of every metric."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in numbers_in(record).items():
            found.setdefault(f"{record['stage']}/{name}", []).append((record["step"], value))
    return found


def assert_same(found: dict[str, list[tuple[int, float]]], wanted: dict[str, list[tuple[int, float]]]) -> None:
    assert set(wanted) <= set(found)
    for name, points in wanted.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        for (_, a), (_, b) in zip(found[name], points, strict=True):
            assert math.isclose(a, b, rel_tol=1e-6), name


def test_tensorboard_has_all_numbers_and_texts(records: Records, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'dsa-hw[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TensorBoardLog(tmp_path)
    for record in records:
        log(record)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert_same(scalars, expected(records))
    assert "result/verdict/text_summary" in events.Tags()["tensors"]


def test_mlflow_has_all_numbers_and_texts(records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(tmp_path.as_uri())
    try:
        log = MLflowLog("pruning")
        run = mlflow.active_run().info.run_id
        for record in records:
            log(record)
        client = mlflow.MlflowClient()
        wanted = expected(records)
        found = {name: [(m.step, m.value) for m in client.get_metric_history(run, name)] for name in wanted}
        assert_same(found, wanted)
        assert client.get_run(run).data.tags["result/verdict"] == "MET"
    finally:
        mlflow.end_run()
        mlflow.set_tracking_uri(before)


class StandInRun:
    """What `WandbLog` uses of a run of wandb."""

    def __init__(self) -> None:
        self.logged: Records = []
        self.summary: dict[str, Any] = {}
        self.metrics: dict[str, str] = {}

    def define_metric(self, name: str, step_metric: str) -> None:
        self.metrics[name] = step_metric

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)


def wandb_points(rows: Records) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        steps = {key.partition("/")[0]: value for key, value in row.items() if key.endswith("/step")}
        for key, value in row.items():
            if not key.endswith("/step") and not key.startswith("_"):
                found.setdefault(key, []).append((int(steps[key.partition("/")[0]]), value))
    return found


def test_wandb_adapter_gives_all_numbers_and_texts_to_the_run(records: Records) -> None:
    run = StandInRun()
    log = WandbLog(run)
    for record in records:
        log(record)
    assert_same(wandb_points(run.logged), expected(records))
    assert run.summary["result/verdict"] == "MET"
    assert run.metrics["allocating/*"] == "allocating/step"


def test_wandb_offline_run_takes_the_records(records: Records, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    with wandb.init(mode="offline", dir=tmp_path, project="pruning", settings=wandb.Settings(silent=True)) as run:
        log = WandbLog(run)
        for record in records:
            log(record)
        assert run.summary["result/verdict"] == "MET"
    assert list(tmp_path.rglob("*.wandb")), "the offline log"
