"""What one input of a network costs, so that long operations are bounded for any network in the same way everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dsa_hw.utils.modules import device_of, evaluating

__all__ = ["Workload", "measure_workload"]

_MEMORY: Final = 2**31  # bytes of activations that recovery keeps at once
_LIVE: Final = 10  # activations of the largest size that both networks keep at once, about
_PER_VALUE: Final = 60  # multiplications that take as long as reading and writing one activation


@dataclass(frozen=True)
class Workload:
    """The forward pass of one input.

    Attributes:
        operations: Multiplications, and activations counted as those that take the same time.
        largest: Values of the largest activation.
    """

    operations: float
    largest: int

    @property
    def fitting(self) -> int:
        """How many inputs a recovery can have in memory."""
        return max(_MEMORY // (4 * _LIVE * self.largest), 1)


def measure_workload(model: nn.Module, inputs: tuple[Any, ...]) -> Workload:
    """Return the work of one input, counted, so that it does not depend on the computer.

    Args:
        model: The network; not changed.
        inputs: Its positional inputs, of any batch size.
    """
    values = [1]

    def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        if isinstance(outputs, Tensor):
            values.append(outputs.numel())

    device = device_of(model)
    moved = tuple(x.to(device) if isinstance(x, Tensor) else x for x in inputs)
    count = max(next((len(x) for x in moved if isinstance(x, Tensor) and x.ndim), 1), 1)
    handles = [m.register_forward_hook(hook) for m in model.modules()]
    # torch's counter cannot follow a parameter that needs a gradient and is passed to a module, such as a query.
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        with torch.no_grad(), evaluating(model), FlopCounterMode(display=False) as counter:
            model(*moved)
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for handle in handles:
            handle.remove()
    operations = counter.get_total_flops() / 2 + _PER_VALUE * sum(values)
    return Workload(operations / count, max(max(values) // count, 1))
