"""Prune and quantise in one certificate: the budget, the quality and the files are those of the int8 network."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import budgets
from dsa_hw.channels.plan import Plan
from dsa_hw.cli.main import main
from dsa_hw.errors import PlanError
from dsa_hw.pipeline.allocate import allocate
from dsa_hw.pipeline.certificate import Certificate
from dsa_hw.pipeline.options import ProfileOptions
from dsa_hw.pipeline.quantised import calibration_inputs
from dsa_hw.pipeline.result import Allocation
from dsa_hw.pipeline.verification import verify
from dsa_hw.utils.documents import sealed
from profilers import MeasuringRules
from profilers.targets.openvino import _core
from tests.fakes.formula import Net
from tests.fakes.int8_formula import Int8Formula, seconds_of

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

SHAPE = (1, 3, 16, 16)


def make() -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net().eval(), torch.zeros(SHAPE)


MODEL = "tests.dsa_hw.pipeline.test_quantised:make"


def data(seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(seed)
    images = torch.randn(64, *SHAPE[1:], generator=source)
    with torch.no_grad():
        return [(images, make()[0](images).argmax(1))]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Allocation:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSA_HW_CACHE", str(tmp_path_factory.mktemp("cache")))
        rules = MeasuringRules(least_blocks=2, most_blocks=2, rounds=1, least_seconds=0.0)
        return allocate(
            make()[0], budgets.LatencyBudget("70%"), example_inputs=make()[1], val=data(),
            target=Int8Formula("int8-s8"), method="uniform", progress=False,
            profiling=ProfileOptions(samples=14, holdout=0, grid=8, rules=rules),
        )  # fmt: skip


def test_the_budget_holds_for_the_int8_network(result: Allocation) -> None:
    (entry,) = result.certificate.entries
    assert entry.target == "int8formula/device int8-s8"
    assert str(result.certificate.verdict) == "MET"
    (network,) = result.quantised.values()
    assert entry.measured == pytest.approx(seconds_of(network.content), rel=0.02)
    assert entry.limit == pytest.approx(0.7 * entry.dense)


def test_four_networks_stand_side_by_side(result: Allocation) -> None:
    (calibration,) = result.certificate.int8
    dense, dense_int8, pruned, pruned_int8 = calibration.variants
    (network,) = result.quantised.values()
    assert pruned_int8.measured == pytest.approx(seconds_of(network.content), rel=0.02)
    assert pruned_int8.file_bytes == len(network.content)
    assert pruned_int8.measured < dense_int8.measured < dense.measured
    assert pruned_int8.measured < pruned.measured < dense.measured
    assert pruned_int8.file_bytes < pruned.file_bytes < dense.file_bytes
    assert calibration.source == "validation data"
    assert calibration.inputs == 64
    text = str(result.certificate)
    for variant in ("dense fp32: ", "dense int8: ", "pruned fp32: ", "pruned int8: "):
        assert variant in text


def test_the_quality_is_that_of_the_quantised_network_in_the_runtime(result: Allocation) -> None:
    (images, labels) = data()[0]
    (network,) = result.quantised.values()
    session = ort.InferenceSession(network.content)
    name = session.get_inputs()[0].name
    answers = [int(session.run(None, {name: image[None].numpy()})[0].argmax()) for image in images]
    share = float(np.mean(np.asarray(answers) == labels.numpy()))
    assert result.quality.measure == "accuracy"
    assert result.quality.value is not None
    assert result.quality.value.value == pytest.approx(share)
    assert result.certificate.int8[0].variants[-1].quality == result.quality


def test_a_certificate_is_read_as_it_is_written(result: Allocation) -> None:
    content = json.loads(json.dumps(result.certificate.to_dict()))
    assert Certificate.from_dict(content) == result.certificate


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(int8=[]),
        lambda c: c["int8"].append(c["int8"][0]),
        lambda c: c["int8"][0].update(target="int8formula/device int8-u8"),
        lambda c: c["int8"][0]["variants"].pop(),
        lambda c: c["int8"][0]["variants"].reverse(),
        lambda c: c["int8"][0]["variants"][0].update(low=1.0),
        lambda c: c["int8"][0]["ranges"].update(x=[1.0, 0.0]),
        lambda c: c["int8"][0].update(ranges={}),
        lambda c: c["int8"][0].update(more=1),
    ],
)
def test_a_certificate_that_contradicts_itself_is_refused(result: Allocation, change: Any) -> None:
    content = json.loads(json.dumps(result.certificate.to_dict()))
    change(content)
    with pytest.raises(PlanError):
        Certificate.from_dict(content)


def test_verify_quantises_again_and_confirms_budget_and_quality(result: Allocation, tmp_path: Path) -> None:
    folder = result.save(tmp_path / "small")
    found = verify(folder / "plan.json", make()[0], target=Int8Formula("int8-s8"), data=data())
    assert str(found.verdict) == "MET"
    assert found.now.quality.value == result.quality.value
    assert found.now.entries[0].measured == pytest.approx(result.certificate.entries[0].measured, rel=0.02)


def test_verify_refuses_a_precision_without_calibration(result: Allocation) -> None:
    with pytest.raises(PlanError, match="no calibration for int8-u8"):
        verify(result.plan, make()[0], target=Int8Formula("int8-u8"), weights=result.model.state_dict())


def test_verify_refuses_ranges_of_other_tensors(result: Allocation) -> None:
    content = json.loads(json.dumps(result.certificate.to_dict()))
    ranges = content["int8"][0]["ranges"]
    content["int8"][0]["ranges"] = {f"other {name}": ends for name, ends in ranges.items()}
    plan = replace(result.plan, certificate=content)
    with pytest.raises(Exception, match="do not belong to this graph"):
        verify(plan, make()[0], target=Int8Formula("int8-s8"), weights=result.model.state_dict())


def test_saved_files_are_those_of_the_int8_network(result: Allocation, tmp_path: Path) -> None:
    folder = result.save(tmp_path)
    (network,) = result.quantised.values()
    assert (folder / "model.int8.onnx").read_bytes() == network.content
    assert "model.int8.onnx" in Plan.load(folder / "plan.json").files
    (folder / "model.int8.onnx").write_bytes(b"other")
    with pytest.raises(PlanError, match=r"model\.int8\.onnx is not the file"):
        verify(folder / "plan.json", make()[0], target=Int8Formula("int8-s8"))


def test_export_writes_int8_again_from_weights_and_calibration(
    result: Allocation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = result.save(tmp_path)
    before = (folder / "model.int8.onnx").read_bytes()
    words = ["export", str(folder / "plan.json"), "--model", MODEL, "--precision", "int8"]
    (folder / "model.int8.onnx").unlink()
    assert main(words) == 0
    assert (folder / "model.int8.onnx").read_bytes() == before
    capsys.readouterr()
    assert main([*words, "--format", "openvino", "--json"]) == 0
    out = Path(json.loads(capsys.readouterr().out)["out"])
    assert out == folder / "model.int8.xml"
    image = data()[0][0][:1].numpy()
    found = _core().compile_model(out, "CPU")(image)[0]
    (network,) = result.quantised.values()
    wanted = network(data()[0][0][:1]).numpy()
    assert np.linalg.norm(found - wanted) < 0.1 * np.linalg.norm(wanted)
    assert main([*words, "--retrained"]) == 2
    assert "Give --data" in capsys.readouterr().err


def test_assess_calibrates_and_quantises_again(result: Allocation) -> None:
    found = result.assess(make()[0], data(1), source="test data", calibration=data(2))
    (before,), (after,) = result.certificate.int8, found.certificate.int8
    assert after.source == "training data"
    assert after.ranges != before.ranges
    assert [v.measured for v in after.variants] == [v.measured for v in before.variants]
    assert found.quality.source == "test data"
    assert after.variants[-1].quality == found.quality
    assert Certificate.from_dict(found.plan.certificate) == found.certificate


def test_quality_and_scores_are_unknown_after_training(result: Allocation) -> None:
    trained = copy.deepcopy(result.model)
    with torch.no_grad():
        next(trained.parameters()).add_(0.01)
    plan = replace(result, model=trained).current_plan()
    found = Certificate.from_dict(plan.certificate)
    assert found.quality.value is None
    assert all(variant.quality is None for variant in found.int8[0].variants)


def test_calibration_inputs_come_from_the_first_data_that_exist() -> None:
    model, example = make()
    found = calibration_inputs(model, (example,), [("images without labels", None), ("training data", data())], 0)
    assert found.source == "training data"
    assert torch.equal(found.inputs[0], data()[0][0])
    assert calibration_inputs(model, (example,), [], 0).source == "noise"
    with torch.no_grad():
        model.norm.running_mean += 1.0  # type: ignore[operator]
    made = calibration_inputs(model, (example,), [("validation data", None)], 0)
    assert made.source == "synthesised inputs"
    assert made.inputs[0].shape[1:] == SHAPE[1:]


def test_a_plan_with_int8_is_sealed_and_loads(result: Allocation, tmp_path: Path) -> None:
    folder = result.save(tmp_path)
    content = json.loads((folder / "plan.json").read_text())
    content["certificate"]["int8"][0]["ranges"] = {"x": [0.0, 1.0]}
    (folder / "plan.json").write_text(json.dumps(content))
    with pytest.raises(PlanError):
        Plan.load(folder / "plan.json")
    (folder / "plan.json").write_text(json.dumps(sealed({k: v for k, v in content.items() if k != "sha256"})))
    with pytest.raises(Exception, match="do not belong to this graph"):
        verify(folder / "plan.json", make()[0], target=Int8Formula("int8-s8"))
