"""Timing on accelerators, with a stand-in backend that records events, synchronisations and launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dsa_hw.errors import MissingDependencyError
from profilers.targets import accelerator, resolve
from profilers.targets.accelerator import check_accelerator, device_clock
from profilers.targets.torch import Torch


class Backend:
    """A backend with a queue: a launch takes 3 ms of the device, which starts when the host synchronises or earlier."""

    def __init__(self, events: bool) -> None:
        self.log: list[str] = []
        self.device_time = 0.0
        if events:
            self.Event = self._event

    def launch(self) -> None:
        self.log.append("launch")
        self.device_time += 3.0

    def synchronize(self) -> None:
        self.log.append("synchronise")

    def _event(self, enable_timing: bool = False) -> Any:
        assert enable_timing, "an event without timing has no elapsed time"
        event = SimpleNamespace(time=None)

        def record(stream: Any = None) -> None:
            self.log.append("event" if stream is None else f"event in {stream}")
            event.time = self.device_time

        def elapsed_time(other: Any) -> float:
            assert self.log[-1] == "synchronise", "times are read after the device is done"
            return float(other.time - event.time)

        event.record, event.elapsed_time = record, elapsed_time
        return event


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Put a stand-in in the place of the backend of the "meta" device, on which torch runs without any hardware."""
    found = Backend(events=request.param)
    monkeypatch.setattr(torch, "get_device_module", lambda device: found)
    return found


@pytest.mark.parametrize("backend", [True], indirect=True)
def test_runs_are_launched_between_events_and_synchronised_once(backend: Backend) -> None:
    seconds = device_clock(backend.launch, torch.device("meta"))(3)
    assert seconds == pytest.approx([3e-3] * 3)
    assert backend.log == ["synchronise", "event", *["launch", "event"] * 3, "synchronise"]


@pytest.mark.parametrize("backend", [True], indirect=True)
def test_events_are_recorded_in_the_stream_of_the_launches(backend: Backend) -> None:
    device_clock(backend.launch, torch.device("meta"), "my stream")(1)
    assert backend.log == ["synchronise", "event in my stream", "launch", "event in my stream", "synchronise"]


@pytest.mark.parametrize("backend", [False], indirect=True)
def test_without_events_every_run_is_synchronised(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = iter(np.arange(4) * 0.5)
    monkeypatch.setattr(accelerator.time, "perf_counter", lambda: (backend.log.append("clock"), next(stamps))[1])
    assert device_clock(backend.launch, torch.device("meta"))(2) == pytest.approx([0.5, 0.5])
    assert backend.log == ["synchronise", *["clock", "launch", "synchronise", "clock"] * 2]


@pytest.mark.parametrize("backend", [True, False], indirect=True)
def test_torch_target_times_any_accelerator(backend: Backend) -> None:
    class Network(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.device.type == self.weight.device.type == "meta"
            backend.launch()
            return super().forward(x)

    loaded = Torch("meta").load(Network(2, 2), (torch.zeros(1, 2),))
    assert (loaded.run(4) > 0).all()
    assert backend.log.count("launch") == 4
    assert backend.log.count("synchronise") == (2 if hasattr(backend, "Event") else 5)


def test_accelerators_are_those_that_torch_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert resolve("torch/xpu").title == "torch/xpu fp32"
    check_accelerator("xpu:1")
    with pytest.raises(MissingDependencyError, match="xpu:0 to xpu:1"):
        check_accelerator("xpu:2")
    with pytest.raises(MissingDependencyError, match=r"finds only xpu.*--device xpu"):
        check_accelerator("cuda")
