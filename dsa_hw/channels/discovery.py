"""``find_groups``: analyse a network, then verify the analysis on the network itself.

The rules follow tensors, but ``forward`` can contain a channel count as a plain number, which a trace does not show.
Therefore a copy with random weights is shrunk to random widths. It must run, and its outputs must equal those of the
masked copy. Groups that violate this are frozen; the reason names the line of code.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dsa_hw.channels.assemble import analyse, assemble
from dsa_hw.channels.groups import ChannelGroups
from dsa_hw.channels.masking import masked
from dsa_hw.channels.rewriting import UnresizableError, rewrite
from dsa_hw.channels.sizes import parts
from dsa_hw.channels.surgery import shrink_to
from dsa_hw.channels.trace import failing_code
from dsa_hw.channels.walk import Walk
from dsa_hw.utils.arrays import Bools, Ints
from dsa_hw.utils.inputs import as_inputs
from dsa_hw.utils.modules import copy_module, device_of, evaluating
from dsa_hw.utils.text import first_line

__all__ = ["difference", "find_groups", "randomise"]

_Test = Callable[[ChannelGroups, Sequence[Ints]], None]
_logger = logging.getLogger(__name__)
_TOLERANCE = 1e-4
_DRAWS = 2  # of random widths; runs on shapes without data are cheap


def find_groups(model: nn.Module, example_inputs: Any, *, verify: bool = True) -> ChannelGroups:
    """Find the channel groups of a model that ``torch.export`` can trace.

    The model is not changed and is not run.

    Args:
        model: The network, in any mode and on any device.
        example_inputs: A tensor, a tuple of positional arguments or a dict of keyword arguments, on the device of the
            model.
        verify: Whether to check on a copy with random weights that shrunk and masked networks give equal outputs.
            Groups that fail the check are frozen. Without it, code that contains a channel count as a number can
            make ``shrink`` return a network that fails or computes something else.

    Returns:
        The channel groups; ``frozen`` lists what cannot be removed, with the reason.

    Raises:
        TraceError: The model cannot be copied, does not run on ``example_inputs``, or cannot be exported.
        ModelError: ``example_inputs`` has another type.

    Example:
        >>> import torch
        >>> from dsa_hw import find_groups
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
        >>> groups = find_groups(model, torch.randn(1, 3, 16, 16))
        >>> groups.names, groups.sizes.tolist()
        (('0',), [8])
        >>> [(frozen.name, frozen.reason) for frozen in groups.frozen]
        [('2', 'network output')]
    """
    walk, groups = analyse(model, example_inputs)
    if verify and len(groups):
        with evaluating(model):
            groups = _verified(model, walk, groups, example_inputs)
    return groups


class _BrokenError(Exception):
    """The shrunk network fails (in ``module``, where known) or its outputs differ from the masked network's."""

    def __init__(self, reason: str, module: str = "") -> None:
        super().__init__(reason)
        self.module = module
        self.kept: Sequence[Ints] = ()


def _verified(model: nn.Module, walk: Walk, groups: ChannelGroups, example_inputs: Any) -> ChannelGroups:
    frozen: dict[int, str] = {}
    rng = np.random.default_rng(0)
    check = _Check(model, example_inputs)
    tried: set[str] = set()
    for test, draws in ((check.shapes, _DRAWS), (check.values, 1)):
        while len(groups):
            try:
                for _ in range(draws):
                    test(groups, _some(groups, range(len(groups)), rng))
                break
            except _BrokenError as broken:
                if test == check.shapes and not check.runs_on_meta(groups):
                    break  # the dense network does not run without data either: leave it to check.values
                if _rewritten(model, walk, groups, example_inputs, check.origins(groups, broken), tried):
                    continue
                suspects = _suspects(groups, broken)
                culprits = _isolate(test, groups, rng, suspects) or _isolate(test, groups, rng, range(len(groups)))
                culprits = _alike(model, groups, culprits, broken) or dict.fromkeys(suspects, str(broken))
                for k, reason in culprits.items():
                    _logger.info("Group %s is frozen: %s", groups.names[k], reason)
                    frozen.update(dict.fromkeys(groups.identities[k].tolist(), reason))
                groups = assemble(walk, model, frozen)
    return groups


