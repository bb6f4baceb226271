"""What is left of a network: metric or agreement, with intervals, in certificates and verifications."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import budgets
import dsa_hw
from dsa_hw.errors import PlanError, TrainingError
from dsa_hw.methods.synthetic import synthetic_inputs
from dsa_hw.pipeline.allocate import allocate
from dsa_hw.pipeline.quality import (
    ACCURACY,
    AGREEMENT,
    METRIC,
    OUTPUT_ERROR,
    UNKNOWN,
    Quality,
    measure_quality,
    quality_on_noise,
)
from dsa_hw.pipeline.verification import verify
from dsa_hw.training.intervals import difference_interval, share_interval
from tests.fakes.formula import Net

EXAMPLE = torch.randn(1, 6)


def linear(*rows: list[float]) -> nn.Linear:
    layer = nn.Linear(6, len(rows), bias=False)
    layer.weight = nn.Parameter(torch.tensor(rows))
    return layer


FIRST = [1.0, 0, 0, 0, 0, 0]
SECOND = [0, 1.0, 0, 0, 0, 0]
ZERO = [0.0] * 6
INPUTS = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))


def value_of(found: Quality) -> float:
    assert found.value is not None
    return found.value.value


def test_accuracies_are_counted_on_the_same_inputs_and_have_intervals() -> None:
    """The dense network is right where x_0 > 0 says so, by definition; the pruned one by chance."""
    dense, pruned = linear(ZERO, FIRST), linear(ZERO, SECOND)
    labels = (INPUTS[:, 0] > 0).long()
    labels[:20] = 1 - labels[:20]
    data = [(INPUTS[:150], labels[:150]), (INPUTS[150:], labels[150:])]
    found = measure_quality(dense, pruned, data, source="validation data")
    right = [((INPUTS[:, k] > 0).long() == labels).double().numpy() for k in (0, 1)]
    assert (found.measure, found.inputs, found.source) == (ACCURACY, 200, "validation data")
    assert found.dense == share_interval(180, 200, 0.95)
    assert found.value == share_interval(int(right[1].sum()), 200, 0.95)
    assert found.drop == difference_interval(right[0], right[1], 0.95)
    assert found.needs_training
    assert "Accuracy on 200 inputs (validation data)" in str(found)
    assert str(found).endswith("Fine-tune before use.")
    same = measure_quality(dense, dense, data, source="test data")
    assert "Fine-tune" not in str(same)


@pytest.mark.parametrize("per_input", [True, False])
def test_the_metric_of_the_user_has_the_mean_of_its_scores(per_input: bool) -> None:
    def closeness(outputs: Tensor, targets: Tensor) -> Tensor:
        score = -(outputs - targets).abs().mean(1)
        return score if per_input else score.mean()

    dense, pruned = linear(FIRST), linear([0.5, 0, 0, 0, 0, 0])
    data = [(x, x[:, :1]) for x in INPUTS.split(20)]
    found = measure_quality(dense, pruned, data, source="validation data", metric=closeness, max_drop=0.3)
    assert (found.measure, found.name, found.inputs) == (METRIC, "closeness", 200)
    assert found.dense is not None
    assert found.dense.value == pytest.approx(0, abs=1e-7)
    assert value_of(found) == pytest.approx(-0.5 * float(INPUTS[:, 0].abs().mean()), rel=1e-5)
    assert str(found.verdict) in str(found)


@pytest.mark.parametrize(
    ("score", "message"), [(lambda o, t: o.nope, "cannot be computed"), (lambda o, t: float("nan"), "finite")]
)
def test_a_metric_that_fails_is_refused_before_anything_is_trained(
    score: Any, message: str, net: Net, example: Tensor
) -> None:
    data = [(torch.randn(4, *example.shape[1:]), torch.zeros(4, dtype=torch.long))]
    more: dict[str, Any] = {"example_inputs": example, "method": "uniform", "progress": False}
    with pytest.raises(TrainingError, match=message):
        allocate(net, budgets.FlopsBudget("50%"), val=data, metric=score, **more)
    with pytest.raises(TrainingError, match="Give `val`"):
        allocate(net, budgets.FlopsBudget("50%"), metric=lambda o, t: o.mean(1), **more)


def test_targets_that_are_no_classes_leave_the_agreement() -> None:
    dense = linear(ZERO, FIRST)
    found = measure_quality(dense, linear(ZERO, SECOND), [(INPUTS, torch.randn(200, 2))], source="validation data")
    assert (found.measure, found.inputs, found.source) == (AGREEMENT, 200, "validation data")
    same = int(((INPUTS[:, 0] > 0) == (INPUTS[:, 1] > 0)).sum())
    assert found.value == share_interval(same, 200, 0.95)
    unlabelled = measure_quality(dense, dense, [INPUTS], source="images without labels")
    assert (unlabelled.measure, value_of(unlabelled)) == (AGREEMENT, 1.0)


@pytest.mark.parametrize(("same", "advice"), [(179, True), (180, False)])
def test_an_agreement_below_nine_in_ten_needs_fine_tuning(same: int, advice: bool) -> None:
    dense, pruned = linear(ZERO, FIRST), linear(ZERO, FIRST)
    inputs = INPUTS.clone()
    pruned.weight.data[1, 1] = 1e3  # decides wherever x_1 is not zero, against x_0
    inputs[:, 1] = 0.0
    inputs[same:, 1] = -inputs[same:, 0].sign()
    found = measure_quality(dense, pruned, [inputs], source="images without labels")
    assert value_of(found) == same / 200
    assert ("Fine-tune before use." in str(found)) == advice


def test_loaders_without_an_end_and_without_inputs_are_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsa_hw.pipeline.quality._MOST", 1000)
    dense = linear(ZERO, FIRST)
    endless = (INPUTS for _ in iter(int, 1))
    assert measure_quality(dense, dense, endless, source="images without labels").inputs == 1000
    empty = measure_quality(dense, dense, iter([]), source="images without labels")
    assert (empty.measure, empty.needs_training) == (UNKNOWN, True)
    assert "read only once" in str(empty)


def test_the_agreement_is_the_share_of_equal_classes() -> None:
    """Class 1 where x_0 > 0, in the one network, and where x_1 > 0, in the other: independent, so half."""
    dense, other = linear(ZERO, FIRST), linear(ZERO, SECOND)
    example = torch.tensor([[-1.0, 1.0, -1.0, 1.0, -1.0, 1.0]])  # inputs have its mean, 0, and its deviation
    same = quality_on_noise(dense, copy.deepcopy(dense), example, seed=0)
    assert (same.measure, value_of(same), same.inputs, same.source) == (AGREEMENT, 1.0, 256, "noise")
    assert same.constant == pytest.approx(0.5, abs=0.1)
    half = quality_on_noise(dense, other, example, seed=0)
    assert value_of(half) == pytest.approx(0.5, abs=0.1)  # standard error 0.03
    never = quality_on_noise(dense, linear(FIRST, ZERO), example, seed=0)
    assert value_of(never) == 0.0


def test_a_constant_network_agrees_as_often_as_a_constant_answer() -> None:
    found = quality_on_noise(linear([0.0, 0, 0, 0, 0, 0], FIRST), linear(ZERO, ZERO), EXAMPLE, seed=0)
    assert found.constant is not None
    assert value_of(found) in (found.constant, 1 - found.constant)
    assert 0.5 <= found.constant <= 1


@pytest.mark.parametrize("outputs", [lambda y: y[:, :1], lambda y: y[..., None], lambda y: {"a": y, "b": 1e-6 * y}])
def test_other_outputs_have_a_relative_error(outputs: object) -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.layer, self.scale = linear(FIRST, SECOND), scale

        def forward(self, x: Tensor) -> object:
            return outputs(self.scale * self.layer(x))  # type: ignore[operator]

    found = quality_on_noise(Scaled(1.0), Scaled(0.7), EXAMPLE, seed=0)
    assert found.measure == OUTPUT_ERROR
    assert value_of(found) == pytest.approx(0.3, rel=1e-5)
    assert "Relative output error against the dense network on 256 inputs (noise): 30.0% [30.0%, 30.0%]" in str(found)


def test_what_cannot_be_compared_is_unknown_with_the_reason() -> None:
    words = torch.zeros(1, 4, dtype=torch.long)
    embedding = nn.Embedding(10, 4)
    assert "floating-point" in str(quality_on_noise(embedding, embedding, words, seed=0))
    fixed = nn.Sequential(nn.Unflatten(0, (1, 1)), nn.Linear(6, 2))
    found = quality_on_noise(fixed, fixed, EXAMPLE, seed=0)
    assert (found.measure, found.value) == (UNKNOWN, None)
    assert "does not run on 8 random inputs" in str(found)
    zero = linear(ZERO, ZERO)
    assert quality_on_noise(zero, linear(FIRST, SECOND), EXAMPLE, seed=0).measure == UNKNOWN


def test_the_networks_are_compared_as_they_are_shipped_and_left_as_they_were() -> None:
    """In evaluation mode: dropout would make a network disagree with itself."""
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.9), nn.Linear(8, 5)).train()
    before = copy.deepcopy(net.state_dict())
    assert value_of(quality_on_noise(net, net, EXAMPLE, seed=0)) == 1.0
    assert all(module.training for module in net.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_the_inputs_are_fresh(net: Net, example: Tensor) -> None:
    seen: list[Tensor] = []
    handle = net.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    quality_on_noise(net, copy.deepcopy(net), example, seed=3)
    handle.remove()
    guiding = torch.cat([batch for (batch,), _ in zip(synthetic_inputs(example, 8, 3), range(60), strict=False)])
    drawn = torch.cat(seen[: 256 // 8])
    assert torch.cdist(guiding.flatten(1), drawn.flatten(1)).min() > 1.0


def test_an_allocation_without_data_says_how_far_it_is_from_the_dense_network(
    net: Net, example: Tensor, tmp_path: Path
) -> None:
    result = allocate(
        net, budgets.FlopsBudget("50%"), example_inputs=example, method="uniform", seed=5, progress=False, out=tmp_path
    )
    expected = quality_on_noise(net, result.model, example, seed=5)
    assert result.quality == result.certificate.quality == expected
    assert expected.measure == AGREEMENT
    again = verify(tmp_path / "plan.json", net)
    assert again.then.quality == again.now.quality == expected
    for text in (repr(result), str(result.certificate), str(again)):
        assert str(expected) in text


@pytest.fixture
def labelled(net: Net, example: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Images with the classes that the dense network gives them: it is always right."""
    images = torch.randn(64, *example.shape[1:], generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return [(x, net(x).argmax(1)) for x in images.split(16)]


def test_an_allocation_with_data_has_both_accuracies(
    net: Net, example: Tensor, labelled: list[tuple[Tensor, Tensor]]
) -> None:
    more: dict[str, Any] = {"example_inputs": example, "method": "uniform", "progress": False}
    half = budgets.FlopsBudget("50%")
    result = allocate(net, half, val=labelled, **more)
    assert result.quality == measure_quality(net, result.model, labelled, source="validation data")
    assert result.quality.dense == share_interval(64, 64, 0.95)
    assert str(result.quality) in repr(result)
    assert allocate(net, half, train=labelled, **more).quality.source == "training data"
    images = allocate(net, half, images=[x for x, _ in labelled], recovery="refit", **more).quality
    assert (images.source, images.measure, images.inputs) == ("images without labels", AGREEMENT, 8), "an eighth"


def test_verification_measures_the_quality_again_where_there_are_data(
    net: Net, example: Tensor, labelled: list[tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    result = allocate(
        net, budgets.FlopsBudget("90%"), example_inputs=example, method="uniform", progress=False, val=labelled
    )
    plan = result.save(tmp_path) / "plan.json"
    assert "Not measured again" in str(verify(plan, net))
    again = verify(plan, net, data=labelled)
    assert again.measured_quality
    assert again.now.quality == again.then.quality == result.quality
    assert again.verdict == "MET"
    wrong = [(x, (y + 1) % 10) for x, y in labelled]
    worse = verify(plan, net, data=wrong)
    assert worse.now.verdict == "MET", "the budget is met"
    assert worse.verdict == "NOT MET"
    assert str(worse).startswith("The certificate of ")
    assert "no longer holds" in str(worse)
    other = copy.deepcopy(net)
    with torch.no_grad():
        next(other.parameters()).mul_(2)
    with pytest.raises(PlanError, match="--dense-weights"):
        verify(plan, other, data=labelled)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(PlanError, match="--weights"):
        verify(plan, net, data=labelled)


def test_a_floor_is_a_part_of_the_verdict(
    net: Net, example: Tensor, labelled: list[tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    result = allocate(net, budgets.FlopsBudget("50%"), example_inputs=example, method="uniform", progress=False)
    assert result.certificate.verdict == "MET"
    kept = result.assess(net, labelled, max_drop=1.0)
    assert (kept.quality.verdict, kept.certificate.verdict) == ("MET", "MET")
    unclear = result.assess(net, labelled, max_drop=0.0)
    assert unclear.quality.verdict in ("INCONCLUSIVE", "NOT MET")
    assert unclear.certificate.verdict == unclear.quality.verdict
    plan = unclear.save(tmp_path) / "plan.json"
    assert verify(plan, net, data=labelled).verdict == unclear.quality.verdict


def test_the_quality_of_other_weights_is_not_saved(
    net: Net, example: Tensor, labelled: list[tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    result = allocate(net, budgets.FlopsBudget("50%"), example_inputs=example, method="uniform", progress=False)
    with torch.no_grad():
        next(result.model.parameters()).mul_(1.5)
    plan = dsa_hw.Plan.load(result.save(tmp_path) / "plan.json")
    assert dsa_hw.Certificate.from_dict(plan.certificate).quality.measure == UNKNOWN
    plan = dsa_hw.Plan.load(result.assess(net, labelled).save(tmp_path) / "plan.json")
    assert dsa_hw.Certificate.from_dict(plan.certificate).quality.measure == ACCURACY
