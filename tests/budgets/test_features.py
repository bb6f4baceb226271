"""Physics features: exact sums over operations, monotone, with a closed-form Jacobian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from budgets.features import FeatureMap, physics_features, work_class
from dsa_hw.channels.counts import Count, Operation, Term
from dsa_hw.errors import ProfileError


def conv(c_in: int, c_out: int, kernel: int, pixels_in: int, pixels_out: int, bias: bool = False) -> Operation:
    """A convolution from group 0 to group 1."""
    a, b = Count(0.0, np.array([c_in, 0.0])), Count(0.0, np.array([0.0, c_out]))
    weights = (Term(float(kernel**2), (a, b)), *((Term(1.0, (b,)),) if bias else ()))
    inputs, output = Count(0.0, a.coefficients * pixels_in), Count(0.0, b.coefficients * pixels_out)
    return Operation(
        "conv", "conv2d", "", (Term(2.0 * kernel**2 * pixels_out, (a, b)),), weights, (inputs,), output, False, False, 4
    )


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (conv(64, 64, 1, 196, 196), "pointwise"),
        (conv(64, 64, 1, 196, 196, bias=True), "pointwise"),
        (conv(8, 64, 1, 196, 196, bias=True), "pointwise"),
        (conv(64, 128, 1, 784, 196), "pointwise"),
        (conv(3, 96, 4, 224**2, 56**2), "pointwise"),
        (conv(64, 64, 3, 196, 196), "spatial"),
        (conv(64, 128, 3, 784, 196), "spatial"),
        (conv(3, 64, 7, 224**2, 112**2), "spatial"),
    ],
)
def test_class_of_a_convolution_without_its_kernel_size(operation: Operation, expected: str) -> None:
    assert work_class(operation) == expected


@pytest.mark.parametrize("granularity", ["coarse", "classes", "operations"])
def test_features_are_sums_over_operations(network: Callable[..., Any], granularity: str) -> None:
    groups = network(size=6, operations=30, seed=3)
    phi = physics_features(groups, granularity)
    alpha = np.random.default_rng(0).uniform(0.1, 1, (5, 6))
    work = [j for j, name in enumerate(phi.classes) if name.endswith("work")]
    expected = sum(term(alpha) for operation in groups.operations for term in operation.flops)
    np.testing.assert_allclose(phi(alpha)[:, work] @ phi.dense[work], expected, rtol=1e-12)
    moved = [j for j, name in enumerate(phi.names) if name.endswith("bytes")]
    expected = sum(
        4 * (sum(c(alpha) for c in (*operation.inputs, operation.output)) + sum(t(alpha) for t in operation.weights))
        for operation in groups.operations
    )
    np.testing.assert_allclose(phi(alpha)[:, moved] @ phi.dense[moved], expected, rtol=1e-12)
    np.testing.assert_allclose(phi(np.ones(6)), 1.0, rtol=1e-12)


def test_unknown_kind_is_charged_to_a_class_of_its_own(network: Callable[..., Any]) -> None:
    groups = network(size=2, operations=2)
    strange = Operation(
        "x",
        "fft_of_the_future",
        "",
        (),
        (),
        (Count(0.0, np.array([4.0, 0.0])),),
        Count(8.0, np.zeros(2)),
        False,
        False,
        4,
    )
    view = Operation("y", "view", "", (), (), (strange.output,), strange.output, True, False, 4)
    changed = type(groups)(groups.names, groups.sizes, (*groups.operations, strange, view), "f")
    phi = physics_features(changed)
    assert phi.dense[phi.names.index("other bytes")] == 4 * (4 + 8)


@pytest.mark.parametrize("granularity", ["coarse", "classes", "operations"])
def test_jacobian_torch_and_quadratic_agree(network: Callable[..., Any], granularity: str) -> None:
    groups = network(size=7, operations=40, seed=5)
    phi = physics_features(groups, granularity)
    rng = np.random.default_rng(1)
    alpha = rng.uniform(0.1, 1, (3, 7))
    step = 1e-5
    numeric = np.stack([(phi(alpha + step * e) - phi(alpha - step * e)) / (2 * step) for e in np.eye(7)], -1)
    np.testing.assert_allclose(phi.jacobian(alpha), numeric, rtol=1e-6, atol=1e-10)
    np.testing.assert_allclose(phi.value(torch.tensor(alpha)).numpy(), phi(alpha), rtol=1e-12)
    weights = rng.uniform(0, 1, len(phi))
    form = phi.combine(weights)
    np.testing.assert_allclose(form(alpha), phi(alpha) @ weights, rtol=1e-12)
    np.testing.assert_allclose(form.gradient(alpha), np.einsum("d,ndk->nk", weights, phi.jacobian(alpha)), rtol=1e-10)
    np.testing.assert_array_equal(form.A, form.A.T)
    assert form.monotone


def test_no_feature_falls_when_a_keep_ratio_grows(network: Callable[..., Any]) -> None:
    phi = physics_features(network(size=9, operations=40, seed=8), "operations")
    rng = np.random.default_rng(2)
    low = rng.uniform(0, 1, (20_000, 9))
    high = low + rng.uniform(0, 1, low.shape) * (1 - low)
    assert (phi(high) >= phi(low)).all()


def test_pairs_are_the_groups_that_meet(network: Callable[..., Any]) -> None:
    groups = network(size=6, operations=25, seed=11)
    met = set()
    for operation in groups.operations:
        for term in operation.flops:
            if len(term.factors) == 2:
                left, right = (set(np.flatnonzero(factor.coefficients).tolist()) for factor in term.factors)
                met |= {(min(i, j), max(i, j)) for i in left for j in right}
    assert set(physics_features(groups).pairs()) == met


def test_round_trip_is_bitwise(network: Callable[..., Any]) -> None:
    import json

    phi = physics_features(network(size=6, operations=25, seed=4), "operations")
    again = FeatureMap.from_dict(json.loads(json.dumps(phi.to_dict())))
    assert phi.same(again)
    assert phi.classes == again.classes
    alpha = np.random.default_rng(0).uniform(0, 1, (10, 6))
    assert np.array_equal(phi(alpha), again(alpha))


def test_bad_input(network: Callable[..., Any]) -> None:
    with pytest.raises(ProfileError, match="coarse, classes, operations"):
        physics_features(network(), "fine")
    with pytest.raises(ProfileError, match="negative size"):
        FeatureMap.from_terms({"x": [Term(1.0, (Count(2.0, np.array([-1.0])),))]}, 1)
    with pytest.raises(ProfileError, match="at most two"):
        FeatureMap.from_terms({"x": [Term(1.0, (Count(1.0, np.ones(1)),) * 3)]}, 1)
