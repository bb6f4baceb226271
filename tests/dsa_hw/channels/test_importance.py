"""Importances of units and the selection of the most important ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from dsa_hw import find_groups, select_channels
from dsa_hw.channels.importance import scores
from dsa_hw.errors import WidthError
from tests.fakes.proving import IMAGE, Net, Small, conv, head


def test_gamma_is_the_scale_of_the_batch_norm() -> None:
    model = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), head(4))
    groups = find_groups(model, IMAGE)
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([0.1, -3.0, 2.0, 0.0]))
    (kept,) = select_channels(model, groups, [2])
    assert kept.tolist() == [1, 2]


def test_members_are_normalised_before_they_are_averaged() -> None:
    model = Net(lambda n, x: n.h(n.a(x) + n.b(x)), a=conv(3, 3, 1, bias=False), b=conv(3, 3, 1, bias=False), h=head(3))
    with torch.no_grad():
        model.a.weight.copy_(torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1, 1) * 1000)
        model.b.weight.copy_(torch.tensor([6.0, 2.0, 1.0]).view(3, 1, 1, 1))
    groups = find_groups(model, IMAGE)
    (score,) = scores(model, groups, "l1")
    np.testing.assert_allclose(score, (np.array([1, 2, 3]) / 2 + np.array([6, 2, 1]) / 3) / 2)


def test_function_and_l2_as_importance(small: Small) -> None:
    groups = find_groups(small, IMAGE)
    kept = select_channels(small, groups, [2, 2], importance=lambda model, g: [np.arange(n) for n in g.sizes])
    assert [k.tolist() for k in kept] == [[6, 7], [10, 11]]
    with torch.no_grad():
        small.stem[0].weight.zero_()
        small.stem[0].weight[3] = 1.0
        small.deep[0].weight.fill_(1.0)
    assert select_channels(small, groups, [1, 12], importance="l2")[0].tolist() == [3]


def test_fpgm_removes_the_filter_that_the_others_replace_best() -> None:
    """Against distances by hand; the filter in the middle has a large norm and goes all the same."""
    model = nn.Sequential(conv(3, 5, 1, bias=False), nn.ReLU(), head(5))
    corners = torch.tensor([[9.0, 9, 9], [11, 9, 9], [9, 11, 9], [9, 9, 11], [9.5, 9.5, 9.5]])
    with torch.no_grad():
        model[0].weight.copy_(corners.view(5, 3, 1, 1))
    groups = find_groups(model, IMAGE)
    (score,) = scores(model, groups, "fpgm")
    wanted = np.array([sum(np.linalg.norm(a - b) for b in corners.numpy()) for a in corners.numpy()])
    np.testing.assert_allclose(score, wanted / wanted.mean(), rtol=1e-6)
    assert select_channels(model, groups, [4], "fpgm")[0].tolist() == [0, 1, 2, 3]
    assert select_channels(model, groups, [4], "l2")[0].tolist() == [1, 2, 3, 4]


def test_nan_importance_is_rejected(small: Small) -> None:
    groups = find_groups(small, IMAGE)
    with torch.no_grad():
        small.stem[1].weight[0] = float("nan")
    with pytest.raises(WidthError, match="NaN"):
        select_channels(small, groups, [4, 4])


def test_unknown_importance_is_rejected(small: Small) -> None:
    groups = find_groups(small, IMAGE)
    with pytest.raises(WidthError, match="Available importances: auto, fpgm, gamma, l1, l2"):
        select_channels(small, groups, [4, 4], importance="taylor")
