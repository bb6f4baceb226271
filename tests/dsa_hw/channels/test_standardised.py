"""Convolutions that standardise their weight: statistics over the kept inputs, shrunk and masked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dsa_hw import find_groups, masked
from tests.fakes.proving import IMAGE, conv, head, prove, sizes


class Standardising(nn.Conv2d):
    """The convolution of NFNet; without a scale that of BiT."""

    def __init__(self, i: int, o: int, *, groups: int = 1, scaled: bool = True) -> None:
        super().__init__(i, o, 3, padding=1, groups=groups)
        self.gain = nn.Parameter(torch.rand(o, 1, 1, 1)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        scale = None if self.gain is None else (self.gain * 0.7).view(-1)
        weight = self.weight.reshape(1, self.out_channels, -1)
        weight = functional.batch_norm(weight, None, None, weight=scale, training=True, momentum=0.0, eps=1e-6)
        return functional.conv2d(x, weight.reshape_as(self.weight), self.bias, 1, self.padding, 1, self.groups)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_standardised_convolutions_are_pruned_exactly(groups: int, scaled: bool) -> None:
    middle = Standardising(8, 8, groups=groups, scaled=scaled)
    model = nn.Sequential(conv(3, 8), nn.ReLU(), middle, nn.ReLU(), Standardising(8, 12, scaled=scaled), head(12))
    found = find_groups(model, IMAGE)
    assert sum(sizes(found)) == {1: 28, 2: 20, 8: 20}[groups], "first, middle and last"
    prove(model, found, IMAGE, seed=4, memory=False)


def test_masks_of_standardised_inputs_have_gradients() -> None:
    model = nn.Sequential(conv(3, 8), Standardising(8, 4), head(4)).eval()
    groups = find_groups(model, IMAGE)
    masks = [torch.full((size,), 0.6, requires_grad=True) for size in groups.sizes]
    with masked(model, groups, masks):
        model(IMAGE).square().sum().backward()
    assert all(mask.grad is not None and bool(mask.grad.abs().sum() > 0) for mask in masks)
