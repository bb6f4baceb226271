"""Importance of channels by elimination: what is lost when a channel goes and the next layers are refitted.

Let u = W x be a layer that reads the channels x of a group, A the covariance of x, and G = E[dL/du dL/du'] the
curvature of the loss in u (K-FAC; Martens & Grosse 2015). If channel i is removed and the weights on the others are
refitted (optimal brain surgeon; Hassibi & Stork 1993), the loss rises by

    e_i = 1/2 sum over the layers of H_ii / P_ii,     P = A^-1,  H = W' G W,

because 1 / P_ii is the variance of x_i that the other channels do not explain. The refitted weights are W - w_i r' with
r = P[:, i] / P_ii, and those quantities become

    H <- H - h r' - r h' + H_ii r r',   h = H[:, i],        P <- P - P_ii r r'.

The channel of least e_i is removed again and again. Of two equal channels, the first to go costs nothing and the second
as much as both; the Fisher information of the masks (`dsa_hw.methods.dsa.fisher`) counts both or neither.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dsa_hw.channels import ChannelGroups
from dsa_hw.methods.dsa.fisher import fisher, parts_of
from dsa_hw.training.loaders import on_device
from dsa_hw.training.losses import Loss, autocast, checked_loss
from dsa_hw.utils.arrays import Floats
from dsa_hw.utils.modules import device_of, evaluating

__all__ = ["elimination"]

_log = logging.getLogger(__name__)

_DAMPING = 1e-3  # of a channel's variance, added to it: covariances come from a few thousand images
_WIDEST = 4096  # inputs of a layer, at most; its matrices have the square of that
_ROUNDS = 128  # of removals in a group; wide groups lose several channels in each


def elimination(
    model: nn.Module, groups: ChannelGroups, batches: Iterable[Any], loss: Loss, *, precision: str = "fp32"
) -> list[Floats]:
    """Return the rise of the loss at the removal of every channel, K arrays (C_k,).

    Within a group the values follow the order of removal. A group that is read by something else than plain
    convolutions and linear layers, or whose readers have no gradient, gets the values of `fisher`, which are not
    comparable with those of other groups. The model is unchanged.

    Args:
        model: The network.
        groups: Its channel groups.
        batches: Batches (inputs, targets).
        loss: ``loss(outputs, targets)``, a scalar.
        precision: "fp32", "bf16" or "fp16".
    """
    batches = list(batches)
    layers = _readers(model, groups)
    _observe(model, layers, batches, loss, precision)
    found: list[Floats | None] = []
    for start, size in zip(groups.offsets[:-1].tolist(), groups.sizes.tolist(), strict=True):
        units = np.arange(start, start + size)
        readers = ("in", "standardised")  # of the latter, no weights are columns of one matrix
        cuts = [cut for cut in groups.cuts if cut.role in readers and np.isin(cut.units, units).any()]
        reading = [_Elimination.of(layers.get(cut.tensor), cut.units, units) for cut in cuts]
        usable = [layer for layer in reading if layer is not None]
        found.append(_removed(usable, size) if usable and len(usable) == len(reading) else None)
    without = [name for name, values in zip(groups.names, found, strict=True) if values is None]
    if not without:
        return [values for values in found if values is not None]
    _log.info("Channels of %s are ranked by their Fisher information.", ", ".join(without))
    others = fisher(model, groups, batches, loss, precision=precision)
    return [other if values is None else values for values, other in zip(found, others, strict=True)]


@dataclass
class _Reader:
    """A layer and the moments of its inputs and of the gradients of its outputs."""

    module: nn.Module
    weight: Tensor  # (outputs, inputs, taps)
    count: int = 0
    mean: Tensor | float = 0.0
    inputs: Tensor | float = 0.0
    slopes: Tensor | float = 0.0


def _readers(model: nn.Module, groups: ChannelGroups) -> dict[str, _Reader]:
    """Return the layers whose input channels are columns of one matrix, by the name of their weight."""
    wanted = {cut.tensor for cut in groups.cuts if cut.role == "in"}
    found = {}
    for name, module in model.named_modules():
        key = f"{name}.weight" if name else "weight"
        if key not in wanted:
            continue
        if isinstance(module, nn.Linear):
            weight = module.weight[:, :, None]
        elif isinstance(module, nn.modules.conv._ConvNd) and module.groups == 1:
            weight = (module.weight.transpose(0, 1) if module.transposed else module.weight).flatten(2)
        else:
            continue
        if weight.shape[1] <= _WIDEST:
            found[key] = _Reader(module, weight.detach().double().cpu())
    return found


def _observe(model: nn.Module, layers: dict[str, _Reader], batches: list[Any], loss: Loss, precision: str) -> None:
    """Add up the moments over all batches."""
    device = device_of(model)
    outputs: list[tuple[_Reader, Tensor]] = []

    def seen(layer: _Reader) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            x = _rows(inputs[0], layer.module)
            layer.count += len(x)
            layer.mean = layer.mean + x.sum(0).double().cpu()
            layer.inputs = layer.inputs + (x.T @ x).double().cpu()
            kept = output if output.requires_grad else output.detach().requires_grad_()
            outputs.append((layer, kept))
            return kept.clone()  # what follows may change it in place

        return hook

    handles = [layer.module.register_forward_hook(seen(layer)) for layer in layers.values()]
    try:
        with evaluating(model), torch.enable_grad():
            for batch in batches:
                for part in parts_of(on_device(batch, device), loss):
                    outputs.clear()
                    with autocast(precision, device):
                        value = checked_loss(model, part, loss)
                    if not outputs or not value.requires_grad:
                        continue
                    slopes = torch.autograd.grad(value, [y for _, y in outputs], allow_unused=True)
                    for (layer, _), slope in zip(outputs, slopes, strict=True):
                        if slope is not None:
                            g = _rows(slope, layer.module)
                            layer.slopes = layer.slopes + (g.T @ g).double().cpu()
    finally:
        for handle in handles:
            handle.remove()


def _rows(x: Tensor, module: nn.Module) -> Tensor:
    """Return the values of each channel as a column."""
    x = x.detach().float()
    return (x if isinstance(module, nn.Linear) else x.movedim(1, -1)).flatten(0, -2)


class _Elimination:
    """H and P of one layer, and its columns of each unit (units, columns per unit)."""

    def __init__(self, h: Tensor, p: Tensor, columns: Tensor) -> None:
        self.h, self.p, self.columns = h, p, columns

    @classmethod
    def of(cls, layer: _Reader | None, cut: Any, units: Any) -> _Elimination | None:
        """Return the state before any removal; None where the layer cannot be used."""
        if layer is None or not isinstance(layer.inputs, Tensor) or not isinstance(layer.slopes, Tensor):
            return None
        if not layer.slopes.any():  # the targets may be the network's own outputs
            return None
        columns = [np.flatnonzero(cut == unit) for unit in units]
        if len({len(c) for c in columns}) > 1 or len(cut) != layer.weight.shape[1]:
            return None
        mean = torch.as_tensor(layer.mean) / layer.count
        a = layer.inputs / layer.count - torch.outer(mean, mean)
        most = float(a.diagonal().max())
        if not most > 1e-30:  # the inputs never vary
            return None
        spread = a.diagonal().clamp_min(1e-6 * most)
        h = torch.einsum("oct,op,pdt->cd", layer.weight, layer.slopes, layer.weight)
        return cls(h, torch.linalg.inv(a + torch.diag(_DAMPING * spread)), torch.from_numpy(np.stack(columns)))

    def costs(self, alive: Tensor) -> Tensor:
        """Return the rise of the loss at the removal of each unit that is left."""
        at = self.columns[alive]
        rows, columns = at[:, :, None], at[:, None, :]
        return 0.5 * torch.linalg.solve(self.p[rows, columns], self.h[rows, columns]).diagonal(dim1=1, dim2=2).sum(1)

    def remove(self, units: Tensor) -> None:
        """Remove units, and refit the weights of the others."""
        b = self.columns[units].flatten()
        r = torch.linalg.solve(self.p[b][:, b], self.p[b]).T
        hr = self.h[:, b] @ r.T
        self.h = self.h - hr - hr.T + r @ self.h[b][:, b] @ r.T
        self.p = self.p - self.p[:, b] @ r.T


def _removed(layers: list[_Elimination], size: int) -> Floats:
    """Remove all units of a group, the least costly first, and return the cost of each."""
    alive = torch.arange(size)
    values = np.zeros(size)
    level, each = 0.0, -(-size // _ROUNDS)
    while len(alive):
        costs = torch.stack([layer.costs(alive) for layer in layers]).sum(0)
        chosen = costs.argsort(stable=True)[:each]
        for unit, cost in zip(alive[chosen].tolist(), costs[chosen].tolist(), strict=True):
            level = values[unit] = max(level * (1 + 1e-9), cost)  # no ties: values follow the order of removal
        for layer in layers:
            layer.remove(alive[chosen])
        alive = alive[~torch.isin(torch.arange(len(alive)), chosen)]
    return values
