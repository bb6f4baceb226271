"""Budgets as they are typed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgets import FlopsBudget, LatencyBudget
from dsa_hw.cli.sweep import expand
from dsa_hw.errors import BudgetError


def test_a_range_of_shares() -> None:
    assert expand(["latency=30%..90%:7"]) == [LatencyBudget(f"{p}%") for p in (30, 40, 50, 60, 70, 80, 90)]


def test_a_range_of_times_and_a_single_one() -> None:
    found = expand(["latency=2ms..8ms:4", "flops=50%"])
    assert [b.quantity.magnitude for b in found[:4]] == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3])
    assert found[4] == FlopsBudget("50%")


@given(st.integers(1, 98), st.integers(2, 20))
def test_ends_are_exact(low: int, count: int) -> None:
    found = expand([f"latency={low}%..99%:{count}"])
    assert len(found) == count
    assert found[0].quantity.magnitude == pytest.approx(low / 100)
    assert found[-1].quantity.magnitude == pytest.approx(0.99)


@pytest.mark.parametrize(
    "text", ["latency=30%..90%", "latency=90%..30%:7", "latency=3ms..9s:3", "latency=1%..9%:1", "a=1..2:3"]
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(BudgetError):
        expand([text])
