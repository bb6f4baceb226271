"""Costs at ratios and widths, infeasible budgets, and the last feasible point of a path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import budgets
from budgets import CostModel
from dsa_hw import find_groups
from dsa_hw.channels import ChannelGroups
from dsa_hw.errors import BudgetError, InfeasibleBudgetError, ProfileError
from dsa_hw.methods.costs import CostSet, last_feasible
from tests.fakes.costs import Quadratic
from tests.fakes.networks import Small

SIZES = np.array([8, 16, 4])


@pytest.fixture(scope="module")
def groups() -> ChannelGroups:
    return find_groups(Small(), torch.zeros(1, 3, 8, 8))


def costs_of(seed: int = 0, limits: Any = None) -> tuple[list[Quadratic], CostSet[Any]]:
    rng = np.random.default_rng(seed)
    found = [Quadratic.random(3, rng, unit) for unit in (1e-3, 1e6)]
    return found, CostSet(found, SIZES, limits)


def test_values_and_gradients_are_those_of_each_cost_for_any_number_of_configurations() -> None:
    each, costs = costs_of()
    widths = np.random.default_rng(1).integers(1, SIZES + 1, (5, 2, 3))
    expected = np.stack([cost.at(widths / SIZES) for cost in each], -1)
    np.testing.assert_array_equal(costs.at_widths(widths), expected)
    np.testing.assert_array_equal(costs.at_ratios(widths / SIZES), expected)
    np.testing.assert_array_equal(costs.dense, [cost.at(np.ones(3)) for cost in each])
    alpha = np.array([0.3, 0.5, 0.9])
    np.testing.assert_array_equal(costs.gradients(alpha), [cost.gradient(alpha) for cost in each])
    np.testing.assert_allclose(costs.share_gradients(alpha) * costs.dense[:, None], costs.gradients(alpha))
    np.testing.assert_allclose(costs.shares(np.ones(3)), 1.0)


def test_negative_gradients_of_a_fitted_cost_are_set_to_zero() -> None:
    cost = SimpleNamespace(value=lambda alpha: 1.0 + alpha.sum(-1), gradient=lambda alpha: np.array([1.0, -2.0, 0.0]))
    assert CostSet([cost], SIZES).gradients(np.ones(3)).tolist() == [[1.0, 0.0, 0.0]]


def test_limits_are_inclusive_and_all_must_hold() -> None:
    each, costs = costs_of()
    alpha = np.array([[0.5, 0.5, 0.5], [0.6, 0.5, 0.5]])
    limits = [float(cost.at(alpha[0])) for cost in each]
    assert costs.with_limits(limits).keeps(alpha).tolist() == [True, False]
    assert costs.with_limits([limits[0], 0.0]).keeps(alpha).tolist() == [False, False]
    assert costs.keeps(alpha).all()  # without limits


@pytest.mark.parametrize(("limits", "words"), [([1.0], "a cost and a limit"), ([1.0, np.nan], "finite")])
def test_wrong_limits_are_refused(limits: list[float], words: str) -> None:
    with pytest.raises(BudgetError, match=words):
        costs_of(limits=limits)


def test_cost_of_zero_is_refused() -> None:
    with pytest.raises(BudgetError, match="positive"):
        CostSet([Quadratic(np.zeros((3, 3)), np.zeros(3))], SIZES, [1.0])


def test_infeasible_budget_names_budget_limit_and_smallest_value_with_units(groups: ChannelGroups) -> None:
    costs = CostSet.of([budgets.FlopsBudget("90%"), budgets.ParamsBudget("1%")], groups)
    least = np.full(len(groups), 0.5)
    with pytest.raises(InfeasibleBudgetError) as caught:
        costs.check_feasible(least)
    smallest = float(costs.at_ratios(least)[1])
    assert caught.value.smallest == smallest
    text = str(caught.value)
    for part in (
        "'parameters <= 1% of the dense network'",
        costs.budgets[1].format(smallest),
        "Ask for more than that",
    ):
        assert part in text
    costs.with_limits([costs.dense[0], smallest]).check_feasible(least)  # the smallest value itself is feasible


def test_budgets_resolve_to_costs_and_limits(groups: ChannelGroups) -> None:
    costs = CostSet.of([budgets.FlopsBudget("50%"), budgets.MemoryBudget("80%")], groups)
    expected = [budgets.flops(groups).dense, budgets.activation_memory(groups).dense]
    np.testing.assert_allclose(costs.limits, np.array([0.5, 0.8]) * expected)
    assert CostSet.of(budgets.FlopsBudget("50%"), groups).limits.tolist() == [costs.limits[0]]


def test_measured_budget_needs_a_cost_model_of_this_network(groups: ChannelGroups, latency: CostModel) -> None:
    with pytest.raises(BudgetError, match="fitted cost model"):
        CostSet.of(budgets.LatencyBudget("5ms"), groups)
    with pytest.raises(ProfileError, match="another network"):
        CostSet.of(budgets.LatencyBudget("50%", profile=latency), groups)


def test_measured_budget_limits_the_prediction_or_its_upper_bound(
    latency: CostModel, network: tuple[Any, ChannelGroups, Any]
) -> None:
    groups = network[1]
    alpha = np.full(len(groups), 0.6)
    point = torch.from_numpy(alpha)
    plain = CostSet.of(budgets.LatencyBudget("50%", profile=latency), groups)
    bound = CostSet.of(budgets.LatencyBudget("50%", profile=latency, confidence=0.9), groups)
    assert plain.at_ratios(alpha)[0] == float(latency.value(point))
    assert bound.at_ratios(alpha)[0] == float(latency.value(point, 0.9)) > plain.at_ratios(alpha)[0]
    np.testing.assert_array_equal(bound.gradients(alpha)[0], np.maximum(latency.gradient(alpha, 0.9), 0.0))
    assert plain.limits[0] == 0.5 * (latency.provenance.dense or 0.0)


@given(edge=st.floats(0.0, 10.0), high=st.floats(0.1, 10.0))
def test_last_feasible_point_is_feasible_and_next_to_the_edge(edge: float, high: float) -> None:
    found = last_feasible(lambda t: t, lambda t: t <= edge, high)
    assert found <= edge
    assert found == pytest.approx(min(edge, high), abs=1e-12)
