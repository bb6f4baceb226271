"""find_groups: analyse, then prove it on the network itself.

Rules follow tensors, but a ``forward`` can hold a channel count as a plain number, which no trace shows. So every
analysis is tried out before it is offered: a copy with random weights is shrunk to random widths, must run, and must
give what the masked copy gives. Groups that break it are frozen, with the place where it broke.
"""

from __future__ import annotations

import copy
import logging
import os
import pathlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dsa_hw.channels.assemble import analyse, assemble
from dsa_hw.channels.groups import ChannelGroups
from dsa_hw.channels.masking import masked
from dsa_hw.channels.surgery import shrink_to
from dsa_hw.channels.trace import as_inputs, evaluating, short_path
from dsa_hw.channels.walk import Walk

__all__ = ["difference", "find_groups", "randomise"]

_Test = Callable[[ChannelGroups, Sequence[NDArray[np.int64]]], None]
_logger = logging.getLogger(__name__)
_TOLERANCE = 1e-4
_DRAWS = 2  # of random widths on shapes alone, which cost next to nothing
_TORCH_FOLDER = f"{pathlib.Path(torch.__file__).parent}{os.sep}"  # with the separator: not torchvision's


def find_groups(model: nn.Module, example_inputs: Any, *, verify: bool = True) -> ChannelGroups:
    """Channel groups of any model that ``torch.export`` can trace.

    ``example_inputs``: a tensor, a tuple of arguments or a dict of keyword arguments, on the model's device.
    ``verify=False`` leaves out the proof that the shrunk network equals the masked one.
    """
    walk, groups = analyse(model, example_inputs)
    if verify and len(groups):
        with evaluating(model):
            groups = _verified(model, walk, groups, example_inputs)
    return groups


class _BrokenError(Exception):
    """The shrunk network does not run (``module`` says where, if known), or it runs and gives something else."""

    def __init__(self, reason: str, module: str = "") -> None:
        super().__init__(reason)
        self.module = module


def _verified(model: nn.Module, walk: Walk, groups: ChannelGroups, example_inputs: Any) -> ChannelGroups:
    frozen: dict[int, str] = {}
    rng = np.random.default_rng(0)
    check = _Check(model, example_inputs)
    for test, draws in ((check.shapes, _DRAWS), (check.values, 1)):
        while len(groups):
            try:
                for _ in range(draws):
                    test(groups, _some(groups, range(len(groups)), rng))
                break
            except _BrokenError as broken:
                if test == check.shapes and not check.runs_on_meta(groups):
                    break  # not even the dense network runs without data: the numbers will tell
                culprits = _isolate(test, groups, rng) or dict.fromkeys(_suspects(groups, broken), str(broken))
                for k, reason in culprits.items():
                    _logger.info("group %s frozen: %s", groups.names[k], reason)
                    frozen.update(dict.fromkeys(groups.identities[k].tolist(), reason))
                groups = assemble(walk, model, frozen)
    return groups


