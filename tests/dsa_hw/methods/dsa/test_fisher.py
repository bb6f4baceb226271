"""Fisher information of masks: the squared gradient it claims to be, and what it is for."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dsa_hw.channels import masked
from dsa_hw.channels.importance import scores
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.dsa.fisher import fisher
from dsa_hw.methods.problem import Problem
from dsa_hw.methods.registry import solve
from dsa_hw.training.loaders import RepeatingLoader
from tests.fakes.networks import batches, trained, with_flops

cross_entropy = nn.functional.cross_entropy


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return trained()


def test_scores_are_the_mean_square_of_finite_differences(model: nn.Module) -> None:
    subject = copy.deepcopy(model).double().eval()
    groups, _, _ = with_flops(model)
    ((inputs, labels),) = batches(1, 64)
    inputs = inputs.double()
    found = fisher(subject, groups, [(inputs, labels)], cross_entropy)
    sizes = groups.sizes.tolist()

    def loss(part: int, k: int, unit: int, value: float) -> float:
        masks = [torch.ones(size, dtype=torch.float64) for size in sizes]
        masks[k][unit] = value
        with torch.no_grad(), masked(subject, groups, masks):
            return float(cross_entropy(subject(inputs[part::2]), labels[part::2]))

    rng, step = np.random.default_rng(0), 1e-4
    for k, size in enumerate(sizes):
        for unit in rng.choice(size, 3, replace=False):
            slopes = [(loss(i, k, unit, 1 + step) - loss(i, k, unit, 1 - step)) / (2 * step) for i in (0, 1)]
            # 64 examples are two parts of 32; hooks carry masks in float32, hence the tolerance.
            np.testing.assert_allclose(found[k][unit], np.mean(np.square(slopes)), rtol=1e-3, atol=1e-9)


def test_unit_without_consumer_has_score_zero(model: nn.Module) -> None:
    subject = copy.deepcopy(model)
    groups, _, _ = with_flops(model)
    weights = dict(subject.named_parameters())
    reader = next(c for c in groups.cuts if c.role == "in" and c.tensor in weights and weights[c.tensor].ndim == 4)
    unit = int(reader.units[0])
    k = int(np.searchsorted(groups.offsets, unit, side="right") - 1)
    with torch.no_grad():
        for cut in groups.cuts:
            if cut.role == "in" and cut.tensor in weights and cut.dim is not None and unit in cut.units:
                where = torch.from_numpy(np.flatnonzero(cut.units == unit))
                weights[cut.tensor].index_fill_(cut.dim, where, 0.0)
    found = fisher(subject, groups, [next(RepeatingLoader(batches()))], cross_entropy)
    assert found[k][unit - groups.offsets[k]] == 0.0
    assert scores(subject, groups, "gamma")[k][unit - groups.offsets[k]] > 0.0  # |gamma| does not see it


def test_model_is_unchanged(model: nn.Module) -> None:
    subject = copy.deepcopy(model).train()
    before = copy.deepcopy(subject.state_dict())
    fisher(subject, with_flops(subject)[0], [next(RepeatingLoader(batches()))], cross_entropy)
    assert all(module.training for module in subject.modules())
    assert all(p.grad is None for p in subject.parameters())
    for key, value in subject.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


def test_gamma_replaces_scores_without_gradient_with_a_warning(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    def flat(outputs: Tensor, _: Tensor) -> Tensor:
        return (outputs * 0.0).sum()

    groups, _, _ = with_flops(model)
    with caplog.at_level(logging.WARNING):
        found = fisher(model, groups, [next(RepeatingLoader(batches()))], flat)
    assert "no gradient" in caplog.text
    for one, other in zip(found, scores(model, groups, "gamma"), strict=True):
        np.testing.assert_array_equal(one, other)


def test_dsa_uses_fisher_scores_with_labels_unless_told_otherwise(model: nn.Module) -> None:
    groups, flops, dense = with_flops(model)
    problem = Problem(
        model, groups, CostSet([flops], groups.sizes, [0.5 * dense]), val=list(batches()), options={"steps": 12}
    )
    gamma = scores(model, groups, "gamma")
    auto, told = solve(problem).importance, solve(Problem(**{**vars(problem), "importance": "gamma"})).importance
    assert auto is not None
    assert told is not None
    assert any(not np.array_equal(np.argsort(a), np.argsort(g)) for a, g in zip(auto, gamma, strict=True))
    for a, g in zip(told, gamma, strict=True):
        np.testing.assert_array_equal(a, g)
