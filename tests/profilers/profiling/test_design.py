"""The design: on the grid, distinct, spread, hold-out apart, repeatable; adaptive where little is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_hw.errors import ProfileError
from profilers.profiling.design import Space, adaptive, corners, spread

SPACE = Space(np.asarray([64, 128, 256, 20]), np.asarray([8, 8, 16, 4]))

spaces = st.lists(st.tuples(st.integers(1, 512), st.integers(1, 32)), min_size=1, max_size=30).map(
    lambda rows: Space(np.asarray([c for c, _ in rows]), np.asarray([g for _, g in rows]))
)


@settings(max_examples=60)
@given(spaces, st.integers(0, 40), st.integers(0, 5))
def test_every_width_is_on_the_grid_or_dense(space: Space, n: int, seed: int) -> None:
    rows = np.vstack([corners(space), spread(space, n, seed)])
    assert ((rows >= 1) & (rows <= space.sizes)).all()
    assert ((rows % space.grid == 0) | (rows == space.sizes)).all()
    drawn = [tuple(r) for r in spread(space, n, seed).tolist()]
    assert len(set(drawn)) == len(drawn) <= n
    assert corners(space)[0].tolist() == space.sizes.tolist()


def test_smallest_and_dense_are_corners() -> None:
    rows = corners(SPACE).tolist()
    assert SPACE.sizes.tolist() in rows
    assert SPACE.smallest.tolist() in rows
    assert len(rows) == 4
    assert (SPACE.smallest / SPACE.sizes <= 0.25).all()


def test_design_is_repeatable_and_extendable() -> None:
    assert spread(SPACE, 40, 3).tolist() == spread(SPACE, 40, 3).tolist()
    assert spread(SPACE, 20, 3).tolist() == spread(SPACE, 40, 3)[:20].tolist(), (
        "more samples continue the same sequence"
    )
    assert spread(SPACE, 40, 3).tolist() != spread(SPACE, 40, 4).tolist()


def test_avoided_configurations_are_left_out() -> None:
    first = {tuple(r) for r in spread(SPACE, 30, 0).tolist()}
    second = {tuple(r) for r in spread(SPACE, 30, 0, first).tolist()}
    assert not first & second
    assert len(second) == 30


def test_overall_size_is_spread_evenly() -> None:
    many = Space(np.full(60, 128), np.full(60, 8))
    share = (spread(many, 64, 0) / 128).mean(axis=1)
    assert share.min() < 0.3, "sums of independent ratios would all be near one half"
    assert share.max() > 0.85
    assert np.histogram(share, bins=4, range=(0.1, 1))[0].min() >= 6


def test_small_space_gives_all_its_configurations() -> None:
    space = Space(np.asarray([4, 4]), np.asarray([2, 2]))
    assert len(spread(space, 100, 0)) == 4


def test_invalid_spaces_are_refused() -> None:
    with pytest.raises(ProfileError, match="no channel group"):
        Space(np.zeros(0, np.int64), np.zeros(0, np.int64))
    with pytest.raises(ProfileError, match="grid"):
        Space(np.asarray([8]), np.asarray([0]))


def test_adaptive_choice_is_far_from_measured_configurations() -> None:
    space = Space(np.asarray([64, 64]), np.asarray([4, 4]))
    measured = np.asarray([[a, b] for a in range(36, 65, 4) for b in range(36, 65, 4)])[::3]
    seconds = 1e-3 * (1 + (measured / 64).prod(axis=1))
    pool = np.asarray([[a, b] for a in range(8, 65, 4) for b in range(8, 65, 4)])
    chosen = adaptive(space, 5, measured, seconds, None, pool, None)
    assert len({tuple(r) for r in chosen.tolist()}) == 5
    assert (chosen.min(axis=1) < 36).all(), "the upper corner is known already"
    gaps = [np.abs(a - b).max() for i, a in enumerate(chosen) for b in chosen[:i]]
    assert min(gaps) >= 8, "a batch does not pile up in one place"


def test_adaptive_with_features_and_edge_cases() -> None:
    space = Space(np.asarray([64, 64]), np.asarray([4, 4]))
    measured, pool = spread(space, 10, 0), spread(space, 50, 1)
    features, others = (np.prod(x, axis=1, keepdims=True).astype(float) for x in (measured, pool))
    chosen = adaptive(space, 3, measured, np.full(10, 1e-3), features, pool, others)
    assert len(chosen) == 3
    assert all(r in pool.tolist() for r in chosen.tolist())
    assert adaptive(space, 0, measured, np.ones(10), None, pool, None).shape == (0, 2)
    assert len(adaptive(space, 99, measured, np.ones(10), None, pool[:4], None)) == 4
