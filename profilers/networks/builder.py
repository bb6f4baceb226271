"""From a configuration to a network that is ready to run on a target."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dsa_hw.errors import ModelError, ProfileError
from profilers.networks.onnx_export import at_precision, export, generic
from profilers.networks.onnx_narrow.template import Template
from profilers.targets import Loaded, Target

if TYPE_CHECKING:
    from dsa_hw.channels import ChannelGroups

__all__ = ["Maker", "as_inputs", "load_module"]

_log = logging.getLogger(__name__)

_AGREEMENT = {"fp32": 1e-3, "fp16": 5e-2}


def as_inputs(example_inputs: Any) -> tuple[Any, ...]:
    """Example inputs as a tuple of positional arguments."""
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,)
    inputs = tuple(example_inputs)
    if not inputs or not all(isinstance(x, torch.Tensor) for x in inputs):
        raise ModelError(
            f"example_inputs must be a tensor or a tuple of tensors, got {[type(x).__name__ for x in inputs]}"
        )
    return inputs


def load_module(model: nn.Module, inputs: tuple[Any, ...], target: Target) -> Loaded:
    """One network as it is, ready to run on ``target``."""
    module, arguments = at_precision(generic(model).cpu(), tuple(x.cpu() for x in inputs), target.precision)
    if target.artefact == "onnx":
        return target.load(bytes(export(module, arguments).SerializeToString()), arguments)
    return target.load(module, arguments)


class Maker:
    """Makes configurations of one network for one target: by narrowing an ONNX graph, or by shrinking the module.

    ``how`` says which; where a graph cannot be narrowed it is the slow way (shrink and export each), with the reason.
    """

    def __init__(self, model: nn.Module, groups: ChannelGroups, inputs: tuple[Any, ...], target: Target) -> None:
        self.groups = groups
        self.target = target
        cpu = tuple(x.cpu() for x in inputs)
        self.model, self.inputs = at_precision(generic(model).cpu(), cpu, target.precision)
        if target.artefact == "onnx":
            self._template: Any = Template(self.model, groups, self.inputs)
        else:
            self._template = target.template(self.model, groups, self.inputs)
        self.how = "shrunk" if self._template is None else "narrowed"
        self.size = sum(t.numel() * t.element_size() for t in (*self.model.parameters(), *self.model.buffers()))

    def towards(self, target: Target) -> Maker:
        """The same for another target that takes the same artefacts; nothing is exported again."""
        other = copy.copy(self)
        other.target = target
        return other

    def kept(self, widths: Sequence[int]) -> list[NDArray[np.int64]]:
        """The units that a configuration keeps: which ones does not change its time, so the first ones."""
        return [np.arange(w, dtype=np.int64) for w in self.groups.check_widths(np.asarray(widths))]

    def artefact(self, kept: Sequence[NDArray[np.int64]]) -> Any:
        """What the target loads, for kept units."""
        from dsa_hw.channels import shrink

        if self._template is not None:
            try:
                return self._template.make(kept)
            except ProfileError as error:
                self._give_up(str(error))
        small = shrink(self.model, self.groups, kept)
        if self.target.artefact == "onnx":
            return bytes(export(small, self.inputs).SerializeToString())
        return small

    def load(self, widths: Sequence[int]) -> Loaded:
        """A configuration, ready to run."""
        return self.target.load(self.artefact(self.kept(widths)), self.inputs)

    def check(self, seed: int = 0, rounds: int = 2) -> float | None:
        """Largest relative difference between narrowed graphs and really shrunk networks, for random kept units.

        A difference above rounding switches to the slow way, with a warning. None where nothing is narrowed, or where
        the target does not show outputs.
        """
        from dsa_hw.channels import shrink

        rng = np.random.default_rng(seed)
        worst = 0.0
        for _ in range(rounds):
            if self._template is None:
                return None
            widths = [int(rng.integers(max(1, c // 4), c + 1)) for c in self.groups.sizes]
            kept = [np.sort(rng.permutation(int(c))[:w]) for c, w in zip(self.groups.sizes, widths, strict=True)]
            artefact = self.artefact(kept)
            if self._template is None:
                return None
            loaded = self.target.load(artefact, self.inputs)
            if loaded.outputs is None:
                return None
            with torch.no_grad():
                expected = _flat(shrink(self.model, self.groups, kept)(*self.inputs))
            for ours, theirs in zip(loaded.outputs(), expected, strict=True):
                scale = float(np.abs(theirs).max()) or 1.0
                worst = max(worst, float(np.abs(ours.astype(np.float64) - theirs).max()) / scale)
        if not worst <= _AGREEMENT[self.target.precision]:
            self._give_up(f"the narrowed graph gives outputs that differ by {worst:.1e} from the shrunk network")
        return worst

    def _give_up(self, reason: str) -> None:
        _log.warning("%s. Every configuration is exported by itself: slower, and as right", reason)
        self._template = None
        self.how = f"exported one by one: {reason}"


def _flat(outputs: Any) -> list[NDArray[np.float64]]:
    from torch.utils import _pytree as pytree

    return [t.double().numpy() for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
