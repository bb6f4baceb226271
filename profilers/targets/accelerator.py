"""Accelerators of torch (CUDA, ROCm, XPU, MPS and others): are they there, and how long do their runs take."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dsa_hw.errors import MissingDependencyError
from dsa_hw.utils.arrays import Floats

__all__ = ["check_accelerator", "device_clock"]

_REMEDIES = {
    "cuda": "Install the NVIDIA driver and a CUDA build of torch (AMD: ROCm and its build of torch)",
    "mps": "It needs Apple silicon with macOS 12.3 or later",
    "xpu": "Install Intel's GPU driver and an XPU build of torch",
}


def check_accelerator(device: str) -> None:
    """Check that torch has the accelerator ``device``, for example "cuda", "cuda:1" or "xpu".

    Raises:
        MissingDependencyError: torch finds no such device.
    """
    kind, _, index = device.partition(":")
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != kind:
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU-only build"
        other = f"only {found.type}" if found is not None else "no accelerator"
        raise MissingDependencyError(
            f"Device {device!r} is not available: torch {torch.__version__} ({build}) finds {other}. "
            f"{_REMEDIES.get(kind, 'Install its driver and its build of torch')}, or use --device "
            f"{found.type if found is not None else 'cpu'}."
        )
    if index and int(index) >= torch.accelerator.device_count():
        raise MissingDependencyError(
            f"Device {device!r} does not exist. Available devices: {kind}:0 to "
            f"{kind}:{torch.accelerator.device_count() - 1}."
        )


def device_clock(once: Callable[[], object], device: torch.device, stream: Any = None) -> Callable[[int], Floats]:
    """Return a function that runs ``once`` n times and returns the n times in seconds.

    Where the backend has events, n runs are timed between n + 1 events of one stream, with one synchronisation at the
    end. Launches are queued ahead, so that each interval is the time of the device. It includes waits for a host that
    cannot launch fast enough, as in deployment. Without events, the host's clock is read after every synchronised run.

    Args:
        once: Launches one run.
        device: Where it runs.
        stream: The stream of the launches; None is the current one.
    """
    backend: Any = torch.get_device_module(device)

    def on_device() -> contextlib.AbstractContextManager[object]:
        return backend.device(device) if hasattr(backend, "device") else contextlib.nullcontext()

    def by_events(n: int) -> Floats:
        with on_device():
            events = [backend.Event(enable_timing=True) for _ in range(n + 1)]
            backend.synchronize()
            _record(events[0], stream)
            for event in events[1:]:
                once()
                _record(event, stream)
            backend.synchronize()
            return np.asarray([a.elapsed_time(b) for a, b in itertools.pairwise(events)]) * 1e-3

    def by_host(n: int) -> Floats:
        times = np.empty(n)
        with on_device():
            backend.synchronize()
            for i in range(n):
                begin = time.perf_counter()
                once()
                backend.synchronize()
                times[i] = time.perf_counter() - begin
        return times

    return by_events if hasattr(backend, "Event") else by_host


def _record(event: Any, stream: Any) -> None:
    """Record an event in a stream; None is the current one, which is all that some backends have."""
    if stream is None:
        event.record()
    else:
        event.record(stream)
