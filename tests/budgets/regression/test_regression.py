"""Cost estimators: scikit-learn's rules, exact gradients, monotonicity, known solutions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.exceptions import SkipTestWarning
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

from budgets.blocks import Blocks
from budgets.regression import (
    BilinearRidge,
    CostRegressor,
    GPResidual,
    MonotoneBoosting,
    PerOperationAdditive,
    PhysicsNNLS,
    ResidualBoosting,
    TopologyQuadratic,
)
from budgets.selection import candidates
from budgets.work_classes import physics_features
from dsa_hw.errors import ProfileError

ESTIMATORS = [
    PhysicsNNLS,
    PerOperationAdditive,
    TopologyQuadratic,
    BilinearRidge,
    GPResidual,
    MonotoneBoosting,
    ResidualBoosting,
]
NAMES = [
    "physics",
    "physics, coarse",
    "flops",
    "physics, blocks of 16",
    "per operation",
    "topology quadratic",
    "bilinear ridge",
    "physics + gp",
    "monotone boosting",
]


@pytest.fixture
def data(network: Callable[..., Any], cost: Callable[..., Any]) -> tuple[Any, np.ndarray, np.ndarray]:
    groups = network(size=8, operations=40, seed=1)
    alpha = np.random.default_rng(0).uniform(0.2, 1, (40, 8))
    return groups, alpha, cost(groups, alpha, spread=0.2) * np.exp(0.01 * np.random.default_rng(1).normal(size=40))


@pytest.mark.parametrize("estimator", [kind() for kind in ESTIMATORS], ids=lambda e: type(e).__name__)
def test_scikit_learn_to_the_letter(estimator: CostRegressor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkipTestWarning)
        results = check_estimator(estimator)
    failed = [result["check_name"] for result in results if result["status"] not in ("passed", "skipped")]
    assert not failed
    assert sum(result["status"] == "passed" for result in results) > 40


@pytest.mark.parametrize("name", NAMES)
def test_pipeline_clone_and_cross_validation(data: tuple[Any, np.ndarray, np.ndarray], name: str) -> None:
    groups, alpha, y = data
    estimator = candidates(groups)[name]
    again = clone(estimator)
    assert again.features is estimator.features, "an immutable feature map is shared"
    widths = alpha * groups.sizes
    pipeline = make_pipeline(FunctionTransformer(lambda w: w / groups.sizes), estimator)
    scores = cross_val_score(pipeline, widths, y, cv=4, scoring="neg_mean_absolute_percentage_error")
    assert scores.mean() > -0.25


@pytest.mark.parametrize("name", NAMES)
def test_gradient_equals_central_differences(data: tuple[Any, np.ndarray, np.ndarray], name: str) -> None:
    groups, alpha, y = data
    model = candidates(groups)[name].fit(alpha, y)
    points = np.random.default_rng(7).uniform(0.25, 0.95, (6, 8))

    def value(x: np.ndarray) -> np.ndarray:
        return model.value(torch.tensor(x, dtype=torch.float64)).numpy()

    step = 1e-4
    # Fourth-order central differences: the rounding of F limits a second-order quotient to about 1e-6 by itself.
    numeric = np.stack(
        [
            (
                8 * (value(points + step * e) - value(points - step * e))
                - (value(points + 2 * step * e) - value(points - 2 * step * e))
            )
            / (12 * step)
            for e in np.eye(8)
        ],
        -1,
    )
    gradient = model.gradient(points)
    scale = np.abs(numeric).max()
    np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-6 * scale * 1e-2)
    tensor = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    model.value(tensor).sum().backward()
    assert tensor.grad is not None
    np.testing.assert_allclose(tensor.grad.numpy(), gradient, rtol=1e-9, atol=1e-12 * scale)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "monotone boosting"])
def test_torch_value_is_the_prediction(data: tuple[Any, np.ndarray, np.ndarray], name: str) -> None:
    groups, alpha, y = data
    model = candidates(groups)[name].fit(alpha, y)
    tensor = torch.tensor(alpha).reshape(4, 10, 8)
    assert model.value(tensor).shape == (4, 10)
    np.testing.assert_allclose(model.value(tensor).numpy().ravel(), model.predict(alpha), rtol=1e-12)
    assert model.value(tensor[0, 0]).shape == ()
    assert model.value(tensor.float()).dtype == torch.float32


def test_boosting_says_that_its_gradient_is_a_surrogates(data: tuple[Any, np.ndarray, np.ndarray]) -> None:
    groups, alpha, y = data
    model = MonotoneBoosting(physics_features(groups), smoothing=1e-9).fit(alpha, y)
    # With vanishing smoothing the surrogate becomes the trees.
    points = np.random.default_rng(3).uniform(0.2, 1, (50, 8))
    np.testing.assert_allclose(model.value(torch.tensor(points)).numpy(), model.predict(points), rtol=1e-9)
    assert "surrogate" in (MonotoneBoosting.__doc__ or "")


@pytest.mark.parametrize(
    "name", ["physics", "physics, coarse", "flops", "physics, blocks of 16", "per operation", "monotone boosting"]
)
def test_monotone_models_have_no_violation_in_100000_pairs(data: tuple[Any, np.ndarray, np.ndarray], name: str) -> None:
    groups, alpha, y = data
    model = candidates(groups)[name].fit(alpha, y)
    assert model.monotone
    rng = np.random.default_rng(5)
    low = rng.uniform(0.01, 1, (100_000, 8))
    one = np.arange(8) == rng.integers(8, size=(100_000, 1))
    # Half of the pairs differ in one group, half in all of them.
    high = low + np.where(one | (np.arange(100_000) % 2 == 0)[:, None], rng.uniform(0, 1, low.shape) * (1 - low), 0.0)
    below, above = (np.concatenate([model.at(part) for part in np.array_split(x, 20)]) for x in (low, high))
    # Sums of the same positive numbers in the same order: rounding may differ in the last bits only.
    assert int((above < below * (1 - 1e-14)).sum()) == 0
    if name == "monotone boosting":
        smooth = [torch.cat([model.value(part) for part in torch.tensor(x[:5000]).split(500)]) for x in (low, high)]
        assert bool((smooth[1] >= smooth[0] * (1 - 1e-12)).all())


def test_not_monotone_where_not_claimed() -> None:
    assert not any(kind.monotone for kind in (TopologyQuadratic, BilinearRidge, GPResidual, ResidualBoosting))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), size=st.integers(2, 10))
def test_physics_recovers_a_cost_that_is_physical(network: Callable[..., Any], seed: int, size: int) -> None:
    groups = network(size=size, operations=3 * size, seed=seed)
    phi = physics_features(groups)
    rng = np.random.default_rng(seed)
    truth = phi.combine(rng.uniform(0, 1, len(phi)))
    alpha = rng.uniform(0.1, 1, (60, size))
    model = PhysicsNNLS(phi).fit(alpha, truth(alpha))
    unseen = rng.uniform(0.1, 1, (60, size))
    np.testing.assert_allclose(model.predict(unseen), truth(unseen), rtol=1e-6)
    assert (model.coef_ >= 0).all()


def test_blocks_are_paid_in_full() -> None:
    blocks = Blocks(16, (64, 24, 8, 16))
    widths = np.array([[16, 16, 8, 16], [32, 24, 4, 8], [64, 20, 1, 16]])
    expected = np.array([[16, 16, 16, 16], [32, 32, 16, 16], [64, 24, 16, 16]])
    effective = blocks(widths / np.array(blocks.sizes)) * np.array(blocks.sizes)
    np.testing.assert_allclose(effective, expected, rtol=1e-12)
    # A device with such blocks, profiled at multiples of 8: the estimator that knows them is right, the other is not.
    sizes = np.array(blocks.sizes)
    rng = np.random.default_rng(0)
    sampled = np.minimum(8 * rng.integers(1, 9, (60, 4)), sizes)
    on_blocks = np.where(sampled == sizes, sampled, np.maximum(16 * (sampled // 16), 8))
    y = 1 + (np.ceil(on_blocks / 16) * 16).sum(1)
    aware, naive = PhysicsNNLS(blocks=blocks).fit(on_blocks / sizes, y), PhysicsNNLS().fit(on_blocks / sizes, y)
    np.testing.assert_allclose(aware.predict(on_blocks / sizes), y, rtol=1e-9)
    assert np.abs(naive.predict(on_blocks / sizes) / y - 1).max() > 0.02
    with pytest.raises(ProfileError, match="blocks= is made for 4"):
        PhysicsNNLS(blocks=blocks).fit(np.ones((5, 3)), np.ones(5))
    with pytest.raises(ProfileError, match="at least 1"):
        Blocks(0, (8,))


def test_topology_quadratic_and_bilinear_recover_their_own_form(network: Callable[..., Any]) -> None:
    groups = network(size=5, operations=12, seed=2)
    phi = physics_features(groups)
    rng = np.random.default_rng(0)
    alpha, unseen = rng.uniform(0.1, 1, (400, 5)), rng.uniform(0.1, 1, (50, 5))
    for kind in (TopologyQuadratic, BilinearRidge):
        own = kind(phi)._map(5)
        truth = own.combine(rng.uniform(0.5, 1, len(own)))
        model = kind(phi).fit(alpha, truth(alpha))
        np.testing.assert_allclose(model.predict(unseen), truth(unseen), rtol=2e-4)


def test_per_operation_beats_classes_where_operations_differ(
    network: Callable[..., Any], cost: Callable[..., Any]
) -> None:
    groups = network(size=6, operations=20, seed=9)
    rng = np.random.default_rng(0)
    alpha, unseen = rng.uniform(0.2, 1, (60, 6)), rng.uniform(0.2, 1, (400, 6))
    y, truth = cost(groups, alpha, 0.8), cost(groups, unseen, 0.8)
    found = candidates(groups)
    error = {
        name: np.abs(found[name].fit(alpha, y).predict(unseen) / truth - 1).mean()
        for name in ("physics", "per operation")
    }
    assert error["per operation"] < 0.5 * error["physics"]


def test_gp_learns_what_physics_cannot(network: Callable[..., Any], cost: Callable[..., Any]) -> None:
    groups = network(size=4, operations=12, seed=3)
    phi = physics_features(groups)
    rng = np.random.default_rng(0)
    alpha, unseen = rng.uniform(0.2, 1, (120, 4)), rng.uniform(0.25, 0.95, (300, 4))

    def wavy(x: np.ndarray) -> np.ndarray:
        return cost(groups, x) * (1 + 0.1 * np.sin(4 * x.sum(-1)))

    base, model = PhysicsNNLS(phi).fit(alpha, wavy(alpha)), GPResidual(phi).fit(alpha, wavy(alpha))
    error = [np.abs(m.predict(unseen) / wavy(unseen) - 1).mean() for m in (base, model)]
    assert error[1] < 0.5 * error[0]
    # Far from the data the correction is gone and the base remains.
    far = np.full((1, 4), 50.0)
    np.testing.assert_allclose(model.predict(far), model.base_.predict(far), rtol=1e-9)


def test_widths_instead_of_keep_ratios(data: tuple[Any, np.ndarray, np.ndarray]) -> None:
    groups, alpha, y = data
    phi, widths = physics_features(groups), alpha * groups.sizes
    by_ratio, by_width = PhysicsNNLS(phi).fit(alpha, y), PhysicsNNLS(phi, sizes=groups.sizes).fit(widths, y)
    np.testing.assert_allclose(by_width.predict(widths), by_ratio.predict(alpha), rtol=1e-9)
    np.testing.assert_allclose(by_width.gradient(widths) * groups.sizes, by_ratio.gradient(alpha), rtol=1e-9)
    np.testing.assert_allclose(by_width.value(torch.tensor(widths)).numpy(), by_ratio.predict(alpha), rtol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_outside_the_profiled_range(data: tuple[Any, np.ndarray, np.ndarray], name: str) -> None:
    groups, alpha, y = data
    alpha = 0.3 + 0.5 * alpha
    low, high = alpha.min(0), alpha.max(0)
    point = 0.5 * (low + high)
    beyond = point.copy()
    beyond[2] = 1.3

    clip = candidates(groups, outside="clip")[name].fit(alpha, y)
    border = np.clip(beyond, low, high)
    assert clip.predict(beyond[None])[0] == clip.predict(border[None])[0]
    assert clip.gradient(beyond[None])[0, 2] == 0.0
    tensor = torch.tensor(beyond, requires_grad=True)
    clip.value(tensor).backward()
    assert tensor.grad is not None
    assert tensor.grad[2] == 0.0

    refuse = candidates(groups, outside="refuse")[name].fit(alpha, y)
    assert np.isfinite(refuse.predict(point[None])).all()
    for call in (
        lambda: refuse.predict(beyond[None]),
        lambda: refuse.gradient(beyond[None]),
        lambda: refuse.value(torch.tensor(beyond)),
    ):
        with pytest.raises(ProfileError, match="channel group 2 is outside the profiled range"):
            call()

    extrapolate = candidates(groups)[name].fit(alpha, y)
    if isinstance(extrapolate, (PhysicsNNLS, PerOperationAdditive)):
        assert extrapolate.predict(beyond[None])[0] > clip.predict(beyond[None])[0]
    with pytest.raises(ProfileError, match="extrapolate, clip, refuse"):
        PhysicsNNLS(outside="guess").fit(alpha, y)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_refuses_what_cannot_be_a_cost(kind: type[CostRegressor]) -> None:
    alpha = np.random.default_rng(0).uniform(0.1, 1, (10, 3))
    for y in (np.r_[-1.0, np.ones(9)], np.r_[0.0, np.ones(9)]):
        with pytest.raises(ProfileError, match="not positive"):
            kind().fit(alpha, y)
    with pytest.raises(ValueError, match="NaN"):
        kind().fit(alpha, np.r_[np.nan, np.ones(9)])
    with pytest.raises(ValueError, match="minimum of 2"):
        kind().fit(alpha[:1], np.ones(1))
    with pytest.raises(ProfileError, match="Negative values"):
        kind().fit(-alpha, np.ones(10))
    fitted = kind().fit(alpha, 1 + alpha.sum(1))
    with pytest.raises(ProfileError, match="fitted to 3 channel groups, this has 4"):
        fitted.value(torch.ones(4))


def test_feature_map_of_another_network(data: tuple[Any, np.ndarray, np.ndarray]) -> None:
    groups, alpha, y = data
    with pytest.raises(ProfileError, match="X has 5 channel groups and features= is made for 8"):
        PhysicsNNLS(physics_features(groups)).fit(alpha[:, :5], y)
    with pytest.raises(ProfileError, match="max_depth"):
        MonotoneBoosting(max_depth=0).fit(alpha, y)
