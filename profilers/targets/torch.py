"""Eager PyTorch on the CPU, on CUDA (timed with events) and on MPS."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dsa_hw.utils.arrays import Floats
from profilers.targets.base import Loaded, Target, register

__all__ = ["Torch", "cuda_clock"]


def cuda_clock(once: Callable[[], object], device: torch.device, stream: Any = None) -> Callable[[int], Floats]:
    """Return a clock made of CUDA events.

    It times n runs between n + 1 events of one stream and synchronises once at the end. Launches are queued ahead, so
    that each interval is the time of the device. It includes waits for a host that cannot launch fast enough, as in
    deployment.
    """

    def clock(n: int) -> Floats:
        with torch.cuda.device(device):
            current = stream if stream is not None else torch.cuda.current_stream()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
            torch.cuda.synchronize()
            events[0].record(current)
            for event in events[1:]:
                once()
                event.record(current)
            torch.cuda.synchronize()
            return np.asarray([a.elapsed_time(b) for a, b in itertools.pairwise(events)]) * 1e-3

    return clock


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

        if device.type == "cuda":
            return Loaded(forward, clock=cuda_clock(forward, device), outputs=outputs)
        if device.type == "mps":

            def synchronised() -> None:
                forward()
                torch.mps.synchronize()

            return Loaded(synchronised, outputs=outputs)
        return Loaded(forward, outputs=outputs)

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