def _some(groups: ChannelGroups, which: Sequence[int] | range, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Random kept units for the groups in ``which``, everything for the others.

    An odd number of them where there is a choice: code that divides a channel count should not pass by luck.
    """
    kept = []
    for k, size in enumerate(groups.sizes.tolist()):
        width = int(rng.integers(max(1, size // 3), size)) if k in which else size
        width -= width > 1 and width % 2 == 0 and k in which
        kept.append(np.sort(rng.permutation(size)[:width]))
    return kept


def _isolate(test: _Test, groups: ChannelGroups, rng: np.random.Generator) -> dict[int, str]:
    """The groups that break the network when they alone are shrunk, each with its reason, by halving."""

    def search(which: list[int]) -> dict[int, str]:
        try:
            test(groups, _some(groups, which, rng))
        except _BrokenError as broken:
            if len(which) == 1:
                return {which[0]: str(broken)}
            middle = len(which) // 2
            return search(which[:middle]) | search(which[middle:])
        return {}

    return search(list(range(len(groups))))


def _suspects(groups: ChannelGroups, broken: _BrokenError) -> list[int]:
    """Where no group breaks it alone but several do together: those that pass where it broke, or else all."""
    total = int(groups.offsets[-1])
    owner = np.repeat(np.arange(len(groups)), groups.sizes)
    here = [c.units for c in groups.cuts if f"{c.tensor}.".startswith(f"{broken.module}.")]
    here += [units for module, _, units in groups.extents if module == broken.module]
    found = sorted({k for units in here for k in owner[units[units < total]].tolist()})
    return found if broken.module and found else list(range(len(groups)))


class _Check:
    """Trying out analyses of one model: on shapes alone, which costs almost nothing, and on numbers."""

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        self.model, self.inputs = model, example_inputs
        self.random: dict[torch.dtype, tuple[nn.Module, Any]] = {}

    def runs_on_meta(self, groups: ChannelGroups) -> bool:
        """Whether the dense network runs without data at all."""
        try:
            self.shapes(groups, [np.arange(size) for size in groups.sizes])
        except _BrokenError:
            return False
        return True

    def shapes(self, groups: ChannelGroups, kept: Sequence[NDArray[np.int64]]) -> None:
        """The shrunk network runs."""
        small = shrink_to(self.model, groups, kept, device="meta")
        _forward(small, pytree.tree_map_only(Tensor, lambda t: t.to("meta"), self.inputs))

    def values(self, groups: ChannelGroups, kept: Sequence[NDArray[np.int64]]) -> None:
        """The shrunk network gives what the masked one gives, with random weights."""
        gap = float("inf")
        for dtype in (torch.float32, torch.float64):  # deep networks amplify rounding: before a no, ask in double
            dense, inputs = self._randomised(dtype)
            found = _forward(shrink_to(dense, groups, kept), inputs)  # first: it is the one that may not run
            with masked(dense, groups, kept):
                gap = difference(_forward(dense, inputs), found)
            if gap <= _TOLERANCE:
                return
        reason = f"shrinking changes what the network computes (by {gap:.1e}): its code depends on this channel count"
        raise _BrokenError(reason)

    def _randomised(self, dtype: torch.dtype) -> tuple[nn.Module, Any]:
        if dtype not in self.random:
            inputs = pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, self.inputs)
            self.random[dtype] = randomise(copy.deepcopy(self.model).to(dtype), seed=0), inputs
        return self.random[dtype]


def difference(expected: Any, found: Any) -> float:
    """Largest difference between two outputs (tensors, tuples, dicts ...) relative to the largest expected value."""
    pairs = list(zip(pytree.tree_leaves(expected), pytree.tree_leaves(found), strict=True))
    gaps = [0.0]
    for a, b in pairs:
        if isinstance(a, Tensor) and a.numel():
            if a.shape != b.shape:
                return float("inf")
            scale = max(float(a.abs().max()), 1e-30)
            gap = float((a - b).abs().max()) / scale
            gaps.append(gap if np.isfinite(gap) else float("inf"))
    return max(gaps)


def _forward(model: nn.Module, example_inputs: Any) -> Any:
    args, kwargs = as_inputs(example_inputs)
    try:
        with torch.no_grad():
            return model(*args, **kwargs)
    except Exception as error:
        names = {id(module): name for name, module in model.named_modules()}
        module, place = "", ""
        for frame, line in traceback.walk_tb(error.__traceback__):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in names:
                module = names[id(owner)]
            if not frame.f_code.co_filename.startswith(_TORCH_FOLDER) and frame.f_code.co_filename != __file__:
                place = f"{short_path(frame.f_code.co_filename)}:{line}"
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = f"{place or module}"
        raise _BrokenError(f"the code at {where} depends on this channel count ({message})", module) from error


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Random weights and statistics, in place, so that nothing agrees by being zero; activations stay near 1."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    generator = torch.Generator(device).manual_seed(seed)

    def fill(tensor: Tensor, low: float, high: float) -> None:
        tensor.uniform_(low, high, generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                fan_in = max(1, parameter[0].numel())
                fill(parameter, -((3 / fan_in) ** 0.5), (3 / fan_in) ** 0.5)
            elif name.endswith("weight") or name.endswith("gamma"):
                fill(parameter, 0.5, 1.5)
            else:
                fill(parameter, -0.3, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                fill(buffer, 0.5, 1.5)
            elif name.endswith("running_mean"):
                fill(buffer, -0.3, 0.3)
    return model
