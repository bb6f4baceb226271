from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import budgets
from dsa_hw.methods.synthetic import synthetic_inputs
from dsa_hw.pipeline.allocate import allocate
from dsa_hw.pipeline.quality import AGREEMENT, OUTPUT_ERROR, UNKNOWN, quality_on_synthetic_inputs
from dsa_hw.pipeline.verification import verify
from tests.fakes.formula import Net

EXAMPLE = torch.randn(1, 6)


def linear(*rows: list[float]) -> nn.Linear:
    layer = nn.Linear(6, len(rows), bias=False)
    layer.weight = nn.Parameter(torch.tensor(rows))
    return layer


FIRST = [1.0, 0, 0, 0, 0, 0]
SECOND = [0, 1.0, 0, 0, 0, 0]
ZERO = [0.0] * 6


def test_the_agreement_is_the_share_of_equal_classes() -> None:
    """Class 1 where x_0 > 0, in the one network, and where x_1 > 0, in the other: independent, so half."""
    dense, other = linear(ZERO, FIRST), linear(ZERO, SECOND)
    example = torch.tensor([[-1.0, 1.0, -1.0, 1.0, -1.0, 1.0]])  # inputs have its mean, 0, and its deviation
    same = quality_on_synthetic_inputs(dense, copy.deepcopy(dense), example, seed=0)
    assert (same.measure, same.value, same.inputs) == (AGREEMENT, 1.0, 256)
    assert same.constant == pytest.approx(0.5, abs=0.1)
    half = quality_on_synthetic_inputs(dense, other, example, seed=0)
    assert half.value == pytest.approx(0.5, abs=0.1)  # standard error 0.03
    never = quality_on_synthetic_inputs(dense, linear(FIRST, ZERO), example, seed=0)
    assert never.value == 0.0


def test_a_constant_network_agrees_as_often_as_a_constant_answer() -> None:
    found = quality_on_synthetic_inputs(linear([0.0, 0, 0, 0, 0, 0], FIRST), linear(ZERO, ZERO), EXAMPLE, seed=0)
    assert found.constant is not None
    assert found.value in (found.constant, 1 - found.constant)
    assert 0.5 <= found.constant <= 1


@pytest.mark.parametrize("outputs", [lambda y: y[:, :1], lambda y: y[..., None], lambda y: {"a": y, "b": 1e-6 * y}])
def test_other_outputs_have_a_relative_error(outputs: object) -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.layer, self.scale = linear(FIRST, SECOND), scale

        def forward(self, x: Tensor) -> object:
            return outputs(self.scale * self.layer(x))  # type: ignore[operator]

    found = quality_on_synthetic_inputs(Scaled(1.0), Scaled(0.7), EXAMPLE, seed=0)
    assert found.measure == OUTPUT_ERROR
    assert found.value == pytest.approx(0.3, rel=1e-5)
    assert "Relative output error against the dense network: 30.0% on 256 synthetic inputs" in str(found)


def test_what_cannot_be_compared_is_unknown_with_the_reason() -> None:
    words = torch.zeros(1, 4, dtype=torch.long)
    embedding = nn.Embedding(10, 4)
    assert "floating-point" in str(quality_on_synthetic_inputs(embedding, embedding, words, seed=0))
    fixed = nn.Sequential(nn.Unflatten(0, (1, 1)), nn.Linear(6, 2))
    found = quality_on_synthetic_inputs(fixed, fixed, EXAMPLE, seed=0)
    assert (found.measure, found.value) == (UNKNOWN, None)
    assert "does not run on 8 synthetic inputs" in str(found)
    zero = linear(ZERO, ZERO)
    assert quality_on_synthetic_inputs(zero, linear(FIRST, SECOND), EXAMPLE, seed=0).measure == UNKNOWN


def test_the_networks_are_compared_as_they_are_shipped_and_left_as_they_were() -> None:
    """In evaluation mode: dropout would make a network disagree with itself."""
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.9), nn.Linear(8, 5)).train()
    before = copy.deepcopy(net.state_dict())
    assert quality_on_synthetic_inputs(net, net, EXAMPLE, seed=0).value == 1.0
    assert all(module.training for module in net.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_the_inputs_are_fresh(net: Net, example: Tensor) -> None:
    seen: list[Tensor] = []
    handle = net.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    quality_on_synthetic_inputs(net, copy.deepcopy(net), example, seed=3)
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
    expected = quality_on_synthetic_inputs(net, result.model, example, seed=5)
    assert result.certificate.quality == expected
    assert expected.measure == AGREEMENT
    again = verify(tmp_path / "plan.json", net)
    assert again.then.quality == again.now.quality == expected
    for text in (repr(result), str(result.certificate), str(again)):
        assert str(expected) in text


def test_an_allocation_with_data_has_its_accuracy_elsewhere(net: Net, example: Tensor) -> None:
    data = [(torch.randn(4, *example.shape[1:]), torch.zeros(4, dtype=torch.long))]
    result = allocate(
        net, budgets.FlopsBudget("50%"), example_inputs=example, method="uniform", val=data, progress=False
    )
    assert result.certificate.quality is None
    assert "fine-tuning" not in repr(result)
