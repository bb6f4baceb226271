"""Synthetic inputs and the distance of outputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsa_hw.errors import TrainingError
from dsa_hw.methods.synthetic import output_distance, synthetic_batches


def test_images_have_a_1_over_f_spectrum_and_other_inputs_are_refused() -> None:
    example = torch.randn(1, 3, 16, 16)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(3))
    net(example)
    x, y = next(synthetic_batches(net, (example,), 8, seed=0))
    assert x.shape == (8, 3, 16, 16)
    assert y.shape == (8, 3)
    spectrum = torch.fft.rfft2(x).abs().mean((0, 1))
    assert spectrum[0, 1] > 4 * spectrum[0, 7]
    again, _ = next(synthetic_batches(net, (example,), 8, seed=0))
    assert torch.equal(x, again)
    with pytest.raises(TrainingError, match="cannot be generated"):
        next(synthetic_batches(net, (torch.zeros(1, 5, dtype=torch.long),), 8, seed=0))
    assert float(output_distance(y, y)) == 0.0
    assert 0.5 < float(output_distance(y.roll(1, 0), y)) < 8.0
