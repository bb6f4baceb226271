"""Mask estimators, against enumeration of all masks in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dsa_hw.errors import DsaError
from dsa_hw.methods.dsa.estimators import sample_masks
from dsa_hw.methods.dsa.relaxation import keep_probabilities
from tests.fakes.masks import EVERY, LAYOUT, expected_loss, importances, loss


def exact_gradient(p: Tensor) -> Tensor:
    leaf = p.detach().clone().requires_grad_()
    expected_loss(leaf).backward()
    assert leaf.grad is not None
    return leaf.grad


def estimate(p: Tensor, method: str, count: int, generator: torch.Generator, **options: float) -> Tensor:
    leaf = p.detach().clone().requires_grad_()
    sample = sample_masks(leaf, method, count, generator=generator, dtype=torch.float64, **options)
    sample.surrogate(loss(sample.masks)).backward()
    assert leaf.grad is not None
    return leaf.grad


def example_p() -> Tensor:
    return keep_probabilities(torch.tensor([0.4, 0.6, 0.5]).double(), importances(LAYOUT, 1), 0.8, LAYOUT)


def test_disarm_is_unbiased_by_enumeration_of_the_uniforms() -> None:
    """Its expectation over u is a finite sum: u below min(p, 1-p), between, and above, for each channel."""
    p = example_p()
    valid = LAYOUT.valid()
    values = p[valid]
    low, high = torch.minimum(values, 1 - values), torch.maximum(values, 1 - values)
    regions = torch.tensor(list(itertools.product((0, 1, 2), repeat=len(values))))
    chance = torch.stack([low, high - low, 1 - high])[regions, torch.arange(len(values))].prod(-1)
    u = torch.stack([low / 2, (low + high) / 2, (high + 1) / 2])[regions, torch.arange(len(values))]
    first, second = (u < values).double(), (u >= 1 - values).double()

    def padded(rows: Tensor) -> Tensor:
        result = torch.zeros(len(rows), *LAYOUT.shape, dtype=torch.float64)
        result[:, valid] = rows
        return result

    gap = loss(padded(first)) - loss(padded(second))
    score = torch.where(first != second, 0.5 * (1 - 2 * second) / low, 0.0)
    torch.testing.assert_close((chance * gap) @ score, exact_gradient(p)[valid], rtol=1e-9, atol=1e-12)


def test_disarm_mean_agrees_with_the_exact_gradient_within_its_standard_error() -> None:
    p, generator = example_p(), torch.Generator().manual_seed(0)
    draws = torch.stack([estimate(p, "disarm", 64, generator) for _ in range(400)])
    error = (draws.mean(0) - exact_gradient(p)) / (draws.std(0) / 20).clamp(min=1e-12)
    assert error[LAYOUT.valid()].abs().max() < 4.5
    one = torch.stack([estimate(p, "disarm", 2, generator) for _ in range(400)])
    assert 16 < one.var(0).sum() / draws.var(0).sum() < 64  # 32 pairs: a 32nd of the variance


@pytest.mark.parametrize("method", ["soft", "straight_through", "antithetic"])
def test_pathwise_estimators_are_unbiased_on_a_multilinear_loss(method: str) -> None:
    p, weights = example_p(), torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def multilinear(masks: Tensor) -> Tensor:
        flat = masks.reshape(len(masks), -1)
        return flat @ weights + flat[:, 0] * flat[:, 1] * flat[:, 4] - 2 * flat[:, 2] * flat[:, 5]

    leaf = p.clone().requires_grad_()
    chance = torch.where(LAYOUT.valid(), torch.where(EVERY > 0, leaf, 1 - leaf), 1.0).prod(-1).prod(-1)
    (chance * multilinear(EVERY)).sum().backward()
    truth = leaf.grad
    assert truth is not None
    draws = []
    for trial in range(300):
        leaf = p.clone().requires_grad_()
        count = 1 if method == "soft" else 16
        sample = sample_masks(leaf, method, count, generator=torch.Generator().manual_seed(trial), dtype=torch.float64)
        sample.surrogate(multilinear(sample.masks)).backward()
        assert leaf.grad is not None
        draws.append(leaf.grad[LAYOUT.valid()])
    result = torch.stack(draws)
    bound = 4.5 * result.std(0) / 300**0.5 + 1e-12
    assert ((result.mean(0) - truth[LAYOUT.valid()]).abs() < bound).all()
    assert method != "soft" or result.std(0).max() == 0


def test_relaxed_masks_tend_to_bernoulli_and_their_gradient_to_the_truth() -> None:
    p, generator = example_p(), torch.Generator().manual_seed(0)
    truth = exact_gradient(p)[LAYOUT.valid()]
    errors = []
    for temperature in (2.0, 0.2):
        draws = torch.stack([estimate(p, "relaxed", 512, generator, temperature=temperature) for _ in range(60)])
        errors.append(((draws.mean(0)[LAYOUT.valid()] - truth).norm() / truth.norm()).item())
    assert errors[1] < 0.5 * errors[0]
    assert errors[1] < 0.2
    masks = sample_masks(p, "relaxed", 4000, temperature=0.01, generator=generator, dtype=torch.float64).masks
    assert ((masks < 0.01) | (masks > 0.99)).double().mean() > 0.97
    assert (masks.mean(0) - p).abs().max() < 0.04
    assert (masks[:, ~LAYOUT.valid()] == 0).all()


@pytest.mark.parametrize("method", ["straight_through", "antithetic", "disarm"])
def test_masks_are_bernoulli_reproducible_and_zero_in_the_padding(method: str) -> None:
    p = example_p()
    masks = sample_masks(p, method, 4000, generator=torch.Generator().manual_seed(2)).masks
    assert set(masks.unique().tolist()) == {0.0, 1.0}
    assert masks.dtype == torch.float32
    assert (masks.mean(0) - p).abs().max() < 4.5 * 0.5 / 4000**0.5
    assert (masks[:, ~LAYOUT.valid()] == 0).all()
    assert torch.equal(masks, sample_masks(p, method, 4000, generator=torch.Generator().manual_seed(2)).masks)
    assert not torch.equal(masks, sample_masks(p, method, 4000, generator=torch.Generator().manual_seed(3)).masks)


def test_surrogate_keeps_the_gradient_of_other_parameters() -> None:
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    p = example_p().requires_grad_()
    sample = sample_masks(p, "disarm", 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = weight**2 * loss(sample.masks)
    value = sample.surrogate(losses)
    value.backward()
    assert value.item() == pytest.approx(losses.mean().item())
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx(2 * 2.0 * loss(sample.masks).mean().item())


def test_wrong_number_of_masks_or_losses_is_refused() -> None:
    b, alpha = importances(LAYOUT, 0), torch.full((3,), 0.5)
    for method, count in (("soft", 2), ("disarm", 3), ("antithetic", 1), ("straight_through", 0), ("none", 1)):
        with pytest.raises(DsaError, match=method):
            sample_masks(b, method, count)
    with pytest.raises(DsaError, match="2 losses"):
        sample_masks(alpha[None], "disarm", 2).surrogate(torch.zeros(3))
