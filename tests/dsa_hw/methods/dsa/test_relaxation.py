"""Keep probabilities, their implicit gradient and the mask estimators, against enumeration of every mask in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsa_hw.errors import DsaError, WidthError
from dsa_hw.methods.dsa.estimators import sample_masks
from dsa_hw.methods.dsa.relaxation import Layout, inexactness, keep_probabilities

SIZES = (4, 3, 1)
LAYOUT = Layout(SIZES)


def means(p: Tensor, layout: Layout) -> Tensor:
    return torch.stack([part.mean() for part in layout.split(p)])


def importances(layout: Layout, seed: int) -> Tensor:
    rng = np.random.default_rng(seed)
    return layout.pad([np.exp(rng.normal(size=size)) for size in layout.sizes])


def loss(masks: Tensor, seed: int = 0) -> Tensor:
    """A smooth, strongly non-linear function of masks (N, K, C_max) -> (N,)."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.cat(list(LAYOUT.split(masks)), -1).to(torch.float64)
    first = torch.randn(flat.shape[-1], 6, generator=generator, dtype=torch.float64)
    second = torch.randn(6, generator=generator, dtype=torch.float64)
    return torch.nn.functional.softplus(torch.tanh(flat @ first) @ second + 0.3 * flat[..., 0] * flat[..., 5])


def all_masks() -> Tensor:
    """Every mask of LAYOUT, (2^8, K, C_max)."""
    rows = [
        LAYOUT.pad(torch.tensor(bits, dtype=torch.float64).split(SIZES))
        for bits in itertools.product((0.0, 1.0), repeat=sum(SIZES))
    ]
    return torch.stack(rows)


EVERY = all_masks()


def expected_loss(p: Tensor) -> Tensor:
    """E[L] by enumeration; differentiable in p (K, C_max)."""
    valid = LAYOUT.valid()
    chance = torch.where(EVERY > 0, p, 1.0 - p)
    return (torch.where(valid, chance, 1.0).prod(-1).prod(-1) * loss(EVERY)).sum()


@settings(max_examples=400, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(["normal", "equal", "zero", "half zero", "one", "tiny", "huge", "mixed"]),
    beta2=st.sampled_from([1e-3, 0.05, 1.0, 20.0, 1e3, 1e6, 1e11]),
    edge=st.sampled_from([None, 0.0, 1e-14, 1e-9, 1e-4, 1 - 1e-4, 1 - 1e-9, 1.0]),
)
def test_mean_is_alpha_for_any_importance(
    sizes: list[int], seed: int, kind: str, beta2: float, edge: float | None
) -> None:
    rng, layout = np.random.default_rng(seed), Layout(tuple(sizes))

    def draw(size: int) -> np.ndarray:
        base = np.exp(rng.normal(size=size))
        kinds: dict[str, np.ndarray] = {
            "normal": base,
            "equal": np.full(size, 0.7),
            "zero": np.zeros(size),
            "half zero": base * (rng.random(size) < 0.5),
            "one": np.eye(1, size)[0],
            "tiny": base * 1e-300,
            "huge": base * 1e300,
            "mixed": 10.0 ** rng.uniform(-300, 300, size),
        }
        return kinds[kind]

    alpha = torch.from_numpy(rng.random(len(sizes))) if edge is None else torch.full((len(sizes),), edge).double()
    alpha.requires_grad_()
    p = keep_probabilities(alpha, layout.pad([draw(size) for size in sizes]), beta2, layout)
    assert (means(p, layout) - alpha).abs().max() < 1e-10
    assert ((p >= 0) & (p <= 1)).all()
    assert (p[~layout.valid()] == 0).all()
    (p**2).sum().backward()
    assert alpha.grad is not None
    assert alpha.grad.isfinite().all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), beta2=st.floats(0.05, 30.0))
