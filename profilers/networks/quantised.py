"""A network in int8 that runs in the runtime of a target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dsa_hw.errors import ProfileError
from dsa_hw.utils.modules import copy_module
from profilers.networks.onnx_export import export
from profilers.networks.quantisation import Ranges, calibrate, quantise

if TYPE_CHECKING:
    from profilers.targets import Target

__all__ = ["QuantisedNetwork", "graph_batches", "quantise_network"]


class QuantisedNetwork(nn.Module):
    """A network that was exported and quantised; ``forward`` runs it in the runtime of its target, on the CPU.

    The graph has the batch size of the example inputs: other batches are run in parts.

    Attributes:
        content: The bytes of the file: ONNX, or what its target quantises to.
        ranges: The ranges of its activations, which the scales follow from.
        precision: Scheme, and layers that stay in fp32.
    """

    def __init__(self, content: bytes, ranges: Ranges, target: Target, inputs: tuple[Any, ...]) -> None:
        """Load the file on its target.

        Raises:
            ProfileError: The target is not one in int8 that gives outputs.
        """
        super().__init__()
        loaded = target.load(content, inputs)
        if target.int8 is None or loaded.run_on is None:
            raise ProfileError(f"An int8 network needs a target in int8 that gives outputs; got {target.title}.")
        self.content, self.ranges, self.precision = content, dict(ranges), target.int8
        self._run, self._inputs = loaded.run_on, inputs

    def forward(self, *inputs: Tensor) -> Any:
        """Return what the runtime computes: a tensor, or a tuple where the network has several outputs."""
        count = len(inputs[0])
        parts = [
            self._run([x.detach().cpu().numpy() for x in batch]) for batch in graph_batches([inputs], self._inputs)
        ]
        outputs = [torch.from_numpy(np.concatenate(column)[:count]) for column in zip(*parts, strict=True)]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def graph_batches(batches: Iterable[Sequence[Tensor]], example: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield inputs in batches of the size of ``example``, the last of each batch repeated to fill it up."""
    size = len(example[0]) if example[0].ndim else 1
    for batch in batches:
        for start in range(0, len(batch[0]), size):
            part = [x[start : start + size] for x in batch]
            short = size - len(part[0])
            yield [torch.cat([x, x[-1:].expand(short, *x.shape[1:])]) for x in part] if short else part


def quantise_network(
    model: nn.Module,
    inputs: tuple[Any, ...],
    target: Target,
    *,
    batches: Iterable[Sequence[Tensor]] | None = None,
    ranges: Ranges | None = None,
) -> QuantisedNetwork:
    """Quantise a network for a target.

    Args:
        model: The network in fp32; not changed.
        inputs: Its example inputs.
        target: A target in int8.
        batches: Calibration inputs, which the ranges of activations are taken from.
        ranges: The ranges of an earlier calibration of this network, in place of ``batches``.

    Raises:
        ProfileError: The target is not in int8, or the ranges are of another network.
        ModelError: There are no calibration inputs, or an activation is not finite.
    """
    if target.int8 is None:
        raise ProfileError(f"`target` must be in int8, for example 'onnxruntime/cpu int8'; got {target.title}.")
    arguments = tuple(x.cpu() for x in inputs)
    copied = copy_module(model).cpu().eval()
    if (own := target.quantise(copied, arguments, graph_batches(batches or (), arguments), ranges)) is not None:
        return QuantisedNetwork(*own, target, arguments)
    proto = export(copied, arguments)
    if ranges is None:
        ranges = calibrate(proto, graph_batches(batches or (), arguments))
    content = bytes(quantise(proto, ranges, target.int8).SerializeToString())
    return QuantisedNetwork(content, ranges, target, arguments)
