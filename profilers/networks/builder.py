"""Build configurations of a network and load them on a target."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from dsa_hw.channels import shrink
from dsa_hw.errors import ProfileError
from dsa_hw.utils.arrays import Floats, Ints
from profilers.networks.loaded import Loadable, Loaded
from profilers.networks.onnx_export import at_precision, export, generic
from profilers.networks.onnx_narrow.template import OnnxTemplate
from profilers.networks.quantisation import calibrate, noise_like, quantise
from profilers.networks.quantised import QuantisedNetwork

if TYPE_CHECKING:
    from dsa_hw.channels import ChannelGroups
    from profilers.targets import Target

__all__ = ["ConfigurationBuilder", "loadable_module", "loadables"]

_log = logging.getLogger(__name__)

# Largest accepted relative difference between outputs of a narrowed graph and of the shrunk network, by precision.
_AGREEMENT = {"fp32": 1e-3, "fp16": 5e-2}


def loadable_module(model: nn.Module, inputs: tuple[Any, ...], target: Target) -> Loadable:
    """Prepare one network, unchanged, for a target. It is exported once, however often it is loaded.

    Args:
        model: The network; a copy in evaluation mode is loaded.
        inputs: Its example inputs.
        target: Where it will run.

    Returns:
        The network, ready to be loaded.
    """
    if isinstance(model, QuantisedNetwork):
        arguments = tuple(x.cpu() for x in inputs)
        return Loadable(lambda: target.load(model.content, arguments), len(model.content))
    module, arguments = at_precision(generic(model).cpu(), tuple(x.cpu() for x in inputs), target.precision)
    if target.artefact == "onnx":
        content = _onnx(module, arguments, target)
        return Loadable(lambda: target.load(content, arguments), len(content))
    size = sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))
    return Loadable(lambda: target.load(copy.deepcopy(module), arguments), size)  # every copy has its own weights


def loadables(model: nn.Module, inputs: tuple[Any, ...], targets: Mapping[str, Target]) -> dict[str, Loadable]:
    """Prepare one network for several targets that load ONNX, in fp32 or int8; it is exported once.

    Args:
        model: The network.
        inputs: Its example inputs.
        targets: The targets by name.

    Returns:
        The network for each target.
    """
    arguments = tuple(x.cpu() for x in inputs)
    proto = export(generic(model).cpu(), arguments)
    ranges = calibrate(proto, [noise_like(arguments)])

    def one(target: Target) -> Loadable:
        content = bytes((quantise(proto, ranges, target.int8) if target.int8 else proto).SerializeToString())
        return Loadable(lambda: target.load(content, arguments), len(content))

    return {name: one(target) for name, target in targets.items()}


class ConfigurationBuilder:
    """Builds configurations of one network for one target.

    Where possible, the network is exported once and its graph is narrowed for every configuration. Otherwise each
    configuration is shrunk, and exported if the target needs that, which is slower.

    Attributes:
        how: "narrowed", "shrunk", or "exported one by one" with the reason.
        size: Bytes of the parameters and buffers of the dense network.
    """

    def __init__(self, model: nn.Module, groups: ChannelGroups, inputs: tuple[Any, ...], target: Target) -> None:
        self.groups = groups
        self.target = target
        cpu = tuple(x.cpu() for x in inputs)
        self.model, self.inputs = at_precision(generic(model).cpu(), cpu, target.precision)
        if target.artefact == "onnx":
            self._template: Any = OnnxTemplate(self.model, groups, self.inputs, target.int8)
        else:
            self._template = target.template(self.model, groups, self.inputs)
        self.how = "shrunk" if self._template is None else "narrowed"
        self.size = sum(t.numel() * t.element_size() for t in (*self.model.parameters(), *self.model.buffers()))

    def for_target(self, target: Target) -> ConfigurationBuilder:
        """Return a builder for another target with the same artefacts.

        Nothing is exported again.
        """
        other = copy.copy(self)
        other.target = target
        return other

    def kept(self, widths: Sequence[int]) -> list[Ints]:
        """Return the first channels of every group.

        Which channels are kept does not affect the time.
        """
        return [np.arange(w, dtype=np.int64) for w in self.groups.check_widths(np.asarray(widths))]

    def artefact(self, kept: Sequence[Ints]) -> Any:
        """Return what the target loads for the network that keeps ``kept``."""
        if self._template is not None:
            try:
                return self._template.make(kept)
            except ProfileError as error:
                self._stop_narrowing(str(error))
        small = shrink(self.model, self.groups, kept)
        if self.target.artefact == "onnx":
            return _onnx(small, self.inputs, self.target)
        return small

    def load(self, widths: Sequence[int]) -> Loaded:
        """Return a configuration, ready to run."""
        return self.target.load(self.artefact(self.kept(widths)), self.inputs)

    def loadable(self, widths: Sequence[int]) -> Loadable:
        """Return a configuration that is built and loaded when it is needed; its size is a rough one."""
        share = float(np.mean((np.asarray(widths) / np.asarray(self.groups.sizes)) ** 2)) if len(widths) else 1.0
        return Loadable(lambda: self.load(widths), int(share * self.size))

    def loadable_kept(self, kept: Sequence[Ints]) -> Loadable:
        """Return the network that keeps ``kept``, ready to be loaded; its graph is built once."""
        artefact = self.artefact(kept)
        if isinstance(artefact, bytes):
            return Loadable(lambda: self.target.load(artefact, self.inputs), len(artefact))
        rough = self.loadable([len(k) for k in kept]).size
        if not isinstance(artefact, nn.Module):  # a file of the target's own, which loading does not change
            return Loadable(lambda: self.target.load(artefact, self.inputs), rough)
        return Loadable(lambda: self.target.load(copy.deepcopy(artefact), self.inputs), rough)  # with its own weights

    def check(self, seed: int = 0, rounds: int = 2) -> float | None:
        """Compare outputs of narrowed graphs and of shrunk networks, for int8 before they are quantised.

        The kept channels are random. A difference above rounding ends narrowing, with a warning.

        Returns:
            The largest relative difference; None where nothing is narrowed or the target gives no outputs.
        """
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
            target = self.target
            if target.int8 is not None:  # its own error would hide one of narrowing
                target.load(artefact, self.inputs)
                artefact, target = self._template.plain.make(kept), target.at("fp32")
            loaded = target.load(artefact, self.inputs)
            if loaded.outputs is None:
                return None
            with torch.no_grad():
                expected = _flat(shrink(self.model, self.groups, kept)(*self.inputs))
            for ours, theirs in zip(loaded.outputs(), expected, strict=True):
                scale = float(np.abs(theirs).max()) or 1.0
                worst = max(worst, float(np.abs(ours.astype(np.float64) - theirs).max()) / scale)
        if not worst <= _AGREEMENT["fp16" if self.target.precision == "fp16" else "fp32"]:
            self._stop_narrowing(f"Outputs of the narrowed graph differ by {worst:.1e} from the shrunk network.")
        return worst

    def _stop_narrowing(self, reason: str) -> None:
        _log.warning("%s Every configuration is exported separately, which is slower but equally accurate.", reason)
        self._template = None
        self.how = f"exported one by one: {reason}"


def _onnx(module: nn.Module, inputs: tuple[Any, ...], target: Target) -> bytes:
    """Export a network for a target: in int8 with the ranges of noise, since time does not depend on them."""
    proto = export(module, inputs)
    if target.int8 is not None:
        proto = quantise(proto, calibrate(proto, [noise_like(inputs)]), target.int8)
    return bytes(proto.SerializeToString())


def _flat(outputs: Any) -> list[Floats]:
    return [t.double().numpy() for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
