"""Blocks of channels: effective widths, and estimators that use them."""

from __future__ import annotations

import numpy as np
import pytest

from budgets.blocks import Blocks
from budgets.regression import (
    PhysicsNNLS,
)
from dsa_hw.errors import ProfileError


def test_a_partial_block_costs_a_full_one() -> None:
    blocks = Blocks(16, (64, 24, 8, 16))
    widths = np.array([[16, 16, 8, 16], [32, 24, 4, 8], [64, 20, 1, 16]])
    expected = np.array([[16, 16, 16, 16], [32, 32, 16, 16], [64, 24, 16, 16]])
    effective = blocks(widths / np.array(blocks.sizes)) * np.array(blocks.sizes)
    np.testing.assert_allclose(effective, expected, rtol=1e-12)
    # A device with such blocks, profiled at multiples of 8: the estimator with blocks is right, the other is not.
    sizes = np.array(blocks.sizes)
    rng = np.random.default_rng(0)
    sampled = np.minimum(8 * rng.integers(1, 9, (60, 4)), sizes)
    on_blocks = np.where(sampled == sizes, sampled, np.maximum(16 * (sampled // 16), 8))
    y = 1 + (np.ceil(on_blocks / 16) * 16).sum(1)
    aware, naive = PhysicsNNLS(blocks=blocks).fit(on_blocks / sizes, y), PhysicsNNLS().fit(on_blocks / sizes, y)
    np.testing.assert_allclose(aware.predict(on_blocks / sizes), y, rtol=1e-9)
    assert np.abs(naive.predict(on_blocks / sizes) / y - 1).max() > 0.02
    with pytest.raises(ProfileError, match="`blocks` has 4"):
        PhysicsNNLS(blocks=blocks).fit(np.ones((5, 3)), np.ones(5))
    with pytest.raises(ProfileError, match="at least 1"):
        Blocks(0, (8,))
