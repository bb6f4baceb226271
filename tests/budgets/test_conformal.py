"""Conformal bounds: coverage on simulated data, and the arithmetic of the papers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.model_selection import LeaveOneOut

from budgets.conformal import Calibration, calibrate
from budgets.regression import PhysicsNNLS
from budgets.selection import CandidateComparison, candidates, compare_candidates
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
    split = Calibration("split", np.arange(0.0, 19.0), (model,), np.zeros(19, np.intp))
    assert split.rank(0.9) == 18
    assert split.guarantee(0.9) == 0.9
    at_one = float(model.predict(np.ones((1, 1)))[0])
    assert split.upper(np.ones((1, 1)), 0.9)[0][0] == pytest.approx(18.0 * at_one)
    assert split.lower(np.ones((1, 1)), 0.9)[0][0] == pytest.approx(2.0 * at_one)
    plus = Calibration("jackknife+", np.zeros(9), (model,), np.zeros(9, np.intp))
    assert plus.rank(0.9) == 9
    assert plus.guarantee(0.9) == pytest.approx(0.8)
    assert Calibration("cv+", np.zeros(50), (model,), np.zeros(50, np.intp)).guarantee(0.9) == pytest.approx(0.6)
    with pytest.raises(ProfileError, match=r"needs at least 19 .* got 9. Use at most 0.900"):
        plus.rank(0.95)
    for wrong in (0.0, 1.0, 90.0):
        with pytest.raises(ProfileError, match="strictly between 0 and 1"):
            plus.rank(wrong)


def uneven(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Keep ratios and costs whose error depends on the cost: 10% for the cheapest, 2% for the most expensive.

    Those in the middle cost 2% more than the form of the estimator can say.
    """
    rng = np.random.default_rng(seed)
    alpha = rng.uniform(0.3, 1.0, (size, 1)) * rng.uniform(0.6, 1, (size, 3))
    cost = 0.1 + alpha.sum(1)
    place = np.clip((cost - 0.5) / 2.2, 0, 1)
    bump = 0.02 * np.exp(-(((place - 0.5) / 0.15) ** 2))
    return alpha, cost * (1 + bump) * np.exp(0.1 * 0.2**place * rng.normal(size=size))


@pytest.mark.parametrize("method", ["jackknife+", "cv+", "split"])
def test_coverage_is_the_confidence_in_each_third_of_the_cost(method: str) -> None:
    hits: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for seed in range(60):
        alpha, y = uneven(400, seed)
        model = PhysicsNNLS().fit(alpha[:40], y[:40])
        third = np.argsort(np.argsort(alpha[80:].sum(1))) * 3 // 320
        for by_cost, found in hits.items():
            held = (alpha[40:80], y[40:80])
            bound = calibrate(model, alpha[:40], y[:40], method=method, calibration=held, by_cost=by_cost)
            hit = y[80:] <= bound.upper(alpha[80:], 0.9)[0]
            found.append(np.array([hit[third == k].mean() for k in range(3)]))
    even, constant = (np.mean(hits[by_cost], 0) for by_cost in (True, False))
    assert (even >= 0.85).all()
    assert (even <= 0.95).all()
    # Without the shape the cheapest third is covered too little and the most expensive one too much.
    assert constant[0] < even[0] - 0.03
    assert constant[2] > even[2] + 0.03


def test_jackknife_plus_is_that_of_mapie() -> None:
    regression = pytest.importorskip("mapie.regression")
    scores = pytest.importorskip("mapie.conformity_scores")
    alpha, y = uneven(60, 0)
    ours = calibrate(PhysicsNNLS().fit(alpha[:40], y[:40]), alpha[:40], y[:40], by_cost=False)
    theirs = regression.CrossConformalRegressor(
        PhysicsNNLS(),
        # 10% on each side of an interval of 80%.
        confidence_level=0.8,
        conformity_score=scores.GammaConformityScore(),
        method="plus",
        cv=LeaveOneOut(),
    ).fit_conformalize(alpha[:40], y[:40])
    _, interval = theirs.predict_interval(alpha[40:])
    np.testing.assert_allclose(ours.upper(alpha[40:], 0.9)[0], interval[:, 1, 0], rtol=1e-12)
    np.testing.assert_allclose(ours.lower(alpha[40:], 0.9)[0], interval[:, 0, 0], rtol=1e-12)


