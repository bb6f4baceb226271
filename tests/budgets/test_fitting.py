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


def test_uncertain_rows_have_less_weight(network: Factory, profile: Factory, cost: Factory) -> None:
    groups = network(size=8, operations=40, seed=1)
    unseen = np.random.default_rng(1).uniform(0.2, 1, (300, 8))
    truth = cost(groups, unseen)
    weighted, plain = [], []
    for seed in range(20):
        measured = profile(groups, train=40, holdout=0, noise=0.02, seed=seed)
        table = measured.table.copy()
        rng = np.random.default_rng(100 + seed)
        # A third of the rows has five times the noise.
        noisy = (np.arange(len(table)) % 3 == 0) & (table["split"] == "train").to_numpy()
        table["seconds"] *= np.where(noisy, np.exp(np.sqrt(0.1**2 - 0.02**2) * rng.normal(size=len(table))), 1.0)
        for errors, found in ((np.where(noisy, 0.1, 0.02), weighted), (np.full(len(table), np.nan), plain)):
            default = {"physics": candidates(groups)["physics"]}
            model = budgets.fit(replace(measured, table=table.assign(error=errors)), groups, candidates=default)
            found.append(np.abs(model(unseen) / truth - 1).mean())
    gain = np.array(plain) - np.array(weighted)
    assert gain.mean() > 3 * gain.std(ddof=1) / np.sqrt(len(gain))
    assert np.mean(weighted) < 0.8 * np.mean(plain)


def test_equal_errors_give_exactly_the_unweighted_model(network: Factory, profile: Factory) -> None:
    groups = network(size=6, operations=20, seed=1)
    measured = profile(groups, train=30)
    points = np.random.default_rng(0).uniform(0.2, 1, (10, 6))
    plain = budgets.fit(measured, groups)
    for errors in (0.03, 0.0, np.where(np.arange(len(measured.table)) % 2, 0.03, np.nan)):
        model = budgets.fit(replace(measured, table=measured.table.assign(error=errors)), groups)
        assert model.name == plain.name
        np.testing.assert_array_equal(model(points), plain(points))
        np.testing.assert_array_equal(model.upper(points), plain.upper(points))
    # The rows count by their own errors, not by an average.
    uneven = measured.table.assign(error=np.where(np.arange(len(measured.table)) % 2, 0.03, 0.3))
    assert (budgets.fit(replace(measured, table=uneven), groups)(points) != plain(points)).any()


def test_errors_of_the_candidates_are_not_weighted(network: Factory, profile: Factory) -> None:
    groups = network(size=6, operations=20, seed=1)
    measured = profile(groups, train=30, holdout=0)
    table = measured.table.assign(error=np.where(np.arange(31) % 3, 0.02, 0.2))
    default = {"physics": candidates(groups)["physics"]}
    model = budgets.fit(replace(measured, table=table), groups, candidates=default)
    assert model.fitted is not None
    relative = (model.fitted["predicted"] / model.fitted["cost"] - 1).abs()
    # Two repetitions of the cross-validation are averaged before and after taking the absolute value.
    assert model.provenance.errors["cv_mape"] == pytest.approx(relative.mean(), rel=0.1)
    assert "error" not in model.fitted


def test_the_grid_is_whole_blocks_where_the_device_computes_them(network: Factory, profile: Factory) -> None:
    groups = network(size=8, operations=40, seed=1)
    measured = profile(groups, train=40, noise=0.002, step=4, block=16)
    model = budgets.fit(measured, groups)
    assert "blocks of 16" in model.name
    grid = {name: 16 if size > 16 else 4 for name, size in zip(groups.names, groups.sizes, strict=True)}
    assert model.provenance.grid == grid
    assert any("whole blocks of 16 channels" in note for note in model.provenance.notes)
    # On this grid the value that methods optimise is the prediction.
    rng = np.random.default_rng(0)
    steps = np.array([grid[name] for name in groups.names])
    widths = np.minimum(steps * rng.integers(1, 9, (50, 8)), groups.sizes)
    alpha = widths / groups.sizes
    np.testing.assert_allclose(model.value(torch.tensor(alpha)).numpy(), model(alpha), rtol=1e-12)
    np.testing.assert_allclose(model.value(torch.tensor(alpha), 0.9).numpy(), model.upper(alpha, 0.9), rtol=1e-12)
    # A device without blocks keeps the grid of the profile.
    smooth = budgets.fit(profile(groups, train=40, noise=0.002, step=4), groups)
    assert set(smooth.provenance.grid.values()) == {4}


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