def test_closed_form_of_p_order_and_scale(seed: int, beta2: float) -> None:
    b = importances(LAYOUT, seed)
    alpha = torch.tensor([0.3, 0.8, 0.5], dtype=torch.float64)
    p = keep_probabilities(alpha, b, beta2, LAYOUT)
    # logit(p_i) - logit(p_j) = beta2 (log b_i - log b_j): the sigmoid-log family, whatever beta1 is.
    logits, logs = torch.logit(p[0]), b[0].log()
    clear = (p[0] > 1e-4) & (p[0] < 1 - 1e-4)  # elsewhere logit(p) has lost its digits
    logits, logs = logits[clear], logs[clear]
    spread = logits - logits[:1]
    torch.testing.assert_close(spread, beta2 * (logs - logs[:1]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(keep_probabilities(alpha, b * 1e7, beta2, LAYOUT), p, rtol=0, atol=1e-10)
    bigger = keep_probabilities(alpha + 0.1, b, beta2, LAYOUT)
    assert (bigger >= p).all()


@pytest.mark.parametrize("size", [3, 10, 64])
def test_inexactness_vanishes_as_beta2_grows(size: int) -> None:
    layout = Layout((size,))
    b = layout.pad([np.linspace(1.0, 2.0, size)])
    alpha = torch.tensor([1.0 / 3.0 if size == 3 else 0.5], dtype=torch.float64)
    values = [inexactness(keep_probabilities(alpha, b, beta2, layout)).item() for beta2 in (0.05, 15.0, 250.0, 1e5)]
    assert all(later < earlier for earlier, later in itertools.pairwise(values))
    assert values[0] == pytest.approx(size * alpha.item() * (1 - alpha.item()), rel=1e-2)
    assert values[-1] < 1e-12
    hard = keep_probabilities(alpha, b, 1e11, layout)
    assert hard.round().sum() == round(size * alpha.item())
    assert hard[0, -1] == 1


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), beta2=st.sampled_from([0.05, 0.7, 3.0, 12.0]))
def test_implicit_gradient_is_the_finite_difference_of_the_enumerated_loss(seed: int, beta2: float) -> None:
    b = importances(LAYOUT, seed)
    alpha = torch.from_numpy(np.random.default_rng(seed).uniform(0.1, 0.9, 3)).requires_grad_()
    expected_loss(keep_probabilities(alpha, b, beta2, LAYOUT)).backward()
    step = 1e-5
    for k in range(3):
        shift = torch.zeros(3, dtype=torch.float64)
        shift[k] = step
        values = [
            expected_loss(keep_probabilities(alpha.detach() + i * shift, b, beta2, LAYOUT)).item()
            for i in (-2, -1, 1, 2)
        ]
        difference = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * step)
        assert alpha.grad is not None
        # Truncation of the difference grows with beta2^4 step^4; at a step of 1e-4 it is 5e-5 for some seeds.
        assert alpha.grad[k].item() == pytest.approx(difference, rel=1e-5, abs=1e-6)


def test_gradient_survives_underflow_of_every_slope() -> None:
    """Hard limit on a plateau: all f' are 0 in float64; the channels next to the threshold share the gradient."""
    layout = Layout((4,))
    alpha = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    p = keep_probabilities(alpha, layout.pad([np.array([1.0, 2.0, 4.0, 8.0])]), 1e6, layout)
    p.backward(torch.tensor([[1.0, 10.0, 100.0, 1000.0]], dtype=torch.float64))
    assert alpha.grad is not None
    assert alpha.grad.item() == pytest.approx(4 * (10 + 100) / 2, rel=1e-6)


def test_per_group_beta2_and_padding_do_not_mix_groups() -> None:
    b = importances(LAYOUT, 3)
    alpha = torch.tensor([0.4, 0.6, 0.5], dtype=torch.float64)
    beta2 = torch.tensor([0.1, 2.0, 9.0], dtype=torch.float64)
    p = LAYOUT.split(keep_probabilities(alpha, b, beta2, LAYOUT))
    for k, size in enumerate(SIZES):
        alone = keep_probabilities(alpha[k : k + 1], b[k : k + 1, :size], float(beta2[k]), Layout((size,)))
        torch.testing.assert_close(p[k], alone[0], rtol=0, atol=1e-10)


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


def test_disarm_sampled_mean_agrees_with_the_truth_within_its_own_error() -> None:
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


def test_surrogate_leaves_the_gradient_of_other_parameters_alone() -> None:
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    p = example_p().requires_grad_()
    sample = sample_masks(p, "disarm", 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = weight**2 * loss(sample.masks)
    value = sample.surrogate(losses)
    value.backward()
    assert value.item() == pytest.approx(losses.mean().item())
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx(2 * 2.0 * loss(sample.masks).mean().item())


def test_bad_input_is_refused_with_a_reason() -> None:
    b, alpha = importances(LAYOUT, 0), torch.full((3,), 0.5)
    with pytest.raises(WidthError, match=r"\[0, 1\]"):
        keep_probabilities(torch.tensor([0.5, 1.5, 0.5]), b, 1.0, LAYOUT)
    for wrong in (-1.0, float("nan"), float("inf")):
        broken = b.clone()
        broken[1, 0] = wrong
        with pytest.raises(WidthError, match=r"groups \[1\]"):
            keep_probabilities(alpha, broken, 1.0, LAYOUT)
    with pytest.raises(WidthError, match="beta2"):
        keep_probabilities(alpha, b, 0.0, LAYOUT)
    with pytest.raises(WidthError, match="shape"):
        keep_probabilities(alpha[:2], b, 1.0, LAYOUT)
    with pytest.raises(WidthError, match="lengths"):
        LAYOUT.pad([np.ones(4), np.ones(4), np.ones(1)])
    with pytest.raises(WidthError):
        Layout((3, 0))
    for method, count in (("soft", 2), ("disarm", 3), ("antithetic", 1), ("straight_through", 0), ("none", 1)):
        with pytest.raises(DsaError, match=method):
            sample_masks(b, method, count)
    with pytest.raises(DsaError, match="2 losses"):
        sample_masks(alpha[None], "disarm", 2).surrogate(torch.zeros(3))