def _rewritten(
    model: nn.Module, walk: Walk, groups: ChannelGroups, inputs: Any, origins: Sequence[str], tried: set[str]
) -> bool:
    """Replace a module that may hold a channel count, and all of its class, by their graphs.

    That is the first of ``origins``; then, if that did not help, the one around it.

    Returns:
        Whether there was a module left to try.
    """
    path = next((part for part in origins[:2] if part not in tried), "")
    if not path:
        return False
    kind = type(model.get_submodule(path))
    alike = [name for name, module in model.named_modules() if type(module) is kind and name not in tried and name]
    tried.update(alike)
    found = rewrite(model, walk.trace, inputs, alike)
    for name in alike:
        for inner in [n for n in walk.rewrites if f"{n}.".startswith(f"{name}.")]:
            if name in found:
                del walk.rewrites[inner]
    walk.rewrites.update(found)
    return True


def _ancestors(path: str) -> Iterator[str]:
    """Yield a module and those around it, without the network itself."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _can_be_rewritten(module: nn.Module) -> bool:
    """Return whether a module has code of its own: it is no container, and no layer of torch."""
    if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return False
    return not type(module).__module__.startswith("torch.nn.") or any(True for _ in module.children())


def _some(groups: ChannelGroups, which: Sequence[int] | range, rng: np.random.Generator) -> list[Ints]:
    """Draw random kept units for the groups in ``which``; keep all units of the others.

    The number of kept units is odd where possible, so that code that divides a channel count fails here.
    """
    kept = []
    for k, size in enumerate(groups.sizes.tolist()):
        width = int(rng.integers(max(1, size // 3), size)) if k in which else size
        width -= width > 1 and width % 2 == 0 and k in which
        kept.append(np.sort(rng.permutation(size)[:width]))
    return kept


def _isolate(test: _Test, groups: ChannelGroups, rng: np.random.Generator, among: Sequence[int]) -> dict[int, str]:
    """Find by bisection the groups that break the network when shrunk alone, each with its reason."""

    def search(which: Sequence[int]) -> dict[int, str]:
        try:
            test(groups, _some(groups, which, rng))
        except _BrokenError as broken:
            if len(which) == 1:
                return {which[0]: str(broken)}
            middle = len(which) // 2
            return search(which[:middle]) | search(which[middle:])
        return {}

    return search(among)


def _alike(model: nn.Module, groups: ChannelGroups, culprits: dict[int, str], broken: _BrokenError) -> dict[int, str]:
    """Add the groups that modules of the same class create in the same place: they fail in the same line of code."""
    if not broken.module or not culprits:
        return culprits
    kind = type(model.get_submodule(broken.module))
    places = {
        member.removeprefix(broken.module): reason
        for k, reason in culprits.items()
        for member in groups.members[k]
        if member.startswith(f"{broken.module}.")
    }
    alike = [name for name, module in model.named_modules() if type(module) is kind]
    names = {f"{name}{place}": reason for name in alike for place, reason in places.items()}
    found = {k: names[m] for k, members in enumerate(groups.members) for m in members if m in names}
    return {**found, **culprits}


def _suspects(groups: ChannelGroups, broken: _BrokenError) -> list[int]:
    """Return the groups with channels in the module that failed, or all groups where it is not known."""
    total = int(groups.offsets[-1])
    owner = np.repeat(np.arange(len(groups)), groups.sizes)
    here = [c.units for c in groups.cuts if f"{c.tensor}.".startswith(f"{broken.module}.")]
    here += [units for module, _, units in groups.extents if module == broken.module]
    found = sorted({k for units in here for k in owner[units[units < total]].tolist()})
    return found if broken.module and found else list(range(len(groups)))


def _expected_inputs(groups: ChannelGroups, path: str, mask: Bools) -> set[tuple[int, ...]]:
    """Return the shapes of all tensors that the operations of a module take from outside of it."""
    walk = groups.counted.walk
    inside = {o.name: o for o in walk.trace.operations if f"{o.module}.".startswith(f"{path}.")}
    outside = {node.name for o in inside.values() for node in o.node.all_input_nodes} - inside.keys()
    given = [value for name in outside - walk.trace.tensors.keys() for value in parts(walk.values[name])]
    return {groups.counted.shape(value, mask) for value in given}


class _Check:
    """Checks of channel groups of one model: on shapes without data, which is cheap, and on values."""

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        self.model, self.inputs = model, example_inputs
        self.random: dict[torch.dtype, tuple[nn.Module, Any]] = {}

    def runs_on_meta(self, groups: ChannelGroups) -> bool:
        """Return whether the dense network runs without data."""
        try:
            self.shapes(groups, [np.arange(size) for size in groups.sizes])
        except _BrokenError:
            return False
        return True

    def shapes(self, groups: ChannelGroups, kept: Sequence[Ints]) -> None:
        """Check that the shrunk network runs."""
        try:
            _forward(_shrunk(self.model, groups, kept, device="meta"), self._empty_inputs())
        except _BrokenError as broken:
            broken.kept = kept
            raise

    def origins(self, groups: ChannelGroups, broken: _BrokenError) -> list[str]:
        """Return the modules around a failure that were called with inputs of the expected shapes, innermost first.

        A layer that fails because its input is wrong has no fault; the code that called it has.
        """
        around = list(_ancestors(broken.module))
        if broken.kept:
            found = self._input_shapes(groups, broken.kept, around)
            mask = groups.flat_mask(broken.kept)
            around = [path for path in around if found.get(path, set()) <= _expected_inputs(groups, path, mask)]
        return [path for path in around if _can_be_rewritten(self.model.get_submodule(path))]

    def _input_shapes(
        self, groups: ChannelGroups, kept: Sequence[Ints], paths: Sequence[str]
    ) -> dict[str, set[tuple[int, ...]]]:
        """Run the shrunk network, which fails; return the shapes of the tensors that each module was called with."""
        found: dict[str, set[tuple[int, ...]]] = {}

        def record(path: str, inputs: Any) -> None:
            found[path] = {tuple(x.shape) for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)}

        with contextlib.suppress(_BrokenError):
            small = _shrunk(self.model, groups, kept, device="meta")
            for path in paths:
                small.get_submodule(path).register_forward_pre_hook(
                    lambda _, args, kwargs, path=path: record(path, (args, kwargs)), with_kwargs=True
                )
            _forward(small, self._empty_inputs())
        return found

    def _empty_inputs(self) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: t.to("meta"), self.inputs)

    def values(self, groups: ChannelGroups, kept: Sequence[Ints]) -> None:
        """Check that shrunk and masked network give equal outputs with random weights."""
        gap = float("inf")
        for dtype in (torch.float32, torch.float64):  # deep networks amplify rounding: repeat in double
            dense, inputs = self._randomised(dtype)
            found = _forward(_shrunk(dense, groups, kept), inputs)  # first, because it may fail
            with masked(dense, groups, kept):
                gap = difference(_forward(dense, inputs), found)
            if gap <= _TOLERANCE:
                return
        reason = f"shrinking changes the outputs (relative difference {gap:.1e}): code depends on this channel count"
        raise _BrokenError(reason)

    def _randomised(self, dtype: torch.dtype) -> tuple[nn.Module, Any]:
        if dtype not in self.random:
            inputs = pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, self.inputs)
            self.random[dtype] = randomise(copy_module(self.model).to(dtype), seed=0), inputs
        return self.random[dtype]


def difference(expected: Any, found: Any) -> float:
    """Return the largest difference between two outputs, relative to the largest expected value.

    Outputs are tensors or nested tuples, lists and dicts of tensors; different shapes give infinity.
    """
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


def _shrunk(model: nn.Module, groups: ChannelGroups, kept: Sequence[Ints], device: str | None = None) -> nn.Module:
    try:
        return shrink_to(model, groups, kept, device)
    except UnresizableError as error:
        raise _BrokenError(f"the code depends on this channel count: {error}", error.module) from error


def _forward(model: nn.Module, example_inputs: Any) -> Any:
    args, kwargs = as_inputs(example_inputs)
    try:
        with torch.no_grad():
            return model(*args, **kwargs)
    except Exception as error:
        module, place = failing_code(error, model)
        reason = f"the code at {place or module} depends on this channel count ({first_line(error)})"
        raise _BrokenError(reason, module) from error


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Fill weights and statistics with random values in place; activations keep a size near 1."""
    generator = torch.Generator(device_of(model)).manual_seed(seed)

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
