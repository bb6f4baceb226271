"""Properties of all estimators: scikit-learn's checks, exact gradients, monotonicity, range."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear
from sklearn.base import clone
from sklearn.exceptions import SkipTestWarning
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

from budgets.regression import (
    BilinearRidge,
    CostRegressor,
    FastestKernel,
    GPResidual,
    MonotoneBoosting,
    PerOperationAdditive,
    PhysicsNNLS,
    ResidualBoosting,
    TopologyQuadratic,
)
from budgets.selection import candidates as all_candidates
from budgets.work_classes import physics_features
from dsa_hw.errors import ProfileError

Data = tuple[Any, np.ndarray, np.ndarray]
ESTIMATORS = [
    PhysicsNNLS,
    PerOperationAdditive,
    TopologyQuadratic,
    BilinearRidge,
    FastestKernel,
    GPResidual,
    MonotoneBoosting,
    ResidualBoosting,
]
NAMES = [
    "physics",
    "physics, coarse",
    "flops",
    "physics, blocks of 16",
    "physics, blocks of 16, narrow inputs",
    "per operation",
    "fastest kernel",
    "topology quadratic",
    "bilinear ridge",
    "physics + gp",
    "monotone boosting",
]


def candidates(groups: Any, outside: str = "extrapolate") -> dict[str, CostRegressor]:
    return all_candidates(groups, outside, gpu=True)


@pytest.mark.parametrize("estimator", [kind() for kind in ESTIMATORS], ids=lambda e: type(e).__name__)
def test_estimators_pass_the_checks_of_scikit_learn(estimator: CostRegressor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkipTestWarning)
        results = check_estimator(estimator)
    failed = [result["check_name"] for result in results if result["status"] not in ("passed", "skipped")]
    assert not failed
    assert sum(result["status"] == "passed" for result in results) > 40


@pytest.mark.parametrize("name", NAMES)
def test_estimators_work_in_a_pipeline_with_cross_validation(data: Data, name: str) -> None:
    groups, alpha, y = data
    estimator = candidates(groups)[name]
    again = clone(estimator)
    assert again.features is estimator.features, "an immutable feature map is shared"
    widths = alpha * groups.sizes
    pipeline = make_pipeline(FunctionTransformer(lambda w: w / groups.sizes), estimator)
    scores = cross_val_score(pipeline, widths, y, cv=4, scoring="neg_mean_absolute_percentage_error")
    assert scores.mean() > -0.25


@pytest.mark.parametrize("name", NAMES)
def test_gradient_equals_central_differences(data: Data, name: str) -> None:
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


@pytest.mark.parametrize("name", NAMES)
def test_smooth_is_the_torch_value(data: Data, name: str) -> None:
    groups, alpha, y = data
    model = candidates(groups)[name].fit(alpha, y)
    points = np.random.default_rng(3).uniform(0.05, 1, (40, 8))
    np.testing.assert_allclose(model.smooth(points), model.value(torch.tensor(points)).numpy(), rtol=1e-12)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("monotone boosting", "fastest kernel")])
def test_torch_value_is_the_prediction(data: Data, name: str) -> None:
    groups, alpha, y = data
    model = candidates(groups)[name].fit(alpha, y)
    if model.blocks is not None:
        # Between blocks the prediction has steps and the value is their chord.
        assert np.abs(model.value(torch.tensor(alpha)).numpy() / model.predict(alpha) - 1).max() > 1e-3
        step = model.blocks.steps
        alpha = np.maximum(np.round(alpha * groups.sizes / step) * step, step)
        alpha = np.where(alpha > groups.sizes, groups.sizes, alpha) / groups.sizes
    tensor = torch.tensor(alpha).reshape(4, 10, 8)
    assert model.value(tensor).shape == (4, 10)
    np.testing.assert_allclose(model.value(tensor).numpy().ravel(), model.predict(alpha), rtol=1e-12)
    assert model.value(tensor[0, 0]).shape == ()
    assert model.value(tensor.float()).dtype == torch.float32


@pytest.mark.parametrize("name", [*NAMES[:4], "per operation", "fastest kernel", "monotone boosting"])
def test_monotone_models_do_not_fall_in_100000_pairs(data: Data, name: str) -> None:
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
    if name in ("monotone boosting", "fastest kernel", "physics, blocks of 16"):
        smooth = [torch.cat([model.value(part) for part in torch.tensor(x[:5000]).split(500)]) for x in (low, high)]
        assert bool((smooth[1] >= smooth[0] * (1 - 1e-12)).all())


def test_narrow_inputs_may_cost_more_than_a_block_but_the_value_does_not_fall(data: Data) -> None:
    groups, _, _ = data
    model = candidates(groups)["physics, blocks of 16, narrow inputs"]
    assert not model.monotone
    rng = np.random.default_rng(0)
    widths = np.minimum(8 * rng.integers(1, 17, (80, 8)), groups.sizes)
    columns = model.features
    assert columns is not None
    assert model.blocks is not None
    narrow = columns.names.index("narrow convolution work")
    coefficients = rng.uniform(0.5, 1, len(columns))
    coefficients[narrow] = 3.0
    alpha = widths / groups.sizes
    y = columns(model.blocks(alpha)) @ coefficients
    model.fit(alpha, y)
    np.testing.assert_allclose(model.predict(alpha), y, rtol=1e-6)
    eight, sixteen = np.full((1, 8), 8) / groups.sizes, np.full((1, 8), 16) / groups.sizes
    assert model.predict(eight) > model.predict(sixteen)
    values = model.value(torch.tensor(np.linspace(0.01, 1, 500)[:, None] * np.ones(8)))
    assert bool((values.diff() >= 0).all())


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_equal_weights_change_nothing_and_a_small_weight_leaves_a_row_out(
    data: Data, kind: type[CostRegressor]
) -> None:
    groups, alpha, y = data
    phi = physics_features(groups, "operations" if kind is PerOperationAdditive else "classes")
    plain, equal = kind(phi).fit(alpha, y), kind(phi).fit(alpha, y, np.full(40, 0.3))
    np.testing.assert_array_equal(plain.predict(alpha), equal.predict(alpha))
    wrong = np.where(np.arange(40) == 7, 3 * y, y)
    light = kind(phi).fit(alpha, wrong, np.where(np.arange(40) == 7, 1e-8, 1.0))
    without = kind(phi).fit(np.delete(alpha, 7, 0), np.delete(y, 7))
    error, spoilt = (
        np.abs(m.predict(alpha) / without.predict(alpha) - 1).mean() for m in (light, kind(phi).fit(alpha, wrong))
    )
    assert error < 0.2 * spoilt
    for weights in (np.zeros(40), np.ones(39), np.full(40, np.nan)):
        with pytest.raises(ProfileError, match="`weights` must be 40 finite numbers above 0"):
            kind(phi).fit(alpha, y, weights)


def test_weighted_physics_is_weighted_least_squares(data: Data) -> None:
    groups, alpha, y = data
    phi = physics_features(groups, "coarse")
    weights = np.random.default_rng(2).uniform(0.1, 1, 40)
    model = PhysicsNNLS(phi).fit(alpha, y, weights)
    design = phi(alpha) / y[:, None]
    found = lsq_linear(np.sqrt(weights)[:, None] * design, np.sqrt(weights), (0, np.inf), tol=1e-14)
    np.testing.assert_allclose(model.coef_, found.x, rtol=1e-5, atol=1e-9 * found.x.max())


def test_widths_give_the_same_model_as_keep_ratios(data: Data) -> None:
    groups, alpha, y = data
    phi, widths = physics_features(groups), alpha * groups.sizes
    by_ratio, by_width = PhysicsNNLS(phi).fit(alpha, y), PhysicsNNLS(phi, sizes=groups.sizes).fit(widths, y)
    np.testing.assert_allclose(by_width.predict(widths), by_ratio.predict(alpha), rtol=1e-9)
    np.testing.assert_allclose(by_width.gradient(widths) * groups.sizes, by_ratio.gradient(alpha), rtol=1e-9)
    np.testing.assert_allclose(by_width.value(torch.tensor(widths)).numpy(), by_ratio.predict(alpha), rtol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_points_outside_the_range_are_clipped_refused_or_extrapolated(data: Data, name: str) -> None:
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
    if isinstance(extrapolate, (PhysicsNNLS, PerOperationAdditive, FastestKernel)):
        assert extrapolate.predict(beyond[None])[0] > clip.predict(beyond[None])[0]
    with pytest.raises(ProfileError, match="extrapolate, clip, refuse"):
        PhysicsNNLS(outside="guess").fit(alpha, y)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_data_that_cannot_be_costs_are_refused(kind: type[CostRegressor]) -> None:
    alpha = np.random.default_rng(0).uniform(0.1, 1, (10, 3))
    for y in (np.r_[-1.0, np.ones(9)], np.r_[0.0, np.ones(9)]):
        with pytest.raises(ProfileError, match="must be positive"):
            kind().fit(alpha, y)
    with pytest.raises(ValueError, match="NaN"):
        kind().fit(alpha, np.r_[np.nan, np.ones(9)])
    with pytest.raises(ValueError, match="minimum of 2"):
        kind().fit(alpha[:1], np.ones(1))
    with pytest.raises(ProfileError, match="Negative values"):
        kind().fit(-alpha, np.ones(10))
    fitted = kind().fit(alpha, 1 + alpha.sum(1))
    with pytest.raises(ProfileError, match="fitted to 3 channel groups; got 4"):
        fitted.value(torch.ones(4))


def test_features_of_another_network_are_refused(data: Data) -> None:
    groups, alpha, y = data
    with pytest.raises(ProfileError, match="X has 5 channel groups, but `features` has 8"):
        PhysicsNNLS(physics_features(groups)).fit(alpha[:, :5], y)
    with pytest.raises(ProfileError, match="max_depth"):
        MonotoneBoosting(max_depth=0).fit(alpha, y)
