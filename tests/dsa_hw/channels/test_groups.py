"""Widths and kept units are checked before anything is removed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dsa_hw import find_groups, shrink
from dsa_hw.errors import WidthError
from tests.fakes.proving import IMAGE, Net, Small, conv, head, prove, run, sizes


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ([0, 4], "width of group 'stem.0' must be from 1 to 8; got 0"),
        ([4, 13], "width of group 'deep.1' must be from 1 to 12; got 13"),
        ([4], r"one entry per channel group \(2\); got shape \(1,\)"),
        ([0.5, 0.5], "must be integers; got float64"),
        ({"nobody": 3}, "Unknown channel group 'nobody'. Available channel groups: deep.1, stem.0"),
    ],
)
def test_widths_that_do_not_match_are_rejected(small: Small, widths: Any, message: str) -> None:
    groups = find_groups(small, IMAGE)
    with pytest.raises(WidthError, match=message):
        shrink(small, groups, widths)


@pytest.mark.parametrize("kept", [[[], [0]], [[8], [0]], [[0, 0], [0]], [[-1], [0]]])
def test_kept_units_that_do_not_match_are_rejected(small: Small, kept: list[list[int]]) -> None:
    groups = find_groups(small, IMAGE)
    with pytest.raises(WidthError, match="distinct and from 0 to 7"):
        shrink(small, groups, kept)


def test_groups_of_another_network_are_rejected(small: Small) -> None:
    groups = find_groups(small, IMAGE)
    with pytest.raises(WidthError, match=r"stem.0.weight is missing in the model"):
        shrink(nn.Sequential(conv(3, 4), head(4)), groups, groups.sizes)


def test_network_without_removable_channels() -> None:
    model = conv(3, 4)
    groups = find_groups(model, IMAGE)
    assert len(groups) == 0
    assert [f.reason for f in groups.frozen] == ["network output"]
    small = shrink(model, groups, [])
    assert small is not model
    assert torch.equal(run(small, IMAGE), run(model, IMAGE))
    assert groups.to_frame().why_frozen.tolist() == ["network output"]


def test_network_with_two_inputs_and_a_dict_output() -> None:
    model = Net(
        lambda n, x, y: {"sum": n.h(n.a(x) + n.b(y)), "inner": n.o(n.a(x))},
        a=conv(3, 8),
        b=conv(4, 8),
        h=head(8),
        o=conv(8, 2),
    )
    inputs = (IMAGE, torch.randn(2, 4, 8, 8))
    groups = find_groups(model, inputs)
    assert sizes(groups) == [8]
    prove(model, groups, inputs, seed=7)
    by_name = find_groups(model, {"x": inputs[0], "y": inputs[1]})
    assert by_name.fingerprint == groups.fingerprint
