"""A table of operation latencies as a device: ``table:pi3.csv``, ``table:pi3.csv.gz?outside=interpolate``.

The time of a network is the sum of the table's entries for its convolutions and linear layers. What has no weights
(activations, normalisation, additions, pooling) is taken to be in the entries: tables measure an operation with what is
fused to it. Nothing is run, and the certificate says that it is the table's word.

Options: ``outside=refuse`` (default) or ``interpolate`` says what to do about channel counts between those that the
table has; beyond its ends it is always refused. ``layers=FILE.json`` maps kinds of the table to patterns of layer
names, for tables whose kinds overlap or have no geometry.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import torch
from torch import nn

from dsa_hw.errors import ProfileError
from profilers.networks.chains import Layer
from profilers.targets.base import Loaded, Target, register
from profilers.targets.latency_table import LatencyTable

__all__ = ["TableTarget"]

_OUTSIDE = ("refuse", "interpolate")


@register("table")
class TableTarget(Target):
    """The sum of a table's entries."""

    def __init__(self, device: str = "table:", *, precision: str = "fp32", threads: int = 1) -> None:
        super().__init__(device, precision=precision, threads=threads)
        path, _, query = device.removeprefix("table:").partition("?")
        options = dict(parse_qsl(query, keep_blank_values=True))
        unknown = sorted(set(options) - {"outside", "layers"})
        outside = options.get("outside", "refuse")
        if unknown or outside not in _OUTSIDE or not path:
            wrong = f"option {unknown[0]!r}" if unknown else f"outside={outside!r}" if path else "no file"
            raise ProfileError(
                f"device {device!r}: {wrong} is not understood; write table:PATH.csv, and behind it ?outside=refuse or "
                "?outside=interpolate and &layers=FILE.json"
            )
        if precision != "fp32" or threads != 1:
            raise ProfileError(
                f"device {device!r} has the precision and the threads that its table was measured with; leave "
                "--precision and --threads out"
            )
        self._interpolate = outside == "interpolate"
        self._layers = _mapping(options["layers"]) if "layers" in options else None
        self.table = LatencyTable.read(Path(path), self._layers)
        self.estimated = f"estimated from look-up table {Path(path).name}"

    def load(self, artefact: nn.Module, inputs: tuple[Any, ...]) -> Loaded:
        """Look up every convolution and linear layer that one forward pass meets."""
        if int(inputs[0].shape[0]) != 1:
            raise ProfileError(f"the table {self.table.path.name} is for batch 1, {inputs[0].shape[0]} was asked for")
        seconds = [self.table.seconds(name, layer, self._interpolate) for name, layer in met(artefact, inputs)]
        if not seconds:
            raise ProfileError("this network has no convolution and no linear layer, so a table says nothing about it")
        return Loaded.exact(sum(seconds))

    def known_grid(self) -> int:
        """The step of the table: widths in between are not in it."""
        return self.table.step

    def describe(self) -> dict[str, str]:
        """The content of the table, and how it is read."""
        return {
            "table": f"{self.table.path.name} sha256 {self.table.digest}",
            "outside": "interpolate" if self._interpolate else "refuse",
            "layers": json.dumps(self._layers, sort_keys=True) if self._layers else "by geometry",
        }

    @property
    def title(self) -> str:
        """The device as it was written: precision and threads are the table's own."""
        return self.name


def met(model: nn.Module, inputs: tuple[Any, ...]) -> list[tuple[str, Layer]]:
    """(name, layer) of the convolutions and linear layers in the order of one forward pass, repetitions included.

    `ProfileError` where something else multiplies: a table would leave it out without a word.
    """
    from torch.utils.flop_counter import FlopCounterMode

    found: list[tuple[str, Layer]] = []
    counted = 0

    def remember(name: str) -> Callable[[nn.Module, tuple[Any, ...], torch.Tensor], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            nonlocal counted
            if isinstance(module, nn.Linear) and args[0].ndim == 2:
                layer = Layer(module.in_features, module.out_features)
            elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                sides = (tuple(args[0].shape[2:]), tuple(module.kernel_size), tuple(module.stride))
                padding = (0,) * len(sides[1])  # no table has it; the size that goes in and the stride are enough
                channels = (module.in_channels, module.out_channels)
                layer = Layer(*channels, *sides, padding, tuple(module.dilation), module.groups)
            else:
                return
            found.append((name, layer))
            counted += 2 * output.numel() * module.weight[0].numel()

        return hook

    handles = [module.register_forward_hook(remember(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model.eval()(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    if counter.get_total_flops() != counted:
        raise ProfileError(
            f"this network does {counter.get_total_flops()} FLOPs, its convolutions and linear layers on vectors do "
            f"{counted}: the rest (matrix products, transposed convolutions, functional calls) is in no table of "
            "operations; measure on a device"
        )
    return found


def _mapping(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ProfileError(f"layers={path} cannot be read ({error}); write {{kind: pattern of layer names}}") from error
    if not isinstance(found, dict) or not all(isinstance(v, (str, list)) for v in found.values()):
        raise ProfileError(f"layers={path} must be a JSON object: {{kind: pattern of layer names, or a list of them}}")
    return found
