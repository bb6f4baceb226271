"""Rounding to widths: within every budget, as good as random neighbours, free channels used."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dsa_hw.errors import BudgetError, InfeasibleBudgetError, WidthError
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.rounding import narrowest, round_widths
from dsa_hw.utils.arrays import Floats, Ints
from tests.fakes.costs import Quadratic, Stairs


def allowed(size: int, step: int) -> list[int]:
    return sorted({*range(step, size + 1, step), size})


def kept(widths: Ints, importance: list[Floats]) -> float:
    return sum(float(np.sort(b)[::-1][:w].sum()) for b, w in zip(importance, widths, strict=True))


def case(k: int, seed: int, budgets: int = 1) -> tuple[Floats, Ints, Ints, list[Quadratic], list[float], list[Floats]]:
    rng = np.random.default_rng(seed)
    sizes, grid = rng.integers(4, 129, k), rng.choice([1, 4, 8, 16], k)
    alpha = rng.uniform(0.15, 1.0, k)
    costs = [Quadratic.random(k, rng) for _ in range(budgets)]
    limits = [float(cost.at(alpha)) * (1.0 if j == 0 else 1.02) for j, cost in enumerate(costs)]
    return alpha, sizes, grid, costs, limits, [np.exp(rng.normal(size=size)) for size in sizes]


def neighbours(alpha: Floats, sizes: Ints, grid: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Random configurations with every group at one of the two allowed widths beside its keep ratio."""
    pairs = []
    for a, size, step in zip(alpha, sizes, grid, strict=True):
        widths = np.array(allowed(int(size), int(step)))
        low = widths[widths <= a * size]
        high = widths[widths >= a * size]
        pairs.append((low[-1] if low.size else high[0], high[0]))
    table = np.array(pairs)
    return np.where(rng.random((count, len(pairs))) < 0.5, table[:, 0], table[:, 1])


@settings(max_examples=60)
@given(k=st.integers(1, 40), seed=st.integers(0, 10**6), budgets=st.integers(1, 3), weighted=st.booleans())
def test_widths_are_on_the_grid_and_use_the_budgets_up(k: int, seed: int, budgets: int, weighted: bool) -> None:
    alpha, sizes, grid, costs, limits, importance = case(k, seed, budgets)
    smallest = np.array([allowed(int(s), int(g))[0] for s, g in zip(sizes, grid, strict=True)])
    assume(all(cost.at(smallest / sizes) <= limit for cost, limit in zip(costs, limits, strict=True)))
    widths = round_widths(alpha, CostSet(costs, sizes, limits), grid, importance if weighted else None)
    assert widths.dtype == np.int64
    assert all(w in allowed(int(s), int(g)) for w, s, g in zip(widths, sizes, grid, strict=True))
    assert all(cost.at(widths / sizes) <= limit for cost, limit in zip(costs, limits, strict=True))
    for j in range(k):  # no group can take one more step
        larger = [w for w in allowed(int(sizes[j]), int(grid[j])) if w > widths[j]]
        if larger:
            more = widths.copy()
            more[j] = larger[0]
            assert any(cost.at(more / sizes) > limit for cost, limit in zip(costs, limits, strict=True))


@settings(max_examples=25)
@given(k=st.sampled_from([1, 2, 5, 10, 14, 20, 40, 60]), seed=st.integers(0, 10**6), budgets=st.integers(1, 2))
def test_as_good_as_the_best_of_a_thousand_random_neighbours(k: int, seed: int, budgets: int) -> None:
    alpha, sizes, grid, costs, limits, importance = case(k, seed, budgets)
    smallest = np.array([allowed(int(s), int(g))[0] for s, g in zip(sizes, grid, strict=True)])
    assume(all(cost.at(smallest / sizes) <= limit for cost, limit in zip(costs, limits, strict=True)))
    widths = round_widths(alpha, CostSet(costs, sizes, limits), grid, importance)
    others = neighbours(alpha, sizes, grid, 1000, np.random.default_rng(seed))
    fits = np.all([cost.at(others / sizes) <= limit for cost, limit in zip(costs, limits, strict=True)], axis=0)
    best = max((kept(row, importance) for row in np.unique(others[fits], axis=0)), default=0.0)
    assert kept(widths, importance) >= best * (1 - 1e-12)


def test_widths_within_the_budget_are_unchanged() -> None:
    _, sizes, grid, costs, _, _ = case(12, 1)
    widths = np.array([allowed(int(s), int(g))[-1 - (i % 2)] for i, (s, g) in enumerate(zip(sizes, grid, strict=True))])
    limit = float(costs[0].at(widths / sizes))
    assert np.array_equal(round_widths(widths / sizes, CostSet(costs, sizes, [limit]), grid), widths)


