"""Removal of channels: a smaller, ordinary ``nn.Module`` from a network and its kept units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, fx, nn

from dsa_hw.channels.groups import ChannelGroups
from dsa_hw.channels.importance import Importance, select_channels
from dsa_hw.channels.rewriting import UnresizableError, resize
from dsa_hw.channels.trace import tensor_attributes
from dsa_hw.channels.walk import Pad
from dsa_hw.errors import WidthError
from dsa_hw.utils.arrays import Bools, Ints
from dsa_hw.utils.modules import copy_module

__all__ = ["first_difference", "narrow", "shrink", "shrink_to"]


def shrink(
    model: nn.Module,
    groups: ChannelGroups,
    kept: Sequence[Any] | np.ndarray[Any, Any] | Mapping[str, int] | pd.Series,
    importance: str | Importance = "gamma",
) -> nn.Module:
    """Copy ``model`` without the channels that are not kept.

    Args:
        model: The network; it is not changed.
        groups: Its channel groups.
        kept: The indices of the units to keep of each group; or widths (an integer per group, or a mapping from names
            of groups to integers), for which `select_channels` selects the units.
        importance: Importance for `select_channels`; used with widths only.

    Returns:
        A network of the same class with smaller weights. It can be trained, exported, pickled and pruned again. Modules
        whose code contains a channel count are replaced by their graph (``Resized...``), which takes any batch size,
        but images of the size of the example inputs only.

    Raises:
        WidthError: ``kept`` does not match ``groups``, or ``groups`` belong to another network.

    Example:
        >>> import torch
        >>> from dsa_hw import find_groups, shrink
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
        >>> groups = find_groups(model, torch.randn(1, 3, 16, 16))
        >>> shrink(model, groups, [5])
        Sequential(
          (0): Conv2d(3, 5, kernel_size=(3, 3), stride=(1, 1))
          (1): ReLU()
          (2): Conv2d(5, 4, kernel_size=(3, 3), stride=(1, 1))
        )
    """
    if found := first_difference(model, groups.shapes):
        raise WidthError(
            f"The groups belong to another network: {found} in the groups. Call find_groups on this model."
        )
    widths = isinstance(kept, (Mapping, pd.Series)) or all(np.ndim(k) == 0 for k in kept)
    units = select_channels(model, groups, kept, importance) if widths else list(kept)
    return shrink_to(model, groups, groups.check_kept(units))


def first_difference(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Describe the first tensor whose shape differs ("NAME is SHAPE in the model and SHAPE"), or return ""."""
    found = {name: tuple(t.shape) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    for name in [*shapes, *found]:
        here, there = found.get(name), shapes.get(name)
        if here != there:
            return f"{name} is {here or 'missing'} in the model and {there or 'missing'}"
    return ""


def shrink_to(
    model: nn.Module,
    groups: ChannelGroups,
    kept: Sequence[Ints],
    device: str | None = None,
) -> nn.Module:
    """Do the work of `shrink` without its checks; on ``device="meta"`` without copying any data.

    ``copy.deepcopy`` uses what its memo already contains. A memo with the narrowed tensors in place of the old ones
    makes it copy everything else, keeps tied weights tied, and never duplicates the large tensors.
    """
    slices = groups.slices(kept)
    memo: dict[int, Any] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in [*named, *tensor_attributes(model)]:
        if id(tensor) in memo or name not in slices:
            continue
        memo[id(tensor)] = _like(tensor, narrow(tensor.detach().to(device=device), slices[name]))
    if device is not None:
        for tensor in [*model.parameters(), *model.buffers()]:
            memo.setdefault(id(tensor), _like(tensor, tensor.detach().to(device=device)))
    small = copy_module(model, memo)
    mask = groups.flat_mask(kept)
    for module in small.modules():
        fit_attributes(module)
    _fit_numbers(small, groups, mask)
    _refit_pads(small, groups, mask)
    _rewrite(small, groups, mask, slices)
    return small


def narrow(tensor: Tensor, cuts: Mapping[int, Ints]) -> Tensor:
    """Return the kept indices of a tensor; ``cuts`` is an entry of `ChannelGroups.slices`."""
    for dim, indices in cuts.items():
        tensor = tensor.index_select(dim, torch.from_numpy(indices).to(tensor.device))
    return tensor.contiguous()


def _like(old: Tensor, new: Tensor) -> Tensor:
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def fit_attributes(module: nn.Module) -> None:
    """Update the sizes that modules of torch store beside their weights (``in_channels``, ...)."""
    weight = getattr(module, "weight", None)
    if isinstance(module, (nn.modules.batchnorm._NormBase,)):
        reference = weight if weight is not None else module.running_mean
        if isinstance(reference, Tensor):
            module.num_features = reference.shape[0]
    if isinstance(module, nn.RNNBase):
        own = dict(module.named_parameters(recurse=False))
        module.input_size, module.hidden_size = own["weight_ih_l0"].shape[1], own["weight_hh_l0"].shape[1]
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


def _fit_numbers(small: nn.Module, groups: ChannelGroups, mask: Bools) -> None:
    """Update integer attributes that modules of the user use in views and splits (``num_heads``, ``attn_dim``, ...).

    An attribute that equals the length of a view of channels is assumed to be the source of that length. Where several
    axes have that length (four heads of width four), the axis that changes is meant, except by an attribute that is
    called a dimension or size. Where the module has no such attribute, those of the modules inside it are meant. The
    assumption can be wrong; `find_groups` therefore compares the shrunk with the masked network.
    """
    lengths: dict[str, dict[int, set[int]]] = {}
    for path, axis, units in groups.extents:
        line = mask[units].any(axis=tuple(a for a in range(units.ndim) if a != axis))
        lengths.setdefault(path, {}).setdefault(line.size, set()).add(int(line.sum()))
    for name, changes in lengths.items():
        module = small.get_submodule(name)
        if type(module).__module__.startswith("torch.nn."):
            continue
        for length, found in changes.items():
            new = found - {length}
            other = ("group", "dim", "size") if length in found else ("group",)  # a number of groups never changes
            if len(new) == 1 and not _set_numbers(module, length, min(new), other):
                for path, inner in module.named_modules(prefix=name):
                    if path not in lengths:
                        _set_numbers(inner, length, min(new), other)


def _set_numbers(module: nn.Module, old: int, new: int, other: tuple[str, ...]) -> bool:
    """Set the integer attributes of a module that equal ``old``, except those that ``other`` names.

    Returns:
        Whether there are any.
    """
    if type(module).__module__.startswith("torch.nn."):
        return False
    equal = [n for n, value in vars(module).items() if type(value) is int and value == old and not n.startswith("_")]
    names = [name for name in equal if not any(part in name for part in other)]
    for name in names:
        setattr(module, name, new)
    return bool(names)


def _refit_pads(small: nn.Module, groups: ChannelGroups, mask: Bools) -> None:
    """Replace modules that pad channels by the same operations with new amounts (option-A shortcuts)."""
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


def _rewrite(small: nn.Module, groups: ChannelGroups, mask: Bools, slices: Mapping[str, Any]) -> None:
    """Replace modules whose code contains a channel count by their graph."""
    walk = groups.counted.walk
    for path, given in walk.rewrites.items():
        if any(f"{name}.".startswith(f"{path}.") for name in slices):
            parent, _, leaf = path.rpartition(".")
            try:
                new = resize(given, groups.counted, walk.values, mask, small.get_submodule(path))
            except UnresizableError as error:
                error.module = path
                raise
            setattr(small.get_submodule(parent), leaf, new)


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
