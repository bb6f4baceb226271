"""LiteRT with a fake worker and, where the environment is installed, with the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsa_hw.channels import find_groups
from dsa_hw.errors import MeasurementError, MissingDependencyError, ProfileError
from profilers import measure
from profilers.litert.client import Worker
from profilers.litert.convert import TfliteFile
from profilers.measuring.bench import DENSE, Bench
from profilers.measuring.rules import MeasuringRules
from profilers.networks.builder import ConfigurationBuilder, loadable_module
from profilers.targets import resolve
from profilers.targets.litert import LiteRT, outputs
from tests.fakes.litert_env import make_fake, real


def test_times_come_from_the_worker(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lenient: MeasuringRules
) -> None:
    make_fake(tmp_path, monkeypatch)
    target = resolve("litert/cpu", threads=2)
    assert target.title == "litert/cpu fp32 x2"
    assert "num_threads=2" in target.describe()["interpreter"]
    network = loadable_module(*tiny, target)
    found = Bench(target, rules=lenient, environment={}).measure({"tiny": network}, network, limit=20)
    for result in found.values():
        assert result.seconds == pytest.approx(1e6 / 5e8)
        assert result.trusted
    assert found["tiny"].ratio.value == pytest.approx(1.0)
    assert len(found[DENSE].samples) == 2 * len(found["tiny"].samples)


@pytest.mark.parametrize(
    "steps",
    ["1", "[]", "[[0.1], [0.1]]", "[0.1]", "[[]]", '[["x"]]', "[[0]]", "[[-1.0]]", "[[1e-300]]", "[[1e9]]", "[[true]]"],
)
def test_invalid_times_are_errors(steps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch, f'says {{"done": {{"steps": {steps}}}}}')
    target = LiteRT()
    with pytest.raises(MeasurementError, match="sent an invalid answer"):
        target._sequence([("m", 1)])
    target.worker.close()


@pytest.mark.parametrize("count", ["null", "-1", "1e3", "100000", "2"])
def test_invalid_outputs_are_errors(count: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch, f'says {{"done": {{"count": {count}}}}}')
    worker = Worker()
    (worker.folder / "1.0.npy").write_bytes(b"no array")
    with pytest.raises(MeasurementError, match="invalid answer to request 'outputs'"):
        outputs(TfliteFile(worker, worker.folder / "m"))
    assert not list(worker.folder.glob("*.npy")) or count != "2"
    worker.close()


def test_other_devices_and_precisions_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch)
    with pytest.raises(ProfileError, match="--precision fp32 only"):
        resolve("litert/cpu", precision="fp16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(MissingDependencyError, match="--device cpu"):
        resolve("litert/cuda")


@real
def test_narrowed_network_is_correct_and_faster(tiny: Any, lenient: MeasuringRules) -> None:
    model, inputs = tiny
    groups = find_groups(model, inputs)
    target = resolve("litert/cpu")
    builder = ConfigurationBuilder(model, groups, inputs, target)
    agreement = builder.check(rounds=1)
    assert builder.how == "narrowed"
    assert agreement is not None
    assert agreement < 1e-4
    wide, thin = builder.load(groups.sizes.tolist()), builder.load([1] * len(groups))
    assert np.median(thin.run(50)) < np.median(wide.run(50))
    assert measure(model, inputs, target, rules=lenient, time_limit=30).seconds > 0
    target.worker.close()
