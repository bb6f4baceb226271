"""Budgets as users write them; every refusal has a spelling that is accepted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pint
import pytest
from hypothesis import given
from hypothesis import strategies as st

import budgets
from budgets import EnergyBudget, FlopsBudget, LatencyBudget, MemoryBudget, ParamsBudget
from budgets.quantities import parse
from dsa_hw.errors import BudgetError
from dsa_hw.units import UNITS, GFLOPs, GMACs, MiB, format_magnitude, mJ, ms, percent, us

UREG = pint.UnitRegistry()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (LatencyBudget("5ms"), LatencyBudget(5 * ms)),
        (LatencyBudget("5 ms"), LatencyBudget("5000us")),
        (LatencyBudget("0.005s"), LatencyBudget("5e-3 s")),
        (LatencyBudget("5000 µs"), LatencyBudget(5000 * us)),
        (LatencyBudget("5ms"), LatencyBudget(5 * UREG.ms)),
        (LatencyBudget("60%"), LatencyBudget(60 * percent)),
        (LatencyBudget("60%"), LatencyBudget(UREG.Quantity(60, "percent"))),
        (LatencyBudget("5ms"), LatencyBudget(np.float64(5) * ms)),
        (EnergyBudget("40mJ"), EnergyBudget(40 * mJ)),
        (EnergyBudget("40mJ"), EnergyBudget("0.04J")),
        (EnergyBudget("1mWh"), EnergyBudget("3.6J")),
        (EnergyBudget("40mJ"), EnergyBudget(UREG.Quantity(40, "millijoule"))),
        (FlopsBudget("1.2G"), FlopsBudget(1.2 * GFLOPs)),
        (FlopsBudget("1.2G"), FlopsBudget("1_200_000_000 FLOPs")),
        (FlopsBudget("1.2G"), FlopsBudget("600 MMACs")),
        (FlopsBudget("1.2G"), FlopsBudget(0.6 * GMACs)),
        (ParamsBudget("2M"), ParamsBudget("2000k")),
        (ParamsBudget("2M"), ParamsBudget("2 Mparams")),
        (MemoryBudget("64MiB"), MemoryBudget(64 * MiB)),
        (MemoryBudget("1MiB"), MemoryBudget("1024KiB")),
        (MemoryBudget("1MB"), MemoryBudget("1000kB")),
        (MemoryBudget("64MiB"), MemoryBudget(64 * UREG.mebibyte)),
    ],
)
def test_equivalent_spellings_are_equal(first: budgets.Budget, second: budgets.Budget) -> None:
    assert first.quantity.dimension == second.quantity.dimension
    assert first.quantity.magnitude == pytest.approx(second.quantity.magnitude, rel=1e-12)


def test_limits_are_in_base_units() -> None:
    assert LatencyBudget("5ms").limit(dense=1.0) == pytest.approx(0.005)
    assert EnergyBudget("40mJ").limit(dense=1.0) == pytest.approx(0.040)
    assert FlopsBudget("1.2G").limit(dense=2e9) == 1.2e9
    assert ParamsBudget("2M").limit(dense=1e7) == 2e6
    assert MemoryBudget("64MiB").limit(dense=1e9) == 64 * 2**20
    assert LatencyBudget("60%").limit(dense=0.01) == pytest.approx(0.006)


@pytest.mark.parametrize("kind", [LatencyBudget, EnergyBudget, FlopsBudget, ParamsBudget, MemoryBudget])
@pytest.mark.parametrize(
    ("amount", "found"),
    [
        (5, "bare number"),
        (0.5, "bare number"),
        (np.float32(5), "bare number"),
        ("5", "bare number"),
        (True, "bare number"),
        ("", "does not start with a number"),
        ("fast", "does not start with a number"),
        ("5 parsecs", "unknown unit 'parsecs'"),
        ("-60%", "negative"),
        ("0%", "zero"),
        ("nan%", "finite"),
        ("inf%", "finite"),
        ("120%", "above the dense network"),
        (None, "not a quantity"),
        ([5], "not a quantity"),
        (UREG.Quantity(5, ""), "dimensionless"),
        (5 * UREG.meter, "meter is not a unit of"),
    ],
)
def test_a_refusal_has_a_spelling_that_is_accepted(kind: type[budgets.Budget], amount: object, found: str) -> None:
    with pytest.raises(BudgetError, match=found) as caught:
        kind(amount)
    message = str(caught.value)
    assert kind.__name__ in message, "what was asked"
    # The correction is a spelling that works.
    suggestion = message.rsplit(f"{kind.__name__}('", 1)[1].split("'", 1)[0]
    assert kind(suggestion).quantity.magnitude > 0


@pytest.mark.parametrize(
    ("kind", "amount", "hint"),
    [
        (LatencyBudget, "5MS", "'5ms'"),
        (LatencyBudget, "-5ms", "negative"),
        (LatencyBudget, "0ms", "zero"),
        (LatencyBudget, "nan ms", "finite"),
        (LatencyBudget, "40mJ", "LatencyBudget limits time, not energy"),
        (LatencyBudget, 40 * mJ, "not energy"),
        (LatencyBudget, 5 * UREG.joule, "joule is not a unit of time"),
        (EnergyBudget, "5ms", "not time"),
        (MemoryBudget, "64M", "'64MB' or '64MiB'|'64MiB' or '64MB'"),
        (MemoryBudget, "64mb", "'64MB'"),
        (FlopsBudget, "1.2GFLOPS", "'1.2GFLOPs'"),
        (FlopsBudget, "1.2g", "'1.2G'"),
        (ParamsBudget, "64MiB", "not memory"),
        (LatencyBudget, 5, r"LatencyBudget\('5ms'\)"),
        (FlopsBudget, 0.5, r"FlopsBudget\('50%'\)"),
        (ParamsBudget, 2000000, r"ParamsBudget\('2Mparams'\)"),
    ],
)
def test_the_remedy_fits_the_mistake(kind: type[budgets.Budget], amount: object, hint: str) -> None:
    with pytest.raises(BudgetError, match=hint):
        kind(amount)


def test_a_limit_above_the_dense_network_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"above the dense network's 3.2 ms.*LatencyBudget\('1.6ms'\).*'50%'"):
        LatencyBudget("5ms").limit(dense=0.0032)
    assert LatencyBudget("100%").limit(dense=0.0032) == 0.0032
    with pytest.raises(BudgetError, match="must be positive; got nan"):
        LatencyBudget("5ms").limit(dense=float("nan"))


def test_latency_budget_takes_target_quantile_confidence_profile() -> None:
    budget = LatencyBudget("5ms", target="onnxruntime/cpu", quantile=0.95, confidence=0.9, profile="profile.sqlite")
    assert (budget.target, budget.quantile, budget.confidence, budget.profile) == (
        "onnxruntime/cpu",
        0.95,
        0.9,
        "profile.sqlite",
    )
    assert str(budget) == "latency <= 5 ms on onnxruntime/cpu with 90% confidence in 95% of runs"
    assert LatencyBudget("5ms").quantile == 0.5
    assert str(FlopsBudget("50%")) == "FLOPs <= 50% of the dense network"


@pytest.mark.parametrize(
    "arguments",
    [{"quantile": 0}, {"quantile": 1.0}, {"quantile": 95}, {"confidence": 90}, {"confidence": 0.0}, {"target": ""}],
)
def test_wrong_options_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(BudgetError, match=next(iter(arguments))):
        LatencyBudget("5ms", **arguments)  # type: ignore[arg-type]


def test_budgets_are_frozen_and_typed() -> None:
    budget = LatencyBudget("5ms")
    with pytest.raises(dataclasses.FrozenInstanceError):
        budget.amount = "6ms"  # type: ignore[misc]
    with pytest.raises(BudgetError, match="one real number"):
        "5" * ms  # type: ignore[operator]


@given(
    st.floats(1e-6, 1e6), st.sampled_from(sorted(symbol for symbol, unit in UNITS.items() if unit.dimension == "time"))
)
def test_formatted_quantities_can_be_parsed_again(number: float, symbol: str) -> None:
    quantity = parse(f"{number!r}{symbol}", "time")
    again = parse(format_magnitude(quantity.magnitude, "time", digits=17), "time")
    assert again.magnitude == pytest.approx(quantity.magnitude, rel=1e-12)