class _Part(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Centre or half-width of a calibration's bound, as an estimator for MAPIE."""

    def __init__(self, model: Any = None, shape: Any = None, part: str = "centre") -> None:
        self.model, self.shape, self.part = model, shape, part
        self.fitted_ = True

    def predict(self, X: Any) -> Any:  # noqa: N803
        cost = self.model.predict(X)
        mean, spread, _, _ = self.shape(np.log(cost)[:, None])
        return cost * (1 + mean[:, 0] if self.part == "centre" else spread[:, 0])

    def fit(self, X: Any, y: Any) -> Any:  # noqa: N803
        return self


def test_normalised_split_is_that_of_mapie() -> None:
    regression = pytest.importorskip("mapie.regression")
    scores = pytest.importorskip("mapie.conformity_scores")
    alpha, y = uneven(120, 1)
    model = PhysicsNNLS().fit(alpha[:40], y[:40])
    ours = calibrate(model, alpha[:40], y[:40], method="split", calibration=(alpha[40:80], y[40:80]))
    score = scores.ResidualNormalisedScore(_Part(model, ours.shape, "spread"), prefit=True, sym=False)
    centre = _Part(model, ours.shape)
    theirs = regression.SplitConformalRegressor(centre, confidence_level=0.8, conformity_score=score, prefit=True)
    _, interval = theirs.conformalize(alpha[40:80], y[40:80]).predict_interval(alpha[80:])
    np.testing.assert_allclose(ours.upper(alpha[80:], 0.9)[0], interval[:, 1, 0], rtol=1e-12)
    np.testing.assert_allclose(ours.lower(alpha[80:], 0.9)[0], interval[:, 0, 0], rtol=1e-12)


def test_a_model_without_error_has_a_bound_at_its_prediction() -> None:
    alpha = np.random.default_rng(0).uniform(0.2, 1, (30, 3))
    y = 1 + alpha.sum(1)
    bound = calibrate(PhysicsNNLS().fit(alpha, y), alpha, y)
    np.testing.assert_allclose(bound.upper(alpha, 0.9)[0], y, rtol=1e-7)


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
    assert bound.shape is not None
    for i in range(12):
        alone = PhysicsNNLS(physics_features(groups)).fit(np.delete(alpha, i, 0), np.delete(y, i))
        assert bound.shape.residuals[i] == pytest.approx(y[i] / alone.predict(alpha[i : i + 1])[0] - 1, rel=1e-6)
        # A residual as large as its own score is the measured cost.
        own = bound._bounds(np.stack([model.at(alpha[i : i + 1]) for model in bound.models], -1))[0]
        assert own[0, i] == pytest.approx(y[i], rel=1e-12)


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
        assert bound.shape is not None
        assert bound.shape.residuals[i] == pytest.approx(y[i] / alone.predict(alpha[i : i + 1])[0] - 1, rel=1e-6)


@pytest.mark.parametrize("method", ["jackknife+", "cv+", "split"])
@pytest.mark.parametrize("name", ["physics", "physics, blocks of 16", "monotone boosting"])
def test_bound_is_differentiable_and_consistent(
    network: Callable[..., Any], cost: Callable[..., Any], method: str, name: str
) -> None:
    if name == "monotone boosting" and method == "jackknife+":
        pytest.skip("30 boosted models; CV+ uses 10")
    groups = network(size=5, operations=20, seed=1)
    rng = np.random.default_rng(0)
    alpha = rng.uniform(0.2, 1, (60, 5))
    y = cost(groups, alpha) * np.exp((0.1 - 0.09 * alpha.mean(1)) * rng.normal(size=60))
    model = candidates(groups)[name].fit(alpha[:30], y[:30])
    bound = calibrate(model, alpha[:30], y[:30], method=method, calibration=(alpha[30:], y[30:]))
    points = rng.uniform(0.2, 1, (6, 5))
    tensor = torch.tensor(points, requires_grad=True)
    value = bound.upper_value(tensor, 0.9)
    if name == "physics":
        np.testing.assert_allclose(value.detach().numpy(), bound.upper(points, 0.9)[0], rtol=1e-12)
    value.sum().backward()
    assert tensor.grad is not None
    gradient = bound.upper_gradient(points, 0.9)
    np.testing.assert_allclose(tensor.grad.numpy(), gradient, rtol=1e-9)

    def at(x: np.ndarray) -> np.ndarray:
        return bound.upper_value(torch.tensor(x), 0.9).numpy()

    step = 1e-6
    numeric = np.stack([(at(points + step * e) - at(points - step * e)) / (2 * step) for e in np.eye(5)], -1)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-5, atol=1e-6 * np.abs(numeric).max())
    uppers = [bound.upper(points, c)[0] for c in (0.5, 0.7, 0.9, 0.96)]
    assert all((b >= a).all() for a, b in pairwise(uppers))


def test_rows_in_pieces_give_the_same_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    alpha, y = uneven(100, 0)
    bound = calibrate(PhysicsNNLS().fit(alpha[:30], y[:30]), alpha[:30], y[:30])
    upper, value = bound.upper(alpha, 0.9)[0], bound.upper_value(torch.tensor(alpha).reshape(4, 25, 3), 0.9)
    monkeypatch.setattr("budgets.conformal._PIECE", 5000)
    np.testing.assert_array_equal(bound.upper(alpha, 0.9)[0], upper)
    np.testing.assert_array_equal(bound.upper_value(torch.tensor(alpha).reshape(4, 25, 3), 0.9), value)


def test_wrong_arguments_are_refused(network: Callable[..., Any]) -> None:
    model = PhysicsNNLS().fit(np.linspace(0.1, 1, 10)[:, None], np.linspace(0.1, 1, 10))
    with pytest.raises(ProfileError, match="jackknife"):
        calibrate(model, np.ones((5, 1)), np.ones(5), method="bootstrap")
    with pytest.raises(ProfileError, match="needs held-out configurations"):
        calibrate(model, np.ones((5, 1)), np.ones(5), method="split")
