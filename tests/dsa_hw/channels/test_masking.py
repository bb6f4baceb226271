"""Masks act only inside their context, accept gradients and are checked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsa_hw import find_groups, masked, select_channels
from dsa_hw.errors import WidthError
from tests.fakes.proving import IMAGE, Small, run


def test_mask_is_removed_even_after_an_error(small: Small) -> None:
    small.eval()
    groups = find_groups(small, IMAGE)
    expected, keys = run(small, IMAGE), list(small.state_dict())
    kept = select_channels(small, groups, groups.sizes // 2)

    def use() -> None:
        with masked(small, groups, kept):
            assert list(small.state_dict()) == keys
            assert not torch.equal(run(small, IMAGE), expected)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert torch.equal(run(small, IMAGE), expected)
    assert not any("weight" in m.__dict__ for m in small.modules())


def test_gradients_reach_soft_masks_and_weights(small: Small) -> None:
    small.double().eval()
    image = IMAGE.double()
    groups = find_groups(small, image)
    masks = [torch.rand(int(n), dtype=torch.float64, requires_grad=True) for n in groups.sizes]

    def loss(*given: Tensor) -> Tensor:
        with masked(small, groups, given):
            return small(image).square().mean()

    assert torch.autograd.gradcheck(loss, masks)
    loss(*masks).backward()
    assert small.stem[0].weight.grad is not None
    assert small.stem[0].weight.grad.abs().sum() > 0


def test_mask_of_the_wrong_shape_is_rejected(small: Small) -> None:
    groups = find_groups(small, IMAGE)
    with (
        pytest.raises(WidthError, match=r"must have shape \(8,\); got \(3,\)"),
        masked(small, groups, [torch.ones(3), torch.ones(12)]),
    ):
        pass
