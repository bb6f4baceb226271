"""Distillation: the loss is zero where it should be, and a pruned network comes closer to the dense one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from dsa_hw.channels import find_groups, shrink
from dsa_hw.errors import TrainingError
from dsa_hw.training.distillation import distil, distillation_loss


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.5),
        nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def pruned(model: nn.Module, inputs: Tensor) -> nn.Module:
    groups = find_groups(model, inputs[:1])
    return shrink(model, groups, [max(int(c) // 2, 1) for c in groups.sizes])


@pytest.mark.parametrize("shape", [(8, 5), (8, 1), (8, 3, 4, 4)])
def test_loss_is_zero_for_equal_outputs_and_positive_otherwise(shape: tuple[int, ...]) -> None:
    outputs = torch.randn(shape)
    assert float(distillation_loss(outputs, outputs)) == pytest.approx(0.0, abs=1e-6)
    assert float(distillation_loss(outputs + torch.randn(shape), outputs)) > 0.01


def test_size_of_the_gradient_hardly_depends_on_the_temperature() -> None:
    """For high temperatures the divergence is a squared difference of logits, whose scale is removed by T^2."""
    torch.manual_seed(0)
    wanted, logits = 0.1 * torch.randn(16, 10), (0.1 * torch.randn(16, 10)).requires_grad_(True)
    sizes = []
    for temperature in (1.0, 4.0, 20.0):
        (gradient,) = torch.autograd.grad(distillation_loss(logits, wanted, temperature), logits)
        sizes.append(float(gradient.norm()))
    assert max(sizes) < 1.1 * min(sizes)


@dataclass
class Answer:
    """What a detector of the user may return."""

    boxes: Tensor
    scores: Tensor


_pytree.register_dataclass(Answer)


@pytest.mark.parametrize(
    "wrap", [tuple, list, lambda pair: {"boxes": pair[0], "scores": pair[1]}, lambda p: Answer(*p)]
)
def test_every_form_of_outputs_is_compared(wrap: Any) -> None:
    one, two = torch.randn(4, 2, 4), torch.randn(4, 3)
    assert float(distillation_loss(wrap((one, two)), wrap((one, two)))) == pytest.approx(0.0, abs=1e-6)
    assert float(distillation_loss(wrap((one, two)), wrap((one + 1, two)))) > 0.01
    assert float(distillation_loss(wrap((one, two)), wrap((one, -two)))) > 0.01


def test_outputs_without_numbers_are_refused() -> None:
    with pytest.raises(TrainingError, match="no floating-point output"):
        distillation_loss(torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize("batch_statistics", [False, True])
def test_pruned_network_comes_closer_to_the_dense_one(batch_statistics: bool) -> None:
    model, inputs = network(), torch.randn(64, 3, 8, 8)
    model.train()
    for _ in range(20):
        model(inputs)
    small = pruned(model, inputs)
    before, dense = copy.deepcopy(small), copy.deepcopy(model.state_dict())
    modes = [m.training for m in small.modules()]
    seen: list[float] = []
    made = distil(
        small, model, [(inputs, torch.zeros(64))], steps=60, batch_size=32, batch_statistics=batch_statistics,
        listener=lambda _, share: seen.append(share),
    )  # fmt: skip
    assert made == 60
    assert seen == sorted(seen)
    assert [m.training for m in small.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), dense.values(), strict=True))
    with torch.no_grad():
        wanted = model.eval()(inputs)
        assert distillation_loss(small.eval()(inputs), wanted) < 0.5 * distillation_loss(before.eval()(inputs), wanted)
    changed = [
        n for n in ("1.running_mean", "1.running_var") if not torch.equal(small.state_dict()[n], before.state_dict()[n])
    ]
    assert bool(changed) == batch_statistics


def test_same_seed_gives_the_same_network() -> None:
    model, inputs = network().eval(), torch.randn(16, 3, 8, 8)
    results = []
    for _ in range(2):
        small = pruned(model, inputs)
        distil(small, model, [inputs], steps=5, seed=3)
        results.append(small.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*(r.values() for r in results), strict=True))


def test_time_limit_ends_distillation() -> None:
    model, inputs = network().eval(), torch.randn(16, 3, 8, 8)
    assert distil(pruned(model, inputs), model, [inputs], steps=10**9, time_limit=0.2) < 10**6
    assert distil(pruned(model, inputs), model, [inputs], steps=10, time_limit=0.0) == 0
