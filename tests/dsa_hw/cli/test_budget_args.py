"""Budgets on the command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import budgets
from budgets import FlopsBudget, LatencyBudget
from dsa_hw.cli.budget_args import expand_budgets, parse_budget, parse_budgets
from dsa_hw.errors import BudgetError


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("latency=50%", budgets.LatencyBudget("50%")),
        ("latency=5ms", budgets.LatencyBudget("5ms")),
        ("latency.p95=8ms", budgets.LatencyBudget("8ms", quantile=0.95)),
        ("flops=1.2G", budgets.FlopsBudget("1.2G")),
        ("params = 2M", budgets.ParamsBudget("2M")),
        ("memory=64MiB", budgets.MemoryBudget("64MiB")),
        ("energy=40mJ", budgets.EnergyBudget("40mJ")),
        ("estimated_energy=40mJ", budgets.EstimatedEnergyBudget("40mJ")),
    ],
)
def test_text_gives_the_budget_of_its_cost(text: str, budget: budgets.Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("latency", "COST=AMOUNT"),
        ("latency=", "COST=AMOUNT"),
        ("latncy=5ms", "Did you mean 'latency'"),
        ("flops.p95=1G", "Only latency has percentiles"),
        ("latency.p0=5ms", "p1 to p99"),
        ("latency=5", "unit"),
    ],
)
def test_text_that_is_not_a_budget_is_refused(text: str, message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        parse_budget(text)


def test_two_budgets_of_one_cost_are_refused() -> None:
    with pytest.raises(BudgetError, match="Two budgets"):
        parse_budgets(["flops=50%", "flops=40%"])
    assert len(parse_budgets(["latency=50%", "latency.p95=60%"])) == 2


def test_range_of_shares_is_evenly_spaced() -> None:
    assert expand_budgets(["latency=30%..90%:7"]) == [LatencyBudget(f"{p}%") for p in (30, 40, 50, 60, 70, 80, 90)]


def test_range_of_times_and_a_single_budget() -> None:
    found = expand_budgets(["latency=2ms..8ms:4", "flops=50%"])
    assert [b.quantity.magnitude for b in found[:4]] == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3])
    assert found[4] == FlopsBudget("50%")


@given(st.integers(1, 98), st.integers(2, 20))
def test_range_contains_both_of_its_ends(low: int, count: int) -> None:
    found = expand_budgets([f"latency={low}%..99%:{count}"])
    assert len(found) == count
    assert found[0].quantity.magnitude == pytest.approx(low / 100)
    assert found[-1].quantity.magnitude == pytest.approx(0.99)


@pytest.mark.parametrize(
    "text", ["latency=30%..90%", "latency=90%..30%:7", "latency=3ms..9s:3", "latency=1%..9%:1", "a=1..2:3"]
)
def test_text_that_is_not_a_range_is_refused(text: str) -> None:
    with pytest.raises(BudgetError):
        expand_budgets([text])