def test_channels_that_cost_nothing_are_kept() -> None:
    sizes = np.array([64, 64, 48])
    cost = Stairs(sizes, 16)
    widths = round_widths(np.array([0.4, 0.6, 0.3]), CostSet([cost], sizes, [2 + 3 + 1]))
    assert float(cost.value(torch.from_numpy(widths / sizes))) == 6
    assert (widths % 16 == 0).all()


def test_a_grid_coarser_than_the_group_leaves_the_full_width() -> None:
    rng = np.random.default_rng(0)
    cost = Quadratic.random(2, rng)
    widths = round_widths([0.5, 0.5], CostSet([cost], [6, 64], [float(cost.at(np.array([1.0, 0.5])))]), [8, 8])
    assert widths.tolist() == [6, 32]


def test_other_groups_shrink_if_the_grid_is_above_a_keep_ratio() -> None:
    rng = np.random.default_rng(2)
    cost = Quadratic.random(3, rng)
    alpha, sizes = np.array([0.1, 0.6, 0.6]), np.array([16, 64, 64])
    limit = float(cost.at(alpha))
    widths = round_widths(alpha, CostSet([cost], sizes, [limit]), [8, 4, 4], minimum=0.1)
    assert widths[0] == 8
    assert cost.at(widths / sizes) <= limit
    assert widths.min() >= 7


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 64)), min_size=1, max_size=6), st.floats(0.0, 1.0))
def test_no_allowed_width_is_below_the_narrowest(groups: list[tuple[int, int]], minimum: float) -> None:
    sizes, grid = (np.array(column) for column in zip(*groups, strict=True))
    least = narrowest(sizes, grid, minimum)
    for k, (size, step) in enumerate(groups):
        good = [w for w in range(1, size + 1) if (w % step == 0 or w == size) and w >= minimum * size * (1 - 1e-12)]
        assert least[k] == min(good)


def test_minimum_is_respected_and_infeasible_budgets_are_refused() -> None:
    alpha, sizes, _, costs, limits, _ = case(8, 3)
    widths = round_widths(np.full(8, 0.2), CostSet(costs, sizes, [float(costs[0].at(np.full(8, 0.55)))]), minimum=0.5)
    assert (widths >= 0.5 * sizes).all()
    with pytest.raises(InfeasibleBudgetError, match="narrowest network") as caught:
        round_widths(alpha, CostSet(costs, sizes, [limits[0] * 1e-3]), minimum=0.5)
    assert caught.value.smallest is not None
    assert caught.value.smallest == pytest.approx(float(costs[0].at(np.ceil(0.5 * sizes) / sizes)))
    exact = round_widths(alpha, CostSet(costs, sizes, [caught.value.smallest]), minimum=0.5)
    assert np.array_equal(exact, np.ceil(0.5 * sizes))


def test_same_input_gives_the_same_widths() -> None:
    alpha, sizes, grid, costs, limits, importance = case(20, 4, budgets=2)
    first, second = (round_widths(alpha, CostSet(costs, sizes, limits), grid, importance) for _ in range(2))
    assert np.array_equal(first, second)


@pytest.mark.speed
def test_sixty_groups_take_less_than_a_second_and_a_half() -> None:
    alpha, sizes, grid, costs, limits, importance = case(60, 4, budgets=2)
    times = []
    for _ in range(3):
        start = time.process_time()
        round_widths(alpha, CostSet(costs, sizes, limits), grid, importance)
        times.append(time.process_time() - start)
    assert min(times) < 1.5  # below 1 s on an idle machine


def test_input_out_of_range_is_refused() -> None:
    alpha, sizes, _, costs, limits, importance = case(3, 5)
    with pytest.raises(WidthError, match=r"\[0, 1\]"):
        round_widths(alpha + 1, CostSet(costs, sizes, limits))
    with pytest.raises(WidthError, match="shapes"):
        round_widths(alpha[:2], CostSet(costs, sizes, limits))
    with pytest.raises(WidthError, match="grid"):
        round_widths(alpha, CostSet(costs, sizes, limits), [0, 1, 1])
    with pytest.raises(WidthError, match="lengths"):
        round_widths(alpha, CostSet(costs, sizes, limits), importance=[*importance[::-1], np.ones(1)])
    with pytest.raises(BudgetError, match="limit"):
        round_widths(alpha, CostSet(costs, sizes, []))
