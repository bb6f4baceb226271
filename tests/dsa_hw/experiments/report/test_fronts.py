"""Pages of sweeps whose results are bad or few: what they say is still true."""

from __future__ import annotations

import pandas as pd

from dsa_hw import Allocation, FlopsBudget
from dsa_hw.experiments.report import render_minimum, render_sweep
from tests.dsa_hw.experiments.report.test_allocation import text_of
from tests.fakes import fronts


def only(rows: slice, **changes: object) -> pd.DataFrame:
    """Some rows of the made-up sweep, all of whose budgets can be met."""
    table = fronts.sweep_table()
    found = table.iloc[rows].assign(**changes)
    widths = {asked: table.attrs["widths"][asked] for asked in found["asked"]}
    found.attrs = {**table.attrs, "infeasible": {}, "widths": widths}
    return found


def test_a_sweep_without_a_met_budget_shows_the_closest_network() -> None:
    table = only(slice(2), verdict="NOT MET", utilisation=[1.2, 1.05])
    text = text_of(render_sweep(table, fronts.BUDGET, fronts.ABOUT))
    assert "Asked: 2 latency budgets from 90% to 80%. Got: 2 not met." in text
    assert "No network was shown to be within its budget. The closest uses 105.0% of its limit." in text
    assert "smallest limit that is met" not in text


def test_one_budget_has_no_curve() -> None:
    text = text_of(render_sweep(only(slice(1)), fronts.BUDGET, fronts.ABOUT))
    assert "Asked: 1 latency budget of 90%. Got: 1 met." in text
    assert "the accuracy falls" not in text
    assert "The network uses 96.0% of the limit " in text


def test_counted_costs_have_no_intervals_and_no_second_share_of_flops() -> None:
    table = only(slice(3))
    for name in ("low", "high"):
        table[name] = table["measured"]
    text = text_of(render_sweep(table, FlopsBudget("90%"), fronts.ABOUT))
    assert "interval" not in text
    assert "its FLOPs" not in text
    assert "of the dense FLOPs, and" not in text


def test_the_group_that_keeps_least_is_that_of_the_last_budget() -> None:
    table = fronts.sweep_table()
    last = table.attrs["widths"]["40%"]
    least = min(last, key=lambda name: last[name] / fronts.SIZES[name])
    share = 100 * last[least] / fronts.SIZES[least]
    text = text_of(render_sweep(table, fronts.BUDGET, fronts.ABOUT))
    assert f"Under the budget of 40%, {least} keeps the least: {share:.0f}% of its channels" in text


def test_a_lower_cost_that_failed_on_test_data_is_not_called_the_lowest(small_result: Allocation) -> None:
    entry = small_result.certificate.entries[0]
    share = entry.measured / entry.dense
    budget = FlopsBudget("60%")
    same = fronts.trials().iloc[:2].assign(dense=1.0, measured=[0.9, share])
    lower = same.assign(measured=[share, share / 2])
    page = text_of(render_minimum(small_result, same, budget, share, fronts.ABOUT))
    assert "is the lowest FLOPs whose drop is within 50.00 points; 2 networks were tried" in page
    assert "not on the test data" not in page
    page = text_of(render_minimum(small_result, lower, budget, share, fronts.ABOUT))
    assert "2 of 2 networks are within 50.00 points on the validation data" in page
    assert "The next lower FLOPs passed on the validation data, but not on the test data." in page
