"""Classes of work, and physics features as sums over operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import budgets
from budgets.work_classes import physics_features, unit_channels, work_class
from dsa_hw.channels import find_groups
from dsa_hw.channels.counts import Count, Operation, Term
from dsa_hw.errors import ProfileError
from dsa_hw.zoo.torchvision_compat import torchvision


class Net(nn.Module):
    """Dense, depthwise and pointwise convolutions, a residual sum and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1, bias=False)
        self.expand, self.depth = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3, 1, 1, groups=32)
        self.project, self.head = nn.Conv2d(32, 16, 1), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        y = self.project(nn.functional.silu(self.depth(self.expand(x))))
        return self.head((x + y).mean((2, 3)))  # type: ignore[no-any-return]


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


def test_work_of_a_real_network_adds_up_to_its_flops() -> None:
    groups = find_groups(Net().eval(), (torch.zeros(1, 3, 32, 32),))
    phi = physics_features(groups)
    assert {"spatial work", "pointwise work", "depthwise work", "matrix work", "transcendental bytes"} <= set(phi.names)
    alpha = np.random.default_rng(0).uniform(0.1, 1, (10, len(groups)))
    work = [j for j, name in enumerate(phi.names) if name.endswith("work")]
    np.testing.assert_allclose(phi(alpha)[:, work] @ phi.dense[work], budgets.flops(groups)(alpha), rtol=1e-12)


def test_units_of_a_split_have_the_channels_of_one_half() -> None:
    network = torchvision.models.shufflenet_v2_x1_0(weights=None).eval()
    groups = find_groups(network, (torch.zeros(1, 3, 64, 64),))
    channels = dict(zip(groups.names, unit_channels(groups), strict=True))
    # 29 units of 8 channels are the 232 of a half; the last convolution reads both halves, 464.
    assert channels.pop("stage4.0.branch1.2") * 29 == 232
    assert set(channels.values()) == {1}


def test_features_of_blocks_are_those_of_keep_ratios_where_all_blocks_are_full(network: Callable[..., Any]) -> None:
    groups = network(size=6, operations=40, seed=3)
    phi, wide = physics_features(groups), physics_features(groups, blocks=True)
    assert wide.size == 18
    assert wide.names == (*phi.names, "partial depthwise bytes", "narrow convolution work")
    alpha = np.random.default_rng(0).uniform(0.1, 1, (5, 6))
    columns = np.hstack([alpha, np.zeros((5, 12))])
    np.testing.assert_allclose(wide(columns)[:, :-2], phi(alpha), rtol=1e-12)
    np.testing.assert_array_equal(wide(columns)[:, -2:], 0.0)
    # Partial: bytes of depthwise convolutions of that group. Narrow: work of convolutions that read it.
    one = np.eye(6)
    partial = wide(np.hstack([0 * one, one, 0 * one]))[:, -2] * wide.dense[-2]
    expected = sum(4 * (sum(c(one) for c in op.inputs) + op.output(one)) for op in groups.operations if op.depthwise)
    np.testing.assert_allclose(partial, expected, rtol=1e-12)
    full = wide(np.hstack([np.ones((6, 6)), 0 * one, one]))[:, -1] * wide.dense[-1]
    reads = np.zeros(6)
    for op in groups.operations:
        for term in op.flops:
            if op.kind == "conv2d" and len(term.factors) == 2 and not term.factors[1].constant:
                reads += (term.factors[1].coefficients > 0) * float(term(np.ones(6)))
    np.testing.assert_allclose(full, reads, rtol=1e-12)


def test_an_unknown_granularity_is_refused(network: Callable[..., Any]) -> None:
    with pytest.raises(ProfileError, match="coarse, classes, operations"):
        physics_features(network(), "fine")
