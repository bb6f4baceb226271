"""Real surgery: (model, kept units) -> a really smaller, ordinary nn.Module."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from dsa_hw.channels.groups import ChannelGroups
from dsa_hw.channels.importance import Importance, select_channels
from dsa_hw.channels.walk import Pad
from dsa_hw.errors import WidthError

__all__ = ["first_difference", "shrink", "shrink_to"]


def shrink(
    model: nn.Module,
    groups: ChannelGroups,
    kept: Sequence[Any] | NDArray[Any] | Mapping[str, int] | pd.Series,
    importance: str | Importance = "gamma",
) -> nn.Module:
    """A copy of ``model`` without the channels that are not kept; ``model`` itself is untouched.

    ``kept``: the kept units of each group, or widths (a number per group, or a mapping from names to numbers), for
    which ``select_channels`` picks the units by ``importance``.
    """
    if found := first_difference(model, groups.shapes):
        raise WidthError(f"the groups belong to another network: {found} in the groups. Call find_groups on this model")
    widths = isinstance(kept, (Mapping, pd.Series)) or all(np.ndim(k) == 0 for k in kept)
    units = select_channels(model, groups, kept, importance) if widths else list(kept)
    return shrink_to(model, groups, groups.check_kept(units))


def first_difference(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Where the model's tensors are not those of ``shapes``: "NAME is SHAPE in the model and SHAPE", or nothing."""
    found = {name: tuple(t.shape) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    for name in [*shapes, *found]:
        here, there = found.get(name), shapes.get(name)
        if here != there:
            return f"{name} is {here or 'missing'} in the model and {there or 'missing'}"
    return ""


def shrink_to(
    model: nn.Module,
    groups: ChannelGroups,
    kept: Sequence[NDArray[np.int64]],
    device: str | None = None,
) -> nn.Module:
    """As ``shrink`` without checks; on ``device="meta"`` no number is ever copied (shapes are all that is asked).

    ``copy.deepcopy`` takes what its memo already knows: handing it the narrowed tensors in place of the old ones copies
    everything else, keeps tied weights tied, and never duplicates the large ones.
    """
    slices = groups.slices(kept)
    memo: dict[int, Any] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if id(tensor) in memo or name not in slices:
            continue
        memo[id(tensor)] = _like(tensor, _narrow(tensor.detach().to(device=device), slices[name]))
    if device is not None:
        for tensor in [*model.parameters(), *model.buffers()]:
            memo.setdefault(id(tensor), _like(tensor, tensor.detach().to(device=device)))
    small = copy.deepcopy(model, memo)
    mask = groups.flat_mask(kept)
    for module in small.modules():
        fit_attributes(module)
    _fit_numbers(small, groups, mask)
    _refit_pads(small, groups, mask)
    return small


def _narrow(tensor: Tensor, cuts: Mapping[int, NDArray[np.int64]]) -> Tensor:
    for dim, indices in cuts.items():
        tensor = tensor.index_select(dim, torch.from_numpy(indices).to(tensor.device))
    return tensor.contiguous()


def _like(old: Tensor, new: Tensor) -> Tensor:
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def fit_attributes(module: nn.Module) -> None:
    """Make the numbers that torch's own modules keep beside their weights agree with the weights."""
    weight = getattr(module, "weight", None)
    if isinstance(module, (nn.modules.batchnorm._NormBase,)):
        reference = weight if weight is not None else module.running_mean
        if isinstance(reference, Tensor):
            module.num_features = reference.shape[0]
    if not isinstance(weight, Tensor):
        return
    if isinstance(module, nn.modules.conv._ConvNd):
        if module.groups == module.in_channels and module.groups > 1:  # depthwise: loses whole groups
            ratio = max(1, module.out_channels // module.groups)
            module.groups = weight.shape[0] // (1 if module.transposed else ratio)
        if module.transposed:
            module.in_channels, module.out_channels = weight.shape[0], weight.shape[1] * module.groups
        else:
            module.in_channels, module.out_channels = weight.shape[1] * module.groups, weight.shape[0]
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        module.normalized_shape = tuple(weight.shape)
    elif isinstance(module, nn.GroupNorm):
        module.num_channels = weight.shape[0]
    elif isinstance(module, nn.Embedding):
        module.embedding_dim = weight.shape[1]
    elif isinstance(module, nn.PReLU):
        module.num_parameters = weight.shape[0]
    elif isinstance(getattr(module, "normalized_shape", None), tuple) and weight.ndim == 1:
        setattr(module, "normalized_shape", tuple(weight.shape))  # noqa: B010  (a layer norm of the user's own)


def _fit_numbers(small: nn.Module, groups: ChannelGroups, mask: NDArray[np.bool_]) -> None:
    """Numbers that a user's module keeps for its views (``num_heads``, ``attn_dim``, ...): old length -> new length.

    A view of channels with a length that a module's own integer attribute also has almost always got it from there.
    (Where several axes have that length, the one that changes is meant: three heads beside three of q, k, v.) Almost:
    that is why ``find_groups`` compares the shrunk with the masked network before it offers the group.
    """
    lengths: dict[str, dict[int, set[int]]] = {}
    for path, axis, units in groups.extents:
        line = mask[units].any(axis=tuple(a for a in range(units.ndim) if a != axis))
        lengths.setdefault(path, {}).setdefault(line.size, set()).add(int(line.sum()))
    for name, changes in lengths.items():
        module = small.get_submodule(name)
        if type(module).__module__.startswith("torch.nn."):
            continue
        for attribute, value in list(vars(module).items()):
            changed = changes.get(value, set()) - {value} if type(value) is int else set()
            if len(changed) == 1 and not attribute.startswith("_"):
                setattr(module, attribute, changed.pop())


def _refit_pads(small: nn.Module, groups: ChannelGroups, mask: NDArray[np.bool_]) -> None:
    """Replace modules that pad channels by the same moves with the new amounts (option-A shortcuts)."""
    for pad, units in groups.pads:
        kept = mask[units]
        if kept.all():
            continue
        parent, _, leaf = pad.operation.module.rpartition(".")
        setattr(
            small.get_submodule(parent),
            leaf,
            _moves(groups, pad, int(kept[: pad.before].sum()), int(kept[pad.before :].sum())),
        )


def _moves(groups: ChannelGroups, pad: Pad, before: int, after: int) -> nn.Module:
    inside = [o for o in groups.counted.walk.trace.operations if o.module == pad.operation.module]
    graph = fx.Graph()
    source = graph.placeholder("x")
    made: dict[fx.Node, fx.Node] = {}
    for operation in inside:
        args, kwargs = fx.node.map_arg((operation.node.args, operation.node.kwargs), lambda n: made.get(n, source))
        if operation is pad.operation:
            amounts: list[Any] = list(args[1])  # type: ignore[arg-type]
            amounts[pad.position : pad.position + 2] = [before, after]
            args = (args[0], amounts, *args[2:])
        made[operation.node] = graph.call_function(operation.node.target, args, kwargs)  # type: ignore[arg-type]
    graph.output(made[inside[-1].node])
    return fx.GraphModule(nn.Module(), graph, "ShrunkPadding")
