"""A look-up table of operation latencies as a device.

The device is ``table:pi3.csv`` or ``table:pi3.csv.gz?outside=interpolate``. The time of a network is the sum of the
table's entries for its convolutions and linear layers. Operations without weights (activations, normalisation,
additions, pooling) are assumed to be part of these entries, since tables measure an operation with what is fused to it.
Nothing is run; certificates say that the time is an estimate from the table.

Options: ``outside=refuse`` (default) or ``outside=interpolate`` selects what happens at channel counts between those of
the table; channel counts beyond its range are always an error. ``layers=FILE.json`` maps kinds of the table to patterns
of layer names, for tables whose kinds overlap or have no geometry.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dsa_hw.errors import ProfileError
from dsa_hw.utils.documents import read_json
from dsa_hw.utils.modules import evaluating
from profilers.networks.chains import Layer
from profilers.targets.base import Loaded, Target, register
from profilers.targets.latency_table import LatencyTable

__all__ = ["TableTarget"]

_OUTSIDE = ("refuse", "interpolate")


@register("table")
class TableTarget(Target):
    """A target whose times are sums of a look-up table's entries."""

    def __init__(self, device: str = "table:", *, precision: str = "fp32", threads: int = 1) -> None:
        super().__init__(device, precision=precision, threads=threads)
        path, _, query = device.removeprefix("table:").partition("?")
        options = dict(parse_qsl(query, keep_blank_values=True))
        unknown = sorted(set(options) - {"outside", "layers"})
        outside = options.get("outside", "refuse")
        if unknown or outside not in _OUTSIDE or not path:
            wrong = f"option {unknown[0]!r}" if unknown else f"outside={outside!r}" if path else "no file"
            raise ProfileError(
                "A table device must be table:PATH.csv, optionally followed by ?outside=refuse or ?outside=interpolate "
                f"and &layers=FILE.json; got {wrong} in {device!r}."
            )
        if precision != "fp32" or threads != 1:
            raise ProfileError(
                "A table has the precision and the threads that it was measured with. Omit --precision and --threads; "
                f"got {precision} and {threads}."
            )
        self._interpolate = outside == "interpolate"
        self._layers = _mapping(options["layers"]) if "layers" in options else None
        self.table = LatencyTable.read(Path(path), self._layers)
        self.estimated = f"estimated from look-up table {Path(path).name}"

    def load(self, artefact: nn.Module, inputs: tuple[Any, ...]) -> Loaded:
        """Look up every convolution and linear layer that one forward pass calls."""
        if int(inputs[0].shape[0]) != 1:
            raise ProfileError(f"Table {self.table.path.name} is for batch size 1; got {inputs[0].shape[0]}.")
        seconds = [
            self.table.seconds(name, layer, self._interpolate) for name, layer in called_layers(artefact, inputs)
        ]
        if not seconds:
            raise ProfileError("A table needs a network with convolutions or linear layers; this one has none.")
        return Loaded.exact(sum(seconds))

    def known_grid(self) -> int:
        """Return the step of the table's channel counts."""
        return self.table.step

    def describe(self) -> dict[str, str]:
        """Return the hash of the table, and how it is read."""
        return {
            "table": f"{self.table.path.name} sha256 {self.table.digest}",
            "outside": "interpolate" if self._interpolate else "refuse",
            "layers": json.dumps(self._layers, sort_keys=True) if self._layers else "by geometry",
        }

    @property
    def title(self) -> str:
        """The device alone: precision and threads are the table's own."""
        return self.name


def called_layers(model: nn.Module, inputs: tuple[Any, ...]) -> list[tuple[str, Layer]]:
    """Return the convolutions and linear layers of one forward pass.

    The result has (name, layer) in the order of the calls.

    Raises:
        ProfileError: Other operations of the network multiply too; a table would silently omit them.
    """
    found: list[tuple[str, Layer]] = []
    counted = 0

    def record(name: str) -> Callable[[nn.Module, tuple[Any, ...], torch.Tensor], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            nonlocal counted
            if isinstance(module, nn.Linear) and args[0].ndim == 2:
                layer = Layer(module.in_features, module.out_features)
            elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                sides = (tuple(args[0].shape[2:]), tuple(module.kernel_size), tuple(module.stride))
                padding = (0,) * len(sides[1])  # tables do not have it; input size and stride are enough
                channels = (module.in_channels, module.out_channels)
                layer = Layer(*channels, *sides, padding, tuple(module.dilation), module.groups)
            else:
                return
            found.append((name, layer))
            counted += 2 * output.numel() * module.weight[0].numel()

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in model.named_modules()]
    try:
        with evaluating(model), torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    if counter.get_total_flops() != counted:
        raise ProfileError(
            f"This network has {counter.get_total_flops()} FLOPs, of which its convolutions and linear layers on "
            f"vectors have {counted}. A table does not contain the rest (matrix products, transposed convolutions, "
            "functional calls). Measure on a device."
        )
    return found


def _mapping(path: str) -> dict[str, Any]:
    found = read_json(path, f"layers={path}", error=ProfileError)
    patterns = list(found.values()) if isinstance(found, dict) else [None]
    flat = [p for pattern in patterns for p in (pattern if isinstance(pattern, list) else [pattern])]
    if not all(isinstance(pattern, str) for pattern in flat):
        raise ProfileError(
            f"layers={path} must be a JSON object {{kind: pattern of layer names, or a list of patterns}}."
        )
    return found
