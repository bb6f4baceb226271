"""Energy budgets and look-up tables through `dsa_hw.allocate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from budgets import EnergyBudget, EstimatedEnergyBudget, FlopsBudget, LatencyBudget
from dsa_hw.pipeline.allocate import allocate
from dsa_hw.pipeline.options import ProfileOptions
from tests.fakes.powered import Chip, Device, physics
from tests.profilers.targets.test_table import made

Network = tuple[nn.Module, tuple[torch.Tensor, ...]]
PROFILING = ProfileOptions(samples=14, holdout=3, time_limit=1e7)
OPTIONS: dict[str, Any] = {"profiling": PROFILING, "progress": False}


def test_budgets_on_energy_latency_and_flops_are_met_on_the_simulated_device(tiny: Network) -> None:
    model, inputs = tiny
    device = Device(tick=0.02, noise=0.003)  # quick enough for the time that the front door gives a measurement
    budgets = [EnergyBudget("70%", counter=device.counter()), LatencyBudget("75%"), FlopsBudget("90%")]
    profiling = replace(PROFILING, samples=9)
    result = allocate(model, budgets, example_inputs=inputs, target=Chip(device), profiling=profiling, progress=False)
    (seconds, watts), (whole, power) = physics(result.model, inputs), physics(model, inputs)
    assert 0.4 * whole * power < seconds * watts <= 0.7 * whole * power, "true on the device, and not by far too much"
    assert seconds <= 0.75 * whole
    lines = [str(entry) for entry in result.certificate.entries]
    assert [line.split(" <= ")[0] for line in lines] == ["energy", "latency", "FLOPs"]
    assert all(line.endswith(": MET") for line in lines)


def test_the_certificate_names_the_table_that_estimated(tiny: Network, tmp_path: Path) -> None:
    model, inputs = tiny
    device = f"table:{made(tmp_path / 't.csv')}"
    result = allocate(model, LatencyBudget("60%", target=device), example_inputs=inputs, **OPTIONS)
    text = str(result.certificate)
    assert "estimated from look-up table t.csv" in text
    assert "MET" in text
    assert "NOT MET" not in text


def test_estimated_energy_is_called_so(tiny: Network) -> None:
    model, inputs = tiny
    budget = EstimatedEnergyBudget("60%", technology="7nm")
    result = allocate(model, budget, example_inputs=inputs, **OPTIONS)
    assert "estimated energy <= 60%" in str(result.certificate)


def test_a_machine_without_counter_is_told_before_any_work(tiny: Network) -> None:
    from dsa_hw.errors import MissingDependencyError
    from profilers.measuring import counters

    try:
        counters.find("cpu")
    except MissingDependencyError:
        pass
    else:
        pytest.skip("this machine has a CPU energy counter")
    with pytest.raises(MissingDependencyError, match="counter"):
        allocate(tiny[0], EnergyBudget("60%"), example_inputs=tiny[1], target="torch/cpu", **OPTIONS)
