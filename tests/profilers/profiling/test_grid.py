"""The grid: found where it is known to be, silent where there is none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsa_hw.channels import find_groups
from dsa_hw.errors import ProfileError
from dsa_hw.zoo import models
from profilers.measuring.bench import Bench
from profilers.measuring.rules import MeasuringRules
from profilers.networks.chains import Layer
from profilers.profiling import grid
from profilers.profiling.grid import excess, finest_free_grid, swept_widths
from profilers.profiling.plots import plot_grid
from profilers.targets import Loaded, Target, resolve
from tests.fakes.machine import Machine, Tiny, bursts


def sweep(size: int, cost: Callable[[int], float], noise: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    widths = swept_widths(size)
    seconds = np.asarray([cost(w) * (1 + noise * rng.normal()) for w in widths])
    return np.asarray(widths, float), seconds


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("block", [4, 8, 16])
def test_blocks_are_found(block: int, size: int) -> None:
    """A remainder costs a block more: kernels that fall back to slow code for it."""
    points = sweep(size, lambda w: 1.0 + 10 * w / size + (2.0 if w % block else 0.0), 0.004)
    assert finest_free_grid(*points) == block


def test_whole_blocks_are_found() -> None:
    """Time is that of the next multiple of 16, as with ONNX Runtime's blocked layout on AVX-512."""
    assert finest_free_grid(*sweep(64, lambda w: 0.02 + 0.6 * -(-w // 16), 0.01)) == 16
    assert finest_free_grid(*sweep(128, lambda w: 0.02 + 0.6 * -(-w // 16), 0.01)) == 16


@pytest.mark.parametrize("cost", [lambda w: 1.0 + w, lambda w: w**0.7, lambda w: w**1.5])
def test_without_blocks_there_is_no_grid(cost: Callable[[int], float]) -> None:
    assert finest_free_grid(*sweep(128, cost, 0.004)) == 1


def test_published_sweep_gives_its_grid() -> None:
    """The pilot's numbers for ONNX Runtime: 8 is good, everything between is bad."""
    table = {64: 0.84, 63: 1.05, 58: 1.00, 56: 0.74, 49: 0.87, 48: 0.67}
    channels, seconds = np.asarray(list(table), float), np.asarray(list(table.values()))
    assert finest_free_grid(channels, seconds) == 8
    beyond = dict(zip(table, excess(channels, seconds, 8), strict=True))
    assert beyond[64] == beyond[56] == beyond[48] == 0
    assert beyond[63] > 0.2
    assert beyond[58] > 0.25
    assert beyond[49] > 0.25


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 500), st.floats(0.1, 10)), min_size=1, max_size=30, unique_by=lambda p: p[0]),
    st.sampled_from([1, 2, 4, 8, 16]),
)
def test_excess_is_zero_on_the_grid_and_finite(points: list[tuple[int, float]], grid: int) -> None:
    channels, seconds = np.asarray([float(p[0]) for p in points]), np.asarray([p[1] for p in points])
    found = excess(channels, seconds, grid)
    assert np.isfinite(found).all()
    assert np.allclose(found[channels % grid == 0], 0)
    assert finest_free_grid(channels, seconds) in (1, 2, 4, 8, 16, 32)


def test_swept_widths_have_every_divisor() -> None:
    for size in (64, 128, 512):
        assert {gcd(w, 16) for w in swept_widths(size)} == {1, 2, 4, 8, 16}
        assert max(swept_widths(size)) == size
        assert min(swept_widths(size)) >= size // 4
    assert swept_widths(4)[0] == 4
    assert min(swept_widths(4)) >= 1
    assert len(swept_widths(512, few=True)) < len(swept_widths(512))


def test_unswept_groups_get_the_common_grid_and_small_groups_a_finer_one(tiny: tuple) -> None:  # type: ignore[type-arg]
    groups = find_groups(*tiny)
    found = grid.spread_grid(groups, {groups.names[0]: 8}, {groups.names[0]: 1})
    assert set(found) == set(groups.names)
    assert set(found.values()) == {8}
    assert set(grid.fixed_grid(groups, 32).values()) == {8}, "16 and 24 channels leave no two multiples of 32 or 16"
    assert grid.spread_grid(groups, {groups.names[0]: 8}, {groups.names[0]: 4})[groups.names[0]] == 2
    with pytest.raises(ProfileError, match="auto"):
        grid.fixed_grid(groups, 0)


def test_sweeps_rebuild_the_operations_around_a_group(tiny: tuple) -> None:  # type: ignore[type-arg]
    model, inputs = tiny
    groups = find_groups(model, inputs)
    swept = {s.group: s for s in grid.sweeps(model, groups, inputs)}
    inner = swept["inner"]
    side = {"side": (16, 16), "kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    assert inner.size == 24
    assert inner.unit == 1
    assert inner.make(24) == (Layer(16, 24, **side), Layer(24, 16, **side))
    assert inner.make(20) == (Layer(16, 20, **side), Layer(20, 16, **side))


def test_concatenated_groups_are_swept_as_one_tensor() -> None:
    # Shortcuts that pad: stage 2 has the 16 channels of stage 1 and 16 of its own, and kernels see 32.
    model, inputs = models.load_model("resnet20_a")
    groups = find_groups(model, inputs)
    assert int(groups.sizes[groups.names.index("layer2.0.conv2")]) == 16
    swept = next(s for s in grid.sweeps(model, groups, inputs, most=12) if s.group == "layer2.0.conv2")
    assert (swept.size, swept.unit) == (32, 1)
    assert [swept.make(width)[0].outputs for width in (32, 20, 16)] == [32, 20, 16]


def test_depthwise_convolution_is_part_of_the_sweep() -> None:
    from dsa_hw.zoo import models

    model, inputs = models.load_model("mobilenet_v2", (1, 3, 32, 32))
    groups = find_groups(model, inputs, verify=False)
    chains = [s.make(s.size - 4) for s in grid.sweeps(model, groups, inputs, most=20)]
    middles = [c[1] for c in chains if len(c) == 3]
    assert middles
    assert all(m.groups == m.inputs == m.outputs for m in middles)
    for chain in chains:
        for before, after in itertools.pairwise(chain):
            assert before.outputs == after.inputs
            assert before.out_side == after.side


class Blocks(Target):
    """A target that computes output channels in blocks of 8, slowly where another process disturbs it."""

    runtime, cache = "blocks", 2**14

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def load(self, artefact: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Loaded:
        layers = [m for m in artefact.modules() if isinstance(m, nn.Conv2d)]
        work = sum(-(-m.out_channels // 8) * -(-m.in_channels // 8) for m in layers)
        return self.machine.network(5e-4 + 1e-4 * work).load()


@pytest.mark.parametrize("busy", [None, bursts(0.1, 0.4, 1.7)])
def test_find_grid_measures_the_blocks_of_a_busy_target(tiny: Any, busy: Any) -> None:
    model, inputs = tiny
    groups = find_groups(model, inputs)
    machine = Machine(busy)
    bench = Bench(Blocks(machine), clock=machine.clock)
    swept = grid.sweeps(model, groups, inputs, most=1)
    found, points = grid.find_grid(bench, groups, swept, limit=600)
    assert found[swept[0].group] == 8
    chains = [swept[0].make(p.width) for p in points]
    truth = np.asarray([5e-4 + 1e-4 * sum(-(-c.outputs // 8) * -(-c.inputs // 8) for c in chain) for chain in chains])
    seconds = np.asarray([p.seconds for p in points])
    assert seconds / seconds[0] == pytest.approx(truth / truth[0], rel=0.01)
    assert all(p.low < p.seconds < p.high and p.runs > 0 for p in points)
    assert all(p.excess == 0 for p in points if p.width % 8 == 0)
    assert max(p.excess for p in points) > 0.05


def test_find_grid_and_plot_on_a_real_target(tmp_path: Path, lenient: MeasuringRules) -> None:
    model, inputs = Tiny().eval(), (torch.randn(1, 3, 8, 8),)
    groups = find_groups(model, inputs)
    bench = Bench(resolve("torch/cpu"), rules=lenient)
    swept = grid.sweeps(model, groups, inputs, most=1)
    found, points = grid.find_grid(bench, groups, swept, limit=20)
    assert set(found) == set(groups.names)
    assert all(1 <= g <= 16 for g in found.values())
    assert {p.width for p in points} == set(swept_widths(swept[0].size))
    assert min(abs(p.excess) for p in points) == pytest.approx(0)
    assert all(p.seconds > 0 for p in points)
    picture = tmp_path / "saw.png"
    plot_grid(points, found, "tiny").savefig(picture)
    assert picture.stat().st_size > 5000
