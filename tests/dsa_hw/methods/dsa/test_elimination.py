"""Elimination: costs against least squares by brute force, redundant channels, and layers that it cannot use."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dsa_hw import find_groups
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.dsa.elimination import elimination
from dsa_hw.methods.dsa.fisher import fisher
from dsa_hw.methods.problem import Problem
from dsa_hw.methods.registry import solve
from dsa_hw.training.loaders import RepeatingLoader
from tests.fakes.networks import batches, trained, with_flops

cross_entropy = nn.functional.cross_entropy


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1).mean()


def two_layers(channels: int = 6) -> tuple[nn.Module, Tensor]:
    """A linear layer that mixes few inputs into more channels, whose covariance is far from diagonal."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(channels, channels), nn.Linear(channels, 3))
    return model, torch.randn(4096, channels)


def test_order_and_costs_are_those_of_least_squares() -> None:
    """With targets of unit noise, G is the identity up to scale and e_i the rise of the error of a refit."""
    model, inputs = two_layers()
    groups = find_groups(model, inputs[:2])
    with torch.no_grad():
        x, y = model[0](inputs).double(), model(inputs).double()
        targets = (y + torch.randn(y.shape, dtype=torch.float64)).float()
    (found,) = elimination(model, groups, [(inputs, targets)], squares)

    def error(kept: list[int]) -> float:
        design = torch.cat([x[:, kept], torch.ones(len(x), 1, dtype=torch.float64)], 1)
        fitted = design @ torch.linalg.lstsq(design, y).solution
        return float((y - fitted).square().sum(1).mean())

    left = list(range(6))
    errors = {}
    for unit in np.argsort(found)[:-1].tolist():
        best = min(left, key=lambda u: error([v for v in left if v != u]))
        assert unit == best
        before = error(left)
        left.remove(unit)
        errors[unit] = error(left) - before
    rises = np.array([found[unit] / errors[unit] for unit in errors])
    np.testing.assert_allclose(rises, rises.mean(), rtol=0.1)  # G is estimated from 4,096 gradients


def test_copy_of_a_channel_goes_first_and_the_other_one_stays() -> None:
    model, inputs = two_layers()
    with torch.no_grad():
        model[0].weight[4] = -2.0 * model[0].weight[1]  # an affine copy of channel 1, and both are used
        model[0].bias[4] = 5.0
        model[1].weight[:, [1, 4]] *= 10.0
    groups = find_groups(model, inputs[:2])
    batch = (inputs, torch.randint(3, (len(inputs),)))
    (found,) = elimination(model, groups, [batch], cross_entropy)
    first = int(np.argsort(found)[0])
    assert first in (1, 4)
    assert found[5 - first] > 100 * found[first]
    (masks,) = fisher(model, groups, [batch], cross_entropy)
    assert np.argsort(masks)[0] not in (1, 4)


def test_model_is_unchanged_and_may_be_frozen_and_work_in_place() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 5))
    inputs, labels = torch.randn(32, 3, 8, 8), torch.randint(5, (32,))
    groups = find_groups(model, inputs[:1])
    free = elimination(model, groups, [(inputs, labels)], cross_entropy)
    model.requires_grad_(False).train()
    before = copy.deepcopy(model.state_dict())
    frozen = elimination(model, groups, [(inputs, labels)], cross_entropy)
    for one, other in zip(free, frozen, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
        assert (one > 0).all()
        assert len(set(one)) == len(one)
    assert all(module.training and not module._forward_hooks for module in model.modules())
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


def test_channels_that_a_grouped_convolution_reads_are_ranked_by_fisher(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(8 * 36, 5))
    inputs, labels = torch.randn(32, 3, 8, 8), torch.randint(5, (32,))
    groups = find_groups(model, inputs[:1])
    with caplog.at_level(logging.INFO):
        found = elimination(model, groups, [(inputs, labels)], cross_entropy)
    expected = fisher(model, groups, [(inputs, labels)], cross_entropy)
    same = [np.array_equal(one, other) for one, other in zip(found, expected, strict=True)]
    assert any(same)
    assert not all(same)
    assert "Fisher" in caplog.text


def test_without_gradient_channels_are_ranked_as_fisher_does() -> None:
    model, inputs = two_layers()
    groups = find_groups(model, inputs[:2])
    with torch.no_grad():
        batch = (inputs, model(inputs))
    (found,), (expected,) = (how(model, groups, [batch], squares) for how in (elimination, fisher))
    np.testing.assert_array_equal(found, expected)
    assert found.any()


def test_wide_groups_lose_several_channels_at_once_in_nearly_the_same_order() -> None:
    model, inputs = two_layers(300)
    groups = find_groups(model, inputs[:2])
    (found,) = elimination(model, groups, [(inputs, torch.randint(3, (len(inputs),)))], cross_entropy)
    assert (found > 0).all()
    assert len(set(found)) == 300


def test_dsa_masks_by_fisher_and_selects_by_elimination() -> None:
    model = trained()
    groups, flops, dense = with_flops(model)
    data = list(batches())
    problem = Problem(model, groups, CostSet([flops], groups.sizes, [0.5 * dense]), val=data, options={"steps": 12})
    source = RepeatingLoader(data)
    expected = elimination(model, groups, [next(source) for _ in range(16)], cross_entropy)
    selected = solve(problem).importance
    assert selected is not None
    for one, other in zip(selected, expected, strict=True):
        np.testing.assert_array_equal(one, other)
