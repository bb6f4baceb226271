"""Importance of channels by the Fisher information of their masks.

With masks m on the units, all 1, removing unit u changes the loss by about -g_u + h_u / 2, where g_u = dL/dm_u. Near a
minimum the mean of g_u is small and, by Fisher's identity, the curvature h_u is about the mean of g_u^2 over examples.
So the mean square of the gradient of the mask ranks units by the cost of their removal, from first derivatives alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dsa_hw.channels import ChannelGroups, masked
from dsa_hw.channels.importance import scores
from dsa_hw.training.loaders import on_device
from dsa_hw.training.losses import Loss, OwnLoss, autocast, checked_loss
from dsa_hw.utils.modules import device_of, evaluating

__all__ = ["fisher", "mask_slopes", "parts_of"]

_log = logging.getLogger(__name__)
# Examples per gradient. Its mean square is (E g)^2 + Var(g) / n for the mean g of n examples: a part of 32 has 1/32 of
# their variance, the same share for every unit, so that the order of units with a mean near 0 is that of the variance.
# 64 parts, as DSA uses, estimate it within 18% for each unit (sqrt(2 / 64)).
_PART = 32


def fisher(
    model: nn.Module, groups: ChannelGroups, batches: Iterable[Any], loss: Loss, *, precision: str = "fp32"
) -> list[NDArray[np.float64]]:
    """Return the mean of (dL/dm_u)^2 over parts of the batches, K arrays (C_k,).

    Values are comparable within a group. A group whose masks have no gradient, for example because the targets are
    the outputs of the dense network, uses |gamma| instead; this is logged. The model is unchanged.

    Args:
        model: The network.
        groups: Its channel groups.
        batches: Batches (inputs, targets).
        loss: ``loss(outputs, targets)``, a scalar.
        precision: "fp32", "bf16" or "fp16".
    """
    found = mask_slopes(model, groups, batches, loss, precision=precision)
    without = [name for name, score in zip(groups.names, found, strict=True) if not score.any()]
    if not without:
        return found
    _log.warning("The loss has no gradient by the masks of %s. Their units are ranked by |gamma|.", ", ".join(without))
    fallback = scores(model, groups, "gamma")
    return [score if score.any() else other for score, other in zip(found, fallback, strict=True)]


def mask_slopes(
    model: nn.Module,
    groups: ChannelGroups,
    batches: Iterable[Any],
    loss: Loss,
    *,
    precision: str = "fp32",
    at: Sequence[Tensor] | None = None,
) -> list[NDArray[np.float64]]:
    """Return the mean of (dL/dm_u)^2 as it is, K arrays (C_k,), comparable between groups; arguments as in `fisher`.

    ``at`` are the masks (C_k,) at which the derivative is taken; None is 1 for all units.
    """
    sizes, device = groups.sizes.tolist(), device_of(model)
    sums, count = [np.zeros(size) for size in sizes], 0
    with evaluating(model):
        for batch in batches:
            for part in parts_of(on_device(batch, device), loss):
                masks = [(torch.ones(c) if at is None else at[k]).to(device) for k, c in enumerate(sizes)]
                masks = [mask.detach().clone().requires_grad_() for mask in masks]
                with torch.enable_grad(), masked(model, groups, masks), autocast(precision, device):
                    slopes = torch.autograd.grad(checked_loss(model, part, loss), masks, allow_unused=True)
                for total, slope in zip(sums, slopes, strict=True):
                    if slope is not None:
                        total += slope.double().cpu().numpy() ** 2
                count += 1
    return [total / count for total in sums]


def parts_of(batch: tuple[Any, Any], loss: Loss) -> Iterator[tuple[Any, Any]]:
    """Split a batch into interleaved parts of about `_PART` examples.

    What a batch of the user's own form consists of is not known, so it is not split.
    """
    if isinstance(loss, OwnLoss):
        return iter([batch])
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    size = len(leaves[0]) if leaves else 1
    number = max(1, size // _PART)

    def taken(first: int) -> Any:
        def take(leaf: Any) -> Any:
            return leaf[first::number] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size else leaf

        inputs = tree_map(take, batch[0])
        return inputs, (inputs if batch[0] is batch[1] else tree_map(take, batch[1]))

    return (taken(first) for first in range(number))
