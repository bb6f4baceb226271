"""Modes come back as they were, module by module; numbers that are not finite are found."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from dsa_hw.errors import ModelError, TrainingError
from dsa_hw.utils.modules import (
    check_finite_inputs,
    check_finite_outputs,
    check_finite_weights,
    evaluating,
    weights_digest,
)


def test_every_module_gets_its_own_mode_back() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
    model.train()
    model[1][0].eval()
    before = [module.training for module in model.modules()]
    with contextlib.suppress(KeyError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise KeyError
    assert [module.training for module in model.modules()] == before


def test_digest_changes_with_any_weight_and_name() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.load_state_dict(one.state_dict())
    assert weights_digest(one) == weights_digest(other)
    other.bias.data[0] += 1
    assert weights_digest(one) != weights_digest(other)
    assert weights_digest(nn.Sequential(one)) != weights_digest(one)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 4, 2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.weight", "1.running_mean", "1.running_var", "3.bias"])
def test_the_first_tensor_that_is_not_finite_is_named(name: str, bad: float) -> None:
    model = network()
    check_finite_weights(model)
    model.state_dict()[name].reshape(-1)[-1] = bad
    with pytest.raises(ModelError, match=rf"^{name} of the network has (NaN|infinity) in 1 of \d+ values"):
        check_finite_weights(model)
    with pytest.raises(TrainingError):
        check_finite_weights(model, error=TrainingError)


def test_a_mask_of_attention_may_be_infinite_but_not_nan() -> None:
    model = network()
    model.register_buffer("mask", torch.full((2, 2), float("-inf")))
    check_finite_weights(model)
    model.mask[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"^mask of"):
        check_finite_weights(model)


def test_outputs_and_inputs_that_are_not_finite_are_refused() -> None:
    model, image = network(), torch.randn(1, 3, 4, 4)
    check_finite_inputs((image,))
    check_finite_outputs(model, (image,))
    assert model.training
    model[3].weight.data.fill_(3e38)
    check_finite_weights(model)
    with pytest.raises(ModelError, match="outputs of the network on the example inputs have"):
        check_finite_outputs(model, (image,))
    image[0, 0, 0, 0] = float("nan")
    with pytest.raises(ModelError, match="input 1 has NaN"):
        check_finite_inputs((torch.zeros(1, dtype=torch.long), image))
