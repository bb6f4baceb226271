"""Modes come back as they were, module by module."""

from __future__ import annotations

import contextlib

from torch import nn

from dsa_hw.utils.modules import evaluating, weights_digest


def test_every_module_gets_its_own_mode_back() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
    model.train()
    model[1][0].eval()
    before = [module.training for module in model.modules()]
    with contextlib.suppress(KeyError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise KeyError
    assert [module.training for module in model.modules()] == before


def test_digest_changes_with_any_weight_and_name() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.load_state_dict(one.state_dict())
    assert weights_digest(one) == weights_digest(other)
    other.bias.data[0] += 1
    assert weights_digest(one) != weights_digest(other)
    assert weights_digest(nn.Sequential(one)) != weights_digest(one)
