"""Reading a profile: every kind of bad data is refused with its remedy, or treated and noted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from budgets.profile_rows import read_rows
from dsa_hw.errors import ProfileError
from dsa_hw.profiles import Profile

Factory = Callable[..., Any]


def changed(profile: Profile, **columns: Any) -> Profile:
    return replace(profile, table=profile.table.assign(**columns))


def test_rows_are_divided_by_role(network: Factory, profile: Factory) -> None:
    groups = network(size=5)
    measured = profile(groups, train=20, holdout=7)
    rows = read_rows(measured, groups)
    assert [len(part) for part in (rows.train, rows.anchor, rows.holdout)] == [20, 1, 7]
    alpha, cost = rows.points(rows.anchor)
    np.testing.assert_array_equal(alpha, np.ones((1, 5)))
    assert cost[0] == measured.table["seconds"].iloc[-1]
    assert rows.notes == ()


def test_without_a_split_every_row_is_fitted(network: Factory, profile: Factory) -> None:
    groups = network()
    measured = profile(groups, train=20, holdout=7)
    rows = read_rows(replace(measured, table=measured.table.drop(columns="split")), groups)
    assert [len(part) for part in (rows.train, rows.anchor, rows.holdout)] == [28, 0, 0]


def test_too_few_configurations_are_refused(network: Factory, profile: Factory) -> None:
    groups = network()
    with pytest.raises(ProfileError, match="1 distinct configurations to train on; at least 5"):
        read_rows(profile(groups, train=1, holdout=0), groups)


def test_constant_costs_are_refused(network: Factory, profile: Factory) -> None:
    groups = network()
    with pytest.raises(ProfileError, match=r"All 40 configurations cost the same \(0.003 seconds\)"):
        read_rows(changed(profile(groups), seconds=0.003), groups)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (float("nan"), "1 of 61 configurations have no finite seconds"),
        (float("inf"), "1 of 61 configurations have no finite seconds"),
        ("fast", "1 of 61 configurations have no finite seconds"),
        (-0.001, "1 of 61 configurations have seconds <= 0"),
        (0.0, "1 of 61 configurations have seconds <= 0"),
    ],
)
def test_values_that_are_not_positive_numbers_are_refused(
    network: Factory, profile: Factory, wrong: object, words: str
) -> None:
    groups = network()
    measured = profile(groups)
    seconds = measured.table["seconds"].astype(object)
    seconds.iloc[7] = wrong
    with pytest.raises(ProfileError, match=rf"{words} \(first: row 7\)"):
        read_rows(changed(measured, seconds=seconds), groups)


def test_repeated_configurations_are_merged_by_their_median(network: Factory, profile: Factory) -> None:
    groups = network(size=5, operations=15)
    measured = profile(groups, train=20, holdout=5)
    train = measured.table[measured.table["split"] == "train"]
    slow, slower = (train.assign(seconds=factor * train["seconds"]) for factor in (2, 30))
    again = pd.concat([measured.table, slow, slower], ignore_index=True)
    first, second = (read_rows(p, groups) for p in (measured, replace(measured, table=again)))
    np.testing.assert_array_equal(second.train["cost"], 2 * first.train["cost"])
    assert any("40 repeated measurements" in note for note in second.notes)


def test_held_out_configurations_are_removed_from_training(network: Factory, profile: Factory) -> None:
    groups = network(size=5, operations=15)
    measured = profile(groups, train=20, holdout=5)
    held = measured.table[measured.table["split"] == "holdout"]
    leaking = pd.concat([measured.table, held.assign(split="train")], ignore_index=True)
    rows = read_rows(replace(measured, table=leaking), groups)
    assert [len(part) for part in (rows.train, rows.holdout)] == [20, 5]
    assert any("5 training configurations that are also held out" in note for note in rows.notes)


def test_another_target_is_refused(network: Factory, profile: Factory) -> None:
    groups = network()
    with pytest.raises(ProfileError, match="measured on 'synthetic/cpu'; requested target 'other/cpu'"):
        read_rows(profile(groups), groups, target="other/cpu")


def test_a_plain_table_needs_groups_target_and_one_column_of_costs(network: Factory, profile: Factory) -> None:
    groups = network()
    table = profile(groups).table
    for arguments in ({}, {"groups": groups}, {"target": "my/board"}):
        with pytest.raises(ProfileError, match="groups= and target="):
            read_rows(table, **arguments)
    with pytest.raises(ProfileError, match="one column of costs, 'seconds' or 'joules'"):
        read_rows(table.drop(columns="seconds"), groups, target="my/board")
    with pytest.raises(ProfileError, match="one column of costs"):
        read_rows(table.assign(joules=1.0), groups, target="my/board")
    assert read_rows(table.rename(columns={"seconds": "joules"}), groups, target="my/board").profile.unit == "J"
    mixed = table.assign(target=["my/board"] * 60 + ["other/board"])
    with pytest.raises(ProfileError, match=r"measurements of my/board, other/board"):
        read_rows(mixed, groups, target="my/board")


def test_widths_that_are_not_whole_numbers_up_to_the_size_are_refused(network: Factory, profile: Factory) -> None:
    groups = network()
    for wrong in (0.5, 0, groups.sizes[0] + 1, float("nan")):
        with pytest.raises(ProfileError, match=r"'group0' must be a whole number from 1 to"):
            read_rows(changed(profile(groups), group0=wrong), groups)
    measured = profile(groups)
    with pytest.raises(ProfileError, match="no column 'group3'"):
        read_rows(replace(measured, table=measured.table.drop(columns="group3")), groups)


def test_another_network_is_refused(network: Factory, profile: Factory) -> None:
    measured = profile(network())
    with pytest.raises(ProfileError, match="another network"):
        read_rows(measured, network(size=8, operations=21))
    with pytest.raises(ProfileError, match="8 channel groups and the network 9"):
        read_rows(measured, network(size=9))
    wider = replace(measured, sizes=tuple(2 * size for size in measured.sizes), fingerprint=None)
    with pytest.raises(ProfileError, match="another network"):
        read_rows(wider, network())


def test_configurations_off_the_grid_are_left_out(network: Factory, profile: Factory) -> None:
    groups = network(size=4, operations=12)
    measured = replace(profile(groups, train=30), grid=dict.fromkeys(groups.names, 8))
    with pytest.raises(ProfileError, match="off the target's grid"):
        read_rows(measured, groups)
    assert len(read_rows(measured, groups, aligned=False).train) == 30
    aligned = measured.table.copy()
    for name, size in zip(groups.names, groups.sizes, strict=True):
        aligned[name] = np.clip(8 * np.round(aligned[name] / 8), 8, size).astype(int)
    aligned.loc[0, groups.names[0]] = 9
    rows = read_rows(replace(measured, table=aligned), groups)
    assert any("1 configurations off the target's grid" in note for note in rows.notes)
    assert (rows.train[groups.names[0]] != 9).all()


def test_errors_are_read_merged_and_checked(network: Factory, profile: Factory) -> None:
    groups = network(size=4, operations=10, seed=1)
    measured = profile(groups, train=10, holdout=5)
    assert np.isnan(read_rows(measured, groups).errors).all()
    table = measured.table.assign(error=np.where(np.arange(16) % 2, 0.01, np.nan))
    twice = pd.concat([table, table.iloc[[1]].assign(error=0.03)], ignore_index=True)
    errors = read_rows(replace(measured, table=twice), groups).errors
    assert errors.shape == (11,), "training rows, then the dense network"
    assert errors[1] == pytest.approx(0.02)
    assert errors[3] == 0.01
    assert np.isnan(errors[[0, 2]]).all()
    for wrong in (-0.1, np.inf):
        with pytest.raises(ProfileError, match="an error below 0 or infinite"):
            read_rows(replace(measured, table=table.assign(error=wrong)), groups)
