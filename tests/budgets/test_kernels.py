"""Shapes of a network's operations as a GPU library sees them, and rounding to whole tiles and waves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from budgets.kernels import ALGORITHMS, SHAPE, between, kernel_shapes, whole
from dsa_hw.channels import find_groups


def test_shapes_are_those_of_the_convolutions_at_every_width() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 7, stride=2, padding=3),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Conv2d(32, 32, 3, padding=1, groups=32),
        nn.Conv2d(32, 24, 1),
        nn.Conv2d(24, 8, 3, stride=2, padding=1),
        nn.Flatten(),
        nn.Linear(8 * 36, 10),
    )
    groups = find_groups(net, (torch.zeros(5, 3, 24, 24),))
    shapes, names = kernel_shapes(groups)
    assert shapes is not None
    assert len(names) == 5  # the depthwise convolution is not one of them
    assert shapes.classes[:: len(SHAPE)] == ("any", "3x3", "any", "any", "any")
    alpha = np.full(len(groups), 0.5)
    found = (shapes(alpha) * shapes.dense).reshape(-1, len(SHAPE))
    expected = [[5, 12, 3 * 49, 8], [5, 12, 8 * 9, 16], [5, 12, 16, 12], [5, 6, 12 * 9, 4], [5, 1, 4 * 36, 10]]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_positions_are_counted_in_whole_patches_of_each_image() -> None:
    side = np.array([4.0, 7.0, 17.0])
    winograd, fused, direct = ALGORITHMS
    np.testing.assert_array_equal(winograd.positions(side, whole), [1, 4, 25])
    np.testing.assert_array_equal(fused.positions(side, whole), [128, 128, 128 * 3 * 2])
    np.testing.assert_array_equal(direct.positions(side, whole), side**2)


def test_between_is_the_mean_of_the_steps_and_at_most_half_a_step_away() -> None:
    x = np.linspace(0, 20, 20_001)
    steps, smooth = whole(x), between(x)
    assert (np.diff(smooth) >= 0).all()
    assert np.abs(steps - smooth).max() <= 0.5 + 1e-9
    assert np.mean(smooth[x > 1] - steps[x > 1]) == pytest.approx(0, abs=1e-3)
