"""Conformal bounds: coverage on simulated data, and the arithmetic of the papers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from budgets.conformal import Calibration, calibrate
from budgets.regression import PhysicsNNLS
from budgets.selection import CandidateComparison, compare_candidates
from budgets.work_classes import physics_features
from dsa_hw.errors import ProfileError


@pytest.mark.parametrize("method", ["jackknife+", "cv+", "split"])
@pytest.mark.parametrize("spread", [0.0, 0.5], ids=["model right", "model wrong"])
def test_coverage_is_the_confidence_over_repeated_splits(
    network: Callable[..., Any], cost: Callable[..., Any], method: str, spread: float
) -> None:
    groups = network(size=8, operations=40, seed=1)
    phi = physics_features(groups)
    covered, below, widths = [], [], []
    for seed in range(80):
        rng = np.random.default_rng(seed)
        alpha = rng.uniform(0.2, 1, (240, 8))
        y = cost(groups, alpha, spread) * np.exp(0.02 * rng.normal(size=240))
        model = PhysicsNNLS(phi).fit(alpha[:40], y[:40])
        held = (alpha[200:], y[200:])
        bound = calibrate(model, alpha[:40], y[:40], method=method, calibration=held, seed=seed)
        upper, _ = bound.upper(alpha[40:200], 0.9)
        lower, _ = bound.lower(alpha[40:200], 0.9)
        covered.append((y[40:200] <= upper).mean())
        below.append((y[40:200] >= lower).mean())
        widths.append(np.median(upper / model.predict(alpha[40:200]) - 1))
    assert 0.87 <= np.mean(covered) <= 0.95
    assert 0.87 <= np.mean(below) <= 0.95
    # Where the model is wrong, the bound is wider and still covers.
    assert (0 < np.mean(widths) <= 0.07) if spread == 0 else np.mean(widths) > 0.07
    assert np.mean(covered) >= bound.guarantee(0.9) - 0.02, "up to the noise of 80 repetitions"


def test_rank_and_guarantee_are_those_of_the_papers() -> None:
    model = PhysicsNNLS().fit(np.linspace(0.1, 1, 10)[:, None], np.linspace(0.1, 1, 10))
    split = Calibration("split", np.arange(1.0, 20.0), (model,), np.zeros(19, np.intp))
    assert split.rank(0.9) == 18
    assert split.guarantee(0.9) == 0.9
    at_one = float(model.predict(np.ones((1, 1)))[0])
    assert split.upper(np.ones((1, 1)), 0.9)[0][0] == pytest.approx(18.0 * at_one)
    assert split.lower(np.ones((1, 1)), 0.9)[0][0] == pytest.approx(2.0 * at_one)
    plus = Calibration("jackknife+", np.ones(9), (model,), np.zeros(9, np.intp))
    assert plus.rank(0.9) == 9
    assert plus.guarantee(0.9) == pytest.approx(0.8)
    assert Calibration("cv+", np.ones(50), (model,), np.zeros(50, np.intp)).guarantee(0.9) == pytest.approx(0.6)
    with pytest.raises(ProfileError, match=r"needs at least 19 .* got 9. Use at most 0.900"):
        plus.rank(0.95)
    for wrong in (0.0, 1.0, 90.0):
        with pytest.raises(ProfileError, match="strictly between 0 and 1"):
            plus.rank(wrong)


def test_jackknife_models_have_not_seen_their_configuration(
    network: Callable[..., Any], cost: Callable[..., Any]
) -> None:
    groups = network(size=4, operations=12, seed=1)
    rng = np.random.default_rng(0)
    alpha = rng.uniform(0.2, 1, (12, 4))
    y = cost(groups, alpha) * np.exp(0.05 * rng.normal(size=12))
    model = PhysicsNNLS(physics_features(groups)).fit(alpha, y)
    bound = calibrate(model, alpha, y)
    assert len(bound.models) == 12
    for i in range(12):
        alone = PhysicsNNLS(physics_features(groups)).fit(np.delete(alpha, i, 0), np.delete(y, i))
        assert bound.ratios[i] == pytest.approx(y[i] / alone.predict(alpha[i : i + 1])[0], rel=1e-9)


class _Wavy(PhysicsNNLS):
    """Physics times an arbitrary ripple; the lowest cross-validated error of many such candidates is low by chance."""

    def __init__(
        self, features: Any = None, *, ripple: int = 0, sizes: Any = None, blocks: Any = None, outside: str = "clip"
    ) -> None:
        super().__init__(features, sizes=sizes, blocks=blocks, outside=outside)
        self.ripple = ripple

    def _predict(self, alpha: Any) -> Any:
        direction = 8 * np.random.default_rng(self.ripple).normal(size=alpha.shape[1])
        return super()._predict(alpha) * (1 + 0.06 * np.sin(alpha @ direction))


def _chooser(found: CandidateComparison, contenders: dict[str, PhysicsNNLS]) -> Callable[[Any], PhysicsNNLS]:
    return lambda rows: contenders[found.without(rows)]


def test_the_bound_accounts_for_the_choice_among_candidates() -> None:
    contenders = {str(i): _Wavy(ripple=i) for i in range(20)}
    naive, honest = [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        alpha = rng.uniform(0.2, 1, (220, 4))
        y = alpha.sum(1) * np.exp(0.03 * rng.normal(size=220))
        found = compare_candidates(contenders, alpha[:20], y[:20], repeats=1, seed=seed)
        for choose, covered in ((None, naive), (_chooser(found, contenders), honest)):
            bound = calibrate(contenders[found.chosen], alpha[:20], y[:20], choose=choose)
            covered.append((y[20:] <= bound.upper(alpha[20:], 0.9)[0]).mean())
    assert np.mean(naive) < 0.9 <= np.mean(honest)
    assert np.mean(honest) > np.mean(naive) + 0.02


def test_left_out_configurations_have_no_part_in_the_choice() -> None:
    rng = np.random.default_rng(0)
    alpha = rng.uniform(0.2, 1, (12, 3))
    y = alpha.sum(1) * np.exp(0.03 * rng.normal(size=12))
    contenders = {"first": PhysicsNNLS(), "other": _Wavy(ripple=3)}
    # Configurations 0 to 5 favour "other", 6 to 11 do not; "other" is chosen only with all six.
    first, gain = np.full(12, 0.05), np.where(np.arange(12) < 6, 0.01, -0.004)
    chosen = CandidateComparison(
        compare_candidates(contenders, alpha, y).table, "other", "", {}, {"first": first, "other": first - gain}
    )
    assert chosen.without(np.array([], np.intp)) == "other"
    rows = [chosen.without(np.array([i])) for i in range(12)]
    assert rows == ["first"] * 6 + ["other"] * 6
    bound = calibrate(contenders["other"], alpha, y, choose=_chooser(chosen, contenders))
    for i in range(12):
        assert type(bound.models[bound.owner[i]]) is type(contenders[rows[i]])
        kept = np.delete(np.arange(12), i)
        alone = contenders[rows[i]].fit(alpha[kept], y[kept])
        assert bound.ratios[i] == pytest.approx(y[i] / alone.predict(alpha[i : i + 1])[0], rel=1e-9)


def test_bound_is_differentiable_and_consistent(network: Callable[..., Any], cost: Callable[..., Any]) -> None:
    groups = network(size=5, operations=20, seed=1)
    rng = np.random.default_rng(0)
    alpha = rng.uniform(0.2, 1, (30, 5))
    y = cost(groups, alpha) * np.exp(0.05 * rng.normal(size=30))
    model = PhysicsNNLS(physics_features(groups)).fit(alpha, y)
    bound = calibrate(model, alpha, y)
    points = rng.uniform(0.2, 1, (6, 5))
    tensor = torch.tensor(points, requires_grad=True)
    value = bound.upper_value(tensor, 0.9)
    np.testing.assert_allclose(value.detach().numpy(), bound.upper(points, 0.9)[0], rtol=1e-12)
    value.sum().backward()
    assert tensor.grad is not None
    np.testing.assert_allclose(tensor.grad.numpy(), bound.upper_gradient(points, 0.9), rtol=1e-9)
    uppers = [bound.upper(points, c)[0] for c in (0.5, 0.7, 0.9, 0.96)]
    assert all((b >= a).all() for a, b in pairwise(uppers))


def test_wrong_arguments_are_refused(network: Callable[..., Any]) -> None:
    model = PhysicsNNLS().fit(np.linspace(0.1, 1, 10)[:, None], np.linspace(0.1, 1, 10))
    with pytest.raises(ProfileError, match="jackknife"):
        calibrate(model, np.ones((5, 1)), np.ones(5), method="bootstrap")
    with pytest.raises(ProfileError, match="needs held-out configurations"):
        calibrate(model, np.ones((5, 1)), np.ones(5), method="split")
