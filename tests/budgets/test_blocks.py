"""Blocks of channels: columns with steps, their chords, and estimators that use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from budgets.blocks import Blocks
from budgets.regression import PhysicsNNLS
from budgets.work_classes import physics_features
from dsa_hw.errors import ProfileError

SIZES = (64, 24, 8, 16, 29)
BLOCKS = Blocks(16, SIZES, (1, 1, 1, 1, 8), narrow=True)


def test_columns_count_blocks_partial_ends_and_narrow_tensors() -> None:
    widths = np.array([[16, 16, 8, 16, 2], [20, 24, 4, 8, 29], [64, 20, 1, 16, 3], [4, 4, 8, 15, 1]])
    columns = BLOCKS(widths / np.array(SIZES))
    whole, partial, narrow = np.split(columns, 3, -1)
    # 29 units of 8 channels: 2 units fill a block, 3 need two, 29 need 15.
    channels = np.array([64, 24, 8, 16, 232])
    expected = [[16, 16, 16, 16, 16], [32, 32, 16, 16, 240], [64, 32, 16, 16, 32], [16, 16, 16, 16, 16]]
    np.testing.assert_allclose(whole * channels, expected, rtol=1e-12)
    np.testing.assert_array_equal(partial, [[0, 0, 0, 0, 0], [0, 1, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    # A group of less than one block is as narrow as it always was.
    np.testing.assert_array_equal(narrow, [[0, 0, 0, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 0, 1, 1]])
    assert not Blocks(16, SIZES)(widths / np.array(SIZES))[:, 10:].any()


@pytest.mark.parametrize("blocks", [BLOCKS, Blocks(16, SIZES, BLOCKS.channels)])
def test_chords_equal_the_steps_on_their_grid(blocks: Blocks) -> None:
    # One block: all widths cost the same, unless narrow tensors cost more.
    np.testing.assert_array_equal(blocks.steps, [16, 16, 1, 16 if blocks.narrow else 1, 2])
    for k, (size, step) in enumerate(zip(SIZES, blocks.steps.tolist(), strict=True)):
        for width in {*range(step, size + 1, step), size}:
            alpha = np.ones(5)
            alpha[k] = width / size
            np.testing.assert_allclose(blocks.smooth(alpha), blocks(alpha), rtol=1e-12)
    # Between, they do not.
    assert (blocks.smooth(np.full(5, 0.55)) != blocks(np.full(5, 0.55))).any()


@settings(max_examples=50)
@given(seed=st.integers(0, 10_000))
def test_chords_are_continuous_monotone_and_not_above_the_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    low = rng.uniform(0, 1, (200, 5))
    high = low + rng.uniform(0, 1, low.shape) * (1 - low)
    assert (BLOCKS.smooth(high) >= BLOCKS.smooth(low)).all()
    assert (BLOCKS.smooth(low)[:, :5] <= BLOCKS(low)[:, :5] + 1e-12).all()
    steepest = max(16 / 8, 232 / 8)
    assert (np.abs(BLOCKS.smooth(low + 1e-9) - BLOCKS.smooth(low)) <= 2e-9 * steepest).all()
    assert (BLOCKS(high)[:, :10] >= BLOCKS(low)[:, :10]).all()
    np.testing.assert_allclose(BLOCKS.value(torch.tensor(low)).numpy(), BLOCKS.smooth(low), rtol=1e-12)


def test_gradient_by_keep_ratios_is_the_chain_rule() -> None:
    rng = np.random.default_rng(0)
    alpha, weights = rng.uniform(0.05, 0.99, (50, 5)), rng.uniform(0, 1, 15)
    step = 1e-7
    numeric = np.stack(
        [(BLOCKS.smooth(alpha + step * e) - BLOCKS.smooth(alpha - step * e)) @ weights / (2 * step) for e in np.eye(5)],
        -1,
    )
    gradient = BLOCKS.slope(alpha, np.broadcast_to(weights, (50, 15)))
    np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-7)


def test_an_estimator_with_blocks_is_right_where_the_device_has_them(network: Callable[..., Any]) -> None:
    groups = network(size=6, operations=30, seed=1)
    rng = np.random.default_rng(0)
    widths = np.minimum(4 * rng.integers(1, 33, (120, 6)), groups.sizes)
    alpha = widths / groups.sizes
    phi, blocks = physics_features(groups), physics_features(groups, blocks=True)
    truth = phi.combine(rng.uniform(0.5, 1, len(phi)))(np.ceil(widths / 16) * 16 / groups.sizes)
    aware = PhysicsNNLS(blocks, blocks=Blocks(16, tuple(groups.sizes.tolist()))).fit(alpha[:60], truth[:60])
    smooth = PhysicsNNLS(phi).fit(alpha[:60], truth[:60])
    np.testing.assert_allclose(aware.predict(alpha[60:]), truth[60:], rtol=1e-6)
    assert np.abs(smooth.predict(alpha[60:]) / truth[60:] - 1).mean() > 0.02


def test_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ProfileError, match="`blocks` has 5"):
        PhysicsNNLS(blocks=BLOCKS).fit(np.ones((5, 3)), np.ones(5))
    with pytest.raises(ProfileError, match="at least 1"):
        Blocks(0, (8,))
    with pytest.raises(ProfileError, match="must have 2 entries; got 1"):
        Blocks(8, (8, 8), (1,))
