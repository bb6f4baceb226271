"""Answers of the boards of a fleet."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_hw.errors import MeasurementError
from profilers.fleet.answers import checked_batch, checked_description

DESCRIPTION: dict[str, Any] = {
    "environment": {"cpu": "A72", "kernel": "6.1"},
    "title": "onnxruntime/cpu fp32 x1",
    "estimated": None,
    "slow_to_load": False,
    "grid": 8,
    "watched": True,
}
RUNS: dict[str, Any] = {
    "values": [1e-3, 2e-3],
    "before": [math.inf, 1e-3],
    "after": [1e-3, math.inf],
    "block": [0, 1],
    "sitting": [7, 7],
    "extra": {"celsius": [50.0, math.nan]},
}
BATCH: dict[str, Any] = {"samples": {"dense": RUNS, "a": RUNS}, "busiest": None}


def test_valid_answers_are_returned() -> None:
    assert checked_description(DESCRIPTION) == DESCRIPTION
    samples, busiest = checked_batch({**BATCH, "busiest": "on\x1b[2J top"}, {"dense", "a"}, 7)
    assert samples["a"].values.tolist() == RUNS["values"]
    assert samples["a"].before.tolist() == RUNS["before"]
    assert busiest == "on?[2J top"


def test_error_of_a_board_is_one_line() -> None:
    for check in (checked_description, lambda x: checked_batch(x, {"a"}, 7)):
        with pytest.raises(MeasurementError, match=r"^no runtime \?\[2J here$"):
            check({"error": "no runtime\n\x1b[2J here"})


@pytest.mark.parametrize("bad", [0.0, -1.0, 1e-300, 1e9, math.nan, "1", None, True, [1.0]])
@pytest.mark.parametrize("name", ["values", "before", "after"])
def test_absurd_times_are_errors(name: str, bad: Any) -> None:
    runs = {**RUNS, name: [1e-3, bad]}
    with pytest.raises(MeasurementError):
        checked_batch({**BATCH, "samples": {"dense": RUNS, "a": runs}}, {"dense", "a"}, 7)


@pytest.mark.parametrize(
    "change",
    [
        {"values": []},
        {"values": [1e-3]},
        {"block": [0, -1]},
        {"block": [0, 10**12]},
        {"sitting": [7, 8]},
        {"extra": {1: [1.0, 2.0]}},
        {"extra": {"celsius": [1.0]}},
        {"extra": {"celsius": [1.0, 10**400]}},
    ],
)
def test_runs_that_do_not_belong_to_the_batch_are_errors(change: dict[str, Any]) -> None:
    with pytest.raises(MeasurementError, match="nvalid answer"):
        checked_batch({"samples": {"a": {**RUNS, **change}}, "busiest": None}, {"a"}, 7)
    with pytest.raises(MeasurementError, match="runs of 2 networks are expected"):
        checked_batch({"samples": {"a": RUNS}, "busiest": None}, {"a", "dense"}, 7)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the paths of all parts of a structure."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield from places(part, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([]) | st.just({})


@settings(max_examples=300)
@given(st.data())
def test_changed_answers_give_a_typed_error_or_valid_data(data: st.DataObject) -> None:
    for answer, check in ((DESCRIPTION, checked_description), (BATCH, lambda x: checked_batch(x, {"dense", "a"}, 7))):
        path = data.draw(st.sampled_from(list(places(answer))))
        try:
            found: Any = check(replaced(answer, path, data.draw(anything)))
        except MeasurementError:
            continue
        if isinstance(found, tuple):
            assert all((s.values > 0).all() for s in found[0].values())
        else:
            assert all(isinstance(text, str) for text in (found["title"], *found["environment"].values()))
