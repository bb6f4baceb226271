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
from profilers.litert.convert import TfliteFile, quantise, written
from profilers.measuring.bench import DENSE, Bench
from profilers.measuring.rules import MeasuringRules
from profilers.networks.builder import ConfigurationBuilder, loadable_module
from profilers.networks.quantised import quantise_network
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
    with pytest.raises(ProfileError, match="fp32 and int8; got 'fp16'"):
        resolve("litert/cpu", precision="fp16")
    with pytest.raises(ProfileError, match="Omit --int8-without; got conv1"):
        resolve("litert/cpu", precision="int8-without:conv1")
    with pytest.raises(ProfileError, match="runs int8 as int8-s8edge"):
        resolve("litert/cpu", precision="int8-u8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(MissingDependencyError, match="--device cpu"):
        resolve("litert/cuda")


def test_int8_files_are_quantised_after_narrowing(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch)
    model, inputs = tiny
    target = resolve("litert/cpu", precision="int8")
    assert target.title == "litert/cpu int8-s8edge x1"
    assert "ai-edge-quantizer static_wi8_ai8" in target.describe()["int8"]
    groups = find_groups(model, inputs)
    builder = ConfigurationBuilder(model, groups, inputs, target)
    assert builder.load(groups.sizes.tolist()).run(1)[0] == pytest.approx(1e6 / 1e9)
    assert target.at("fp32").load(model, inputs).run(1)[0] == pytest.approx(1e6 / 5e8)
    network = quantise_network(model, inputs, target, batches=[inputs])
    assert network.ranges == {"0": (-1.0, 1.0)}
    assert quantise_network(model, inputs, target, ranges={"0": (-2.0, 3.0)}).ranges == {"0": (-2.0, 3.0)}


@pytest.mark.parametrize("ranges", ["null", "[]", '{"0": [1]}', '{"0": [1, "x"]}', '{"0": [true, 1]}'])
def test_invalid_ranges_are_errors(ranges: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch, f'says {{"done": {{"ranges": {ranges}}}}}')
    worker = Worker()
    with pytest.raises(MeasurementError, match="invalid answer to request 'quantise'"):
        quantise(written(worker, b"x"), (torch.zeros(1, 3),))
    worker.close()


@real
def test_int8_network_agrees_with_fp32_and_is_quantised_again_from_its_ranges(tiny: Any) -> None:
    model, inputs = tiny
    target = resolve("litert/cpu", precision="int8")
    source = torch.Generator().manual_seed(1)
    images = torch.randn(8, *inputs[0].shape[1:], generator=source)
    network = quantise_network(model, inputs, target, batches=[(images,)])
    with torch.no_grad():
        expected, found = model(images), network(images)
    assert float((found - expected).norm() / expected.norm()) < 0.1
    assert quantise_network(model, inputs, target, ranges=network.ranges).content == network.content
    other = {name: (2 * low, 2 * high) for name, (low, high) in network.ranges.items()}
    assert quantise_network(model, inputs, target, ranges=other).content != network.content
    target.worker.close()  # type: ignore[attr-defined]


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
