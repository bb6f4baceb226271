"""What results were computed from: equal only where all of it is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsa_hw.errors import TrainingError
from dsa_hw.training.origins import Origin, read_state, write_state

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300)


@given(PLAIN, PLAIN)
def test_origins_differ_if_and_only_if_a_value_does(one: object, other: object) -> None:
    a, b = Origin.of({"x": one}), Origin.of({"x": other})
    same = type(one) is type(other) and repr(one) == repr(other)
    assert (a.differences(b) == "") == same
    assert len(a.differences(b).splitlines()) <= 1 or "\n" in repr(one) + repr(other)


def test_every_difference_is_named_with_both_values() -> None:
    one = Origin.of({"seed": 0, "lr": 0.1, "data": torch.zeros(3)})
    other = Origin.of({"seed": 1, "lr": 0.1, "data": torch.ones(3)})
    text = one.differences(other)
    assert text.startswith("seed=0, requested seed=1; data=")
    assert "lr" not in text
    assert "requested data=" in text
    assert Origin.of({}).differences(one).startswith("seed=none, requested seed=0")


@pytest.mark.parametrize(("factor", "same"), [(1.0, True), (1.0005, True), (1.01, False), (math.nan, False)])
def test_costs_are_the_same_within_a_thousandth(factor: float, same: bool) -> None:
    costs = (1e-3, 2.0, 3e9)
    assert (Origin({}, costs).differences(Origin({}, (costs[0], factor * costs[1], costs[2]))) == "") == same


def test_state_is_returned_as_it_was(tmp_path: Path) -> None:
    origin = Origin.of({"seed": 0}, [1.5])
    state = {"weights": {"a": torch.randn(3, 2)}, "rows": [{"loss": 0.1}], "step": 3, "none": None}
    write_state(tmp_path / "s.pt", origin, state)
    known, found = read_state(tmp_path / "s.pt")
    assert known == origin
    assert torch.equal(found["weights"]["a"], state["weights"]["a"])  # type: ignore[index]
    assert {k: found[k] for k in ("rows", "step", "none")} == {k: state[k] for k in ("rows", "step", "none")}


def test_flipped_bit_of_a_weight_is_refused(tmp_path: Path) -> None:
    path, weights = tmp_path / "s.pt", torch.arange(64.0)
    write_state(path, Origin({}), {"weights": weights})
    content = bytearray(path.read_bytes())
    content[content.index(weights.numpy().tobytes()[:64]) + 40] ^= 1
    path.write_bytes(content)
    with pytest.raises(TrainingError, match=r"checksum does not match\. Delete it"):
        read_state(path)
