"""Eager PyTorch on the CPU and on any accelerator that torch has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from profilers.targets.accelerator import device_clock
from profilers.targets.base import Loaded, Target, register

__all__ = ["Torch"]


@register("torch")
class Torch(Target):
    """An ``nn.Module`` run eagerly in inference mode."""

    def load(self, artefact: nn.Module, inputs: tuple[Any, ...]) -> Loaded:
        """Move the module and its inputs to the device; one run is one forward pass."""
        device = torch.device(self.device)
        on_device = tuple(x.to(device) for x in inputs)
        module = self.compiled(artefact.eval().to(device), on_device)

        @torch.inference_mode()
        def forward() -> object:
            return module(*on_device)

        def outputs() -> list[NDArray[Any]]:
            result = forward()
            values = result if isinstance(result, (tuple, list)) else (result,)
            return [v.float().cpu().numpy() for v in values if isinstance(v, torch.Tensor)]

        if device.type == "cpu":
            return Loaded(forward, outputs=outputs)
        return Loaded(forward, clock=device_clock(forward, device), outputs=outputs)

    def compiled(self, module: nn.Module, inputs: tuple[Any, ...]) -> Callable[..., object]:
        """Return what is called for one run; `Compile` overrides it."""
        return module

    def describe(self) -> dict[str, str]:
        """Return the build of torch and the settings that select kernels."""
        found = {"torch": torch.__version__, "torch threads": str(self.threads)}
        if self.device == "cpu":
            found["torch cpu capability"] = torch.backends.cpu.get_cpu_capability()
        elif self.device.startswith("cuda"):
            properties = torch.cuda.get_device_properties(torch.device(self.device))
            found |= {
                "gpu": properties.name,
                "cuda": str(torch.version.cuda),
                "cudnn": str(torch.backends.cudnn.version()),
                "cudnn benchmark": str(torch.backends.cudnn.benchmark),
                "tf32": str(torch.backends.cudnn.allow_tf32),
            }
            if torch.version.hip:
                found["rocm"] = str(torch.version.hip)
        else:
            backend = torch.get_device_module(torch.device(self.device))
            found["accelerator"] = (
                str(backend.get_device_name(torch.device(self.device)))
                if hasattr(backend, "get_device_name")
                else self.device
            )
        return found

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Set torch's thread count, which is process-wide, and restore it."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
