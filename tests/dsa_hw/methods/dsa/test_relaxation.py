"""Keep probabilities and their implicit gradient, against enumeration of all masks in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsa_hw.errors import WidthError
from dsa_hw.methods.dsa.relaxation import Layout, inexactness, keep_probabilities
from tests.fakes.masks import LAYOUT, SIZES, expected_loss, importances


def means(p: Tensor, layout: Layout) -> Tensor:
    return torch.stack([part.mean() for part in layout.split(p)])


@settings(max_examples=400)
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


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), beta2=st.floats(0.05, 30.0))
def test_closed_form_does_not_depend_on_the_scale_of_importance(seed: int, beta2: float) -> None:
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


@settings(max_examples=30)
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


def test_gradient_is_finite_if_every_slope_underflows() -> None:
    """Hard limit on a plateau: all f' are 0 in float64; the channels next to the threshold share the gradient."""
    layout = Layout((4,))
    alpha = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    p = keep_probabilities(alpha, layout.pad([np.array([1.0, 2.0, 4.0, 8.0])]), 1e6, layout)
    p.backward(torch.tensor([[1.0, 10.0, 100.0, 1000.0]], dtype=torch.float64))
    assert alpha.grad is not None
    assert alpha.grad.item() == pytest.approx(4 * (10 + 100) / 2, rel=1e-6)


def test_groups_are_independent_with_padding_and_own_beta2() -> None:
    b = importances(LAYOUT, 3)
    alpha = torch.tensor([0.4, 0.6, 0.5], dtype=torch.float64)
    beta2 = torch.tensor([0.1, 2.0, 9.0], dtype=torch.float64)
    p = LAYOUT.split(keep_probabilities(alpha, b, beta2, LAYOUT))
    for k, size in enumerate(SIZES):
        alone = keep_probabilities(alpha[k : k + 1], b[k : k + 1, :size], float(beta2[k]), Layout((size,)))
        torch.testing.assert_close(p[k], alone[0], rtol=0, atol=1e-10)


def test_input_out_of_range_is_refused() -> None:
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
