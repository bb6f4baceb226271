"""Masks: the outputs of a network without some of its channels, without removing them.

A channel has an effect only where an operation sums over it. Therefore the mask multiplies the columns of the weights
that read the group. That is after batch norm, activation, residual sums and pooling, and exact for all of them; scaling
weights is also cheaper than scaling activations. Layer norm and group norm compute their statistics over the kept
channels, with the mask as weights.

Inside the context, instance attributes with the masked weights hide the parameters. ``state_dict``, optimisers and the
order of parameters do not change, and gradients reach the parameters and the mask.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dsa_hw.channels.groups import ChannelGroups
from dsa_hw.errors import WidthError

__all__ = ["masked"]


@contextlib.contextmanager
def masked(model: nn.Module, groups: ChannelGroups, kept: Sequence[Any]) -> Iterator[nn.Module]:
    """Mask channels of ``model`` inside a ``with`` block.

    Args:
        model: The network; masked in place, restored at the end of the block.
        groups: Its channel groups.
        kept: For each group the indices of the units to keep, or a mask: a floating-point tensor of shape (C_k,), which
            may require gradients.

    Yields:
        ``model``.

    Raises:
        WidthError: ``kept`` does not match ``groups``.

    Example:
        >>> import torch
        >>> from dsa_hw import find_groups, masked, shrink
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3)).eval()
        >>> image = torch.randn(1, 3, 16, 16)
        >>> groups = find_groups(model, image)
        >>> with masked(model, groups, [[0, 2, 5]]):
        ...     expected = model(image)
        >>> torch.allclose(shrink(model, groups, [[0, 2, 5]])(image), expected, atol=1e-5)
        True
    """
    flat = _flat_mask(model, groups, kept)
    parameters = dict(model.named_parameters())
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((module, leaf))
    shadows: dict[int, Tensor] = {}
    norms: dict[int, Tensor] = {}
    for cut in groups.cuts:
        parameter = parameters.get(cut.tensor)
        if parameter is None or cut.role not in ("in", "norm"):
            continue
        line = flat[torch.from_numpy(cut.units).to(flat.device)]
        if cut.role == "norm":
            norms[id(parameter)] = line
        else:
            shape = [1] * parameter.ndim
            shape[cut.dim or 0] = -1
            shadows[id(parameter)] = shadows.get(id(parameter), parameter) * line.view(shape).to(parameter.dtype)
    placed = [(module, leaf, shadows[key]) for key in shadows for module, leaf in holders[key]]
    for module, leaf, shadow in placed:
        module.__dict__[leaf] = shadow  # attribute look-up finds it before the parameter
    recurrent = [(m, m._flat_weights) for m in {id(m): m for m, _, _ in placed}.values() if isinstance(m, nn.RNNBase)]
    for module, _ in recurrent:  # it uses a list of its weights instead of its attributes
        module.__dict__["_flat_weights"] = [getattr(module, leaf) for leaf in module._flat_weights_names]
    mode = _KeptStatistics(norms)
    standardised = {path: flat[torch.from_numpy(units).to(flat.device)] for path, units in groups.standardised.items()}
    wrapped = [
        (module := model.get_submodule(path), vars(module).get("forward"), mode.forward(module, calls, flat))
        for path, calls in groups.means.items()
    ]
    wrapped += [
        (module := model.get_submodule(path), vars(module).get("forward"), mode.standardising(module, line))
        for path, line in standardised.items()
    ]
    for module, _, forward in wrapped:
        module.__dict__["forward"] = forward
    try:
        with mode if norms or wrapped else contextlib.nullcontext():
            yield model
    finally:
        for module, leaf, _ in placed:
            module.__dict__.pop(leaf, None)
        for module, weights in recurrent:
            module.__dict__["_flat_weights"] = weights
        for module, before, _ in wrapped:
            module.__dict__.pop("forward")
            if before is not None:
                module.__dict__["forward"] = before


def _flat_mask(model: nn.Module, groups: ChannelGroups, kept: Sequence[Any]) -> Tensor:
    """Concatenate the masks of all groups, with a final 1 for what is never removed."""
    parameter = next(iter(model.parameters()), torch.empty(0))
    if len(kept) == len(groups) and len(groups) and all(isinstance(k, Tensor) and k.is_floating_point() for k in kept):
        for name, size, mask in zip(groups.names, groups.sizes, kept, strict=True):
            if mask.shape != (size,):
                raise WidthError(f"The mask of group {name!r} must have shape ({size},); got {tuple(mask.shape)}.")
        return torch.cat([*[mask.to(parameter.device) for mask in kept], kept[0].new_ones(1).to(parameter.device)])
    units = [np.asarray(k.cpu() if isinstance(k, Tensor) else k) for k in kept]
    return torch.from_numpy(groups.flat_mask(units)).to(parameter.device, parameter.dtype)


class _KeptStatistics(TorchFunctionMode):
    """Statistics over channels, weighted by their mask: layer, RMS and group norm, and means that a user wrote.

    A norm is found by its scale parameter, a mean by its number among the means of its module.
    """

    def __init__(self, masks: dict[int, Tensor]) -> None:
        super().__init__()
        self.masks = masks
        self.means: list[Iterator[tuple[int, Tensor] | None]] = []
        self.inputs: list[Tensor] = []

    def forward(self, module: nn.Module, calls: Sequence[tuple[int, Any] | None], flat: Tensor) -> Any:
        """Return the forward of ``module`` with masked means."""
        original = module.forward
        lines = [None if c is None else (c[0], flat[torch.from_numpy(c[1]).to(flat.device)]) for c in calls]
        order = itertools.cycle(lines)  # a module that is called twice has all its calls in ``calls``

        def run(*args: Any, **kwargs: Any) -> Any:
            self.means.append(order)
            try:
                return original(*args, **kwargs)
            finally:
                self.means.pop()

        return run

    def standardising(self, module: nn.Module, line: Tensor) -> Any:
        """Return the forward of a convolution that standardises its weight, with statistics over the kept inputs."""
        original = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            self.inputs.append(line)
            try:
                return original(*args, **kwargs)
            finally:
                self.inputs.pop()

        return run

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (functional.layer_norm, torch.layer_norm):
            return self._norm(func, args, kwargs, ("input", "normalized_shape", "weight", "bias", "eps"), 1e-5)
        if func in (functional.rms_norm, torch.rms_norm):
            return self._norm(func, args, kwargs, ("input", "normalized_shape", "weight", "eps"), None)
        if func in (functional.group_norm, torch.group_norm):
            return self._norm(func, args, kwargs, ("input", "num_groups", "weight", "bias", "eps"), 1e-5)
        if func in (functional.batch_norm, torch.batch_norm) and self.inputs:
            names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            return _kept_weight(given["input"], given.get("weight"), given.get("eps", 1e-5), self.inputs[-1])
        if func in (torch.mean, Tensor.mean) and self.means and (found := next(self.means[-1])) is not None:
            return _kept_mean(func(*args, **kwargs), args[0] if args else kwargs["input"], *found)
        return func(*args, **kwargs)

    def _norm(self, func: Any, args: Any, kwargs: Any, names: Sequence[str], default_eps: float | None) -> Tensor:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        mask = self.masks.get(id(given.get("weight")))
        if mask is None:
            return func(*args, **kwargs)
        x: Tensor = given["input"]
        weight, bias, eps = given["weight"], given.get("bias"), given.get("eps", default_eps)
        if eps is None:
            eps = torch.finfo(x.dtype).eps
        mask = mask.to(x.dtype)
        if "num_groups" in given:
            line = (1, -1) + (1,) * (x.ndim - 2)
            grouped = x.reshape(x.shape[0], given["num_groups"], -1)
            mask = mask.view(line).expand(1, *x.shape[1:]).reshape(1, given["num_groups"], -1)
            y = _standardise(grouped, mask, eps, centre=True).reshape(x.shape)
            weight, bias = weight.view(line), bias.view(line) if bias is not None else None
        else:
            y = _standardise(x, mask, eps, centre="bias" in names)
        y = y * weight
        return y if bias is None else y + bias


def _kept_mean(plain: Tensor, x: Tensor, axis: int, mask: Tensor) -> Tensor:
    """Compute the mean of ``x`` over the kept channels, in shape and type of ``plain``."""
    weight = (mask / mask.sum()).to(x.dtype)
    return torch.movedim(x, axis, -1).matmul(weight).reshape(plain.shape).to(plain.dtype)


def _kept_weight(weight: Tensor, scale: Tensor | None, eps: float, mask: Tensor) -> Tensor:
    """Standardise a weight (1, outputs, inputs * taps) over its kept inputs; the others become zero."""
    columns = mask.to(weight.dtype).repeat_interleave(weight.shape[-1] // len(mask))
    result = _standardise(weight, columns, eps, centre=True) * columns
    return result if scale is None else result * scale.view(1, -1, 1)


def _standardise(x: Tensor, mask: Tensor, eps: float, *, centre: bool) -> Tensor:
    """Compute (x - mean) / sqrt(var + eps) over the last axis, weighted by ``mask``."""
    weight = mask / mask.sum(-1, keepdim=True)
    if centre:
        x = x - (weight * x).sum(-1, keepdim=True)
    return x * torch.rsqrt((weight * x * x).sum(-1, keepdim=True) + eps)
