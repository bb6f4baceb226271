"""Batch-norm statistics: of each batch, and measured again."""

from __future__ import annotations

import copy

import torch
from torch import nn

from dsa_hw.training.batchnorm import batch_statistics, recalibrate
from tests.fakes.networks import batches


def test_recalibrated_statistics_are_the_mean_over_the_batches() -> None:
    norm = nn.Sequential(nn.BatchNorm2d(3)).eval()
    found = batches(3)
    recalibrate(norm, found, batches=3)
    wanted = torch.stack([x.mean((0, 2, 3)) for x, _ in found]).mean(0)
    assert torch.allclose(norm[0].running_mean, wanted, atol=1e-6)
    assert norm[0].momentum == 0.1
    assert not norm.training


def test_batch_statistics_normalise_each_batch_and_leave_the_model_unchanged() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.9)).train()
    before = copy.deepcopy(model.state_dict())
    x = 5.0 + 3.0 * batches(1)[0][0]
    with batch_statistics(model):
        y = model(x)
    torch.testing.assert_close(y.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)  # dropout is off
    torch.testing.assert_close(y.var((0, 2, 3), correction=0), torch.ones(3), atol=1e-4, rtol=0)
    assert model[0].training
    assert model[1].training
    assert model[0].momentum == 0.1
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_batch_with_nan_leaves_the_running_statistics_unchanged() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3))
    before = copy.deepcopy(model.state_dict())
    with batch_statistics(model):
        assert model(torch.full((2, 3, 4, 4), torch.nan)).isnan().all()
    assert model[0].track_running_stats
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
