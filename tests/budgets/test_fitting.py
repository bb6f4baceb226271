"""From a profile to a cost model: what is fitted, held out and reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import budgets
from budgets.selection import candidates

Factory = Callable[..., Any]


def test_fit_chooses_calibrates_and_reports(network: Factory, profile: Factory) -> None:
    groups = network(size=8, operations=40, seed=1)
    measured = profile(groups, train=40, holdout=60, noise=0.01)
    model, table = budgets.fit(measured, groups), measured.table
    assert set(model.report.index) == set(candidates(groups))
    assert model.report["chosen"].sum() == 1
    assert model.report.loc[model.name, "chosen"]
    assert model.provenance.errors["holdout_mape"] < 0.03
    assert model.provenance.configurations == 41
    assert model.provenance.holdout == 60
    held = table[table["split"] == "holdout"]
    predicted = model.predict(held)
    assert predicted.index.equals(held.index)
    assert model.provenance.errors["holdout_mape"] == pytest.approx(
        float((predicted / held["seconds"] - 1).abs().mean())
    )
    upper = model.upper(held[list(groups.names)].to_numpy() / groups.sizes, 0.9)
    assert 0.8 <= float((held["seconds"].to_numpy() <= upper).mean()) <= 1.0
    assert "bound: jackknife+" in repr(model)
    assert "synthetic/cpu" in repr(model)
    assert model.shares().sum() == pytest.approx(1.0)
    assert model.dense == pytest.approx(float(table[table["split"] == "dense"]["seconds"].iloc[0]), rel=0.05)


def test_held_out_rows_never_enter_the_fit(network: Factory, profile: Factory) -> None:
    groups = network(size=6, operations=20, seed=1)
    measured = profile(groups, train=30, holdout=20)
    poisoned = measured.table.copy()
    poisoned.loc[poisoned["split"] == "holdout", "seconds"] *= 10
    poisoned = pd.concat([poisoned, poisoned.iloc[:5].assign(split="grid", seconds=1e3)], ignore_index=True)
    first, second = budgets.fit(measured, groups), budgets.fit(replace(measured, table=poisoned), groups)
    points = np.random.default_rng(0).uniform(0.2, 1, (10, 6))
    np.testing.assert_array_equal(first.upper(points), second.upper(points))
    assert first.name == second.name
    assert second.provenance.errors["holdout_mape"] > 0.5


def test_fit_is_repeatable(network: Factory, profile: Factory) -> None:
    groups = network(size=6, operations=20, seed=1)
    table = profile(groups, train=20)
    points = np.random.default_rng(0).uniform(0.2, 1, (10, 6))
    np.testing.assert_array_equal(budgets.fit(table, groups).upper(points), budgets.fit(table, groups).upper(points))


def test_fit_without_groups_warns(network: Factory, profile: Factory, caplog: pytest.LogCaptureFixture) -> None:
    groups = network(size=4, operations=10, seed=1)
    model = budgets.fit(profile(groups, train=40))
    assert "no channel groups" in caplog.text
    assert any("no channel groups" in note for note in model.provenance.notes)
    assert model.provenance.errors["holdout_mape"] < 0.2


def test_energy_is_read_from_its_own_column(network: Factory, profile: Factory) -> None:
    groups = network(size=4, operations=10, seed=1)
    measured = profile(groups)
    joules = measured.table.rename(columns={"seconds": "joules"})
    model = budgets.fit(replace(measured, table=joules, quantity="energy"), groups)
    assert (model.provenance.quantity, model.provenance.unit) == ("energy", "J")


def test_a_plain_table_is_fitted_like_the_profile(network: Factory, profile: Factory) -> None:
    groups = network(size=4, operations=10, seed=1)
    measured = profile(groups)
    first, second = budgets.fit(measured, groups), budgets.fit(measured.table, groups, target="synthetic/cpu")
    points = np.random.default_rng(0).uniform(0.2, 1, (10, 4))
    np.testing.assert_array_equal(first.upper(points), second.upper(points))
    assert second.provenance.target == "synthetic/cpu"
    assert second.provenance.fingerprint == groups.fingerprint


@pytest.mark.speed
def test_fit_and_evaluation_are_fast(network: Factory, profile: Factory) -> None:
    groups = network(size=60, operations=200, seed=1)
    table = profile(groups, train=50, holdout=0)
    budgets.fit(profile(network(), train=6, holdout=0), network())  # imports
    # Best of a few: what the code needs, not what a busy machine adds.
    seconds = []
    for _ in range(2):
        start = time.process_time()
        model = budgets.fit(table, groups)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 5.0
    default = budgets.fit(table, groups, candidates={"physics": candidates(groups)["physics"]})
    assert default.name == "physics"
    assert model.report.shape[0] == len(candidates(groups))
    alpha = np.full(60, 0.7)
    tensor = torch.tensor(alpha)
    times = []
    for _ in range(300):
        start_ns = time.perf_counter_ns()
        default.value(tensor)
        default.gradient(alpha)
        times.append(time.perf_counter_ns() - start_ns)
    assert min(times) < 100_000
