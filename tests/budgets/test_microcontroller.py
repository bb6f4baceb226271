"""Arena and flash of int8 networks: against sums by hand, a layout with offsets, and counts of the shrunk network."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import budgets
import dsa_hw
from budgets import Budget, MemoryBudget
from budgets.microcontroller import ArenaCost, greedy_layout
from budgets.notation import parse_budget, parse_budgets
from dsa_hw import ChannelGroups, find_groups
from dsa_hw.channels.int8_buffers import PLANNERS, Planner
from dsa_hw.channels.surgery import shrink
from dsa_hw.errors import BudgetError


class Residual(nn.Module):
    """A strided convolution, a block with a shortcut, and a classifier."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32)
        self.expand, self.project = nn.Conv2d(32, 64, 1), nn.Conv2d(64, 32, 3, padding=1)
        self.act, self.head = activation(), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.stem(x)))
        x = x + self.project(self.act(self.expand(x)))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def groups_of(model: nn.Module, side: int = 16) -> ChannelGroups:
    return find_groups(model.eval(), (torch.randn(1, 3, side, side),), verify=False)


def test_arena_of_each_planner_equals_the_sum_by_hand() -> None:
    # 8 x 8 after the stem: x is 32 * 64 = 2048 bytes, its expansion 4096, the projection 2048; the sum is written over
    # the projection by Vela and beside both by tflite-micro.
    relu = groups_of(Residual())
    assert budgets.arena(relu, "vela").dense == 2048 + 4096 + 2048
    assert budgets.arena(relu, "tflite-micro").dense == max(2048 + 4096 + 2048, 3 * 2048)
    # Stride 2 with padding 1 on each side is not SAME: tflite-micro pads 3 x 16 x 16 to 3 x 18 x 18 = 972, aligned 976.
    stem = groups_of(nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)))
    assert budgets.arena(stem, "tflite-micro").dense == 768 + 976
    assert budgets.arena(stem, "vela").dense == 768 + 64 * 16
    # SiLU is LOGISTIC and MUL in tflite-micro: the expansion exists three times.
    silu = groups_of(Residual(nn.SiLU))
    assert budgets.arena(silu, "vela").dense == budgets.arena(relu, "vela").dense
    assert budgets.arena(silu, "tflite-micro").dense == 2048 + 3 * 4096


def test_flash_equals_the_sum_by_hand() -> None:
    weights, channels = 3 * 32 * 9 + 32 * 64 + 64 * 32 * 9 + 32 * 10, 32 + 64 + 32 + 10
    groups = groups_of(Residual())
    assert budgets.flash(groups).dense == weights + 10 * channels
    assert budgets.flash(groups, "tflite-micro").dense == weights + 28 * channels


@pytest.mark.parametrize("planner", PLANNERS)
def test_predicted_memory_is_that_of_the_shrunk_network(planner: Planner) -> None:
    model = Residual(nn.SiLU)
    groups, rng = groups_of(model, 20), np.random.default_rng(0)
    for cost in (budgets.arena, budgets.flash):
        for _ in range(3):
            widths = rng.integers(1, groups.sizes + 1)
            small = groups_of(shrink(model, groups, [np.arange(w) for w in widths]), 20)
            table = pd.DataFrame([widths], columns=list(groups.names))
            assert cost(groups, planner).predict(table)[0] == cost(small, planner).dense


def test_greedy_layout_places_no_two_buffers_over_each_other() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        count = int(rng.integers(1, 12))
        born = rng.integers(0, 10, count)
        last = born + rng.integers(0, 4, count)
        sizes = (16 * rng.integers(1, 30, count)).tolist()
        conflicts = [{j for j in range(count) if born[i] <= last[j] and born[j] <= last[i]} for i in range(count)]
        offsets, below = greedy_layout(sizes, conflicts)
        for i in range(count):
            for j in conflicts[i] - {i}:
                assert offsets[i] + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offsets[i]
            assert offsets[i] == (offsets[below[i]] + sizes[below[i]] if below[i] >= 0 else 0)


def test_gaps_of_the_greedy_layout_are_counted() -> None:
    """A row of buffers a, b, c, d, each alive with its neighbours: 4, 3, 2, 4 bytes of 16. A perfect layout needs 7."""
    alive = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]], float)
    cost = ArenaCost(
        "arena", "byte", ("k",), np.array([4]), channels=np.array([[0, 4.0], [0, 3], [0, 2], [0, 4]]),
        positions=np.full(4, 16.0), bricks=np.ones(4), alive=alive, greedy=True,
    )  # fmt: skip
    # a and d lie at 0, b on a at 4; c, which meets b and d, finds no gap below b and begins at 7.
    assert cost([1.0]) == 16 * 9
    assert cost.gradient([1.0]).tolist() == [16.0 * 9]
    assert dataclasses.replace(cost, greedy=False)([1.0]) == 16 * 7


def test_arena_does_not_fall_with_the_keep_ratios_and_has_the_gradient_of_its_buffers() -> None:
    groups = groups_of(Residual(), 64)
    rng = np.random.default_rng(2)
    for planner in PLANNERS:
        cost = budgets.arena(groups, planner)
        low = rng.uniform(0.05, 1, (50, len(groups)))
        high = np.minimum(low + rng.uniform(0, 0.5, low.shape), 1)
        assert planner != "vela" or (cost(low) <= cost(high)).all()
        alpha = torch.tensor(low[0], requires_grad=True)
        value = cost.value(alpha)
        assert value.item() == cost(low[0])
        (slopes,) = torch.autograd.grad(value, alpha)
        np.testing.assert_allclose(slopes.numpy(), cost.gradient(low[0]))
    # Without bricks the rounding is to 16 of some thousand bytes: the gradient is that of differences.
    cost = budgets.arena(groups, "tflite-micro")
    step, alpha = 0.01, np.full(len(groups), 0.5)
    differences = (cost(alpha + step * np.eye(len(groups))) - cost(alpha - step * np.eye(len(groups)))) / (2 * step)
    np.testing.assert_allclose(differences, cost.gradient(alpha), atol=0.03 * cost.gradient(alpha).max())


def test_channels_within_a_brick_are_free_on_an_ethos_u() -> None:
    groups = groups_of(nn.Sequential(nn.Conv2d(3, 64, 1), nn.ReLU(), nn.Conv2d(64, 64, 1), nn.Conv2d(64, 4, 1)))
    cost = budgets.arena(groups)
    table = pd.DataFrame([[w, w] for w in (17, 32, 33)], columns=list(groups.names))
    assert cost.predict(table).tolist() == [2 * 32 * 256, 2 * 32 * 256, 2 * 48 * 256]


def test_text_and_file_name_the_part_and_the_planner() -> None:
    found = parse_budgets(["memory.sram=256KiB", "memory.flash=1MiB", "memory=64MiB", "memory.sram.tflite-micro=50%"])
    assert [(b.part, b.planner) for b in found if isinstance(b, MemoryBudget)] == [
        ("sram", "vela"), ("flash", "vela"), ("activations", "vela"), ("sram", "tflite-micro"),
    ]  # fmt: skip
    assert str(found[0]) == "SRAM (int8 arena, vela) <= 256 KiB"
    for budget in found:
        assert Budget.from_dict(budget.to_dict()).to_dict() == budget.to_dict()
    with pytest.raises(BudgetError, match="Two budgets limit the same cost"):
        parse_budgets(["memory.sram=256KiB", "memory.sram=50%"])
    for text in ("memory.dram=1MiB", "memory.sram.other=1MiB", "memory.p95=1MiB"):
        with pytest.raises(BudgetError, match=r"memory\.sram=256KiB"):
            parse_budget(text)
    with pytest.raises(BudgetError, match="`part` must be one of 'activations', 'sram', 'flash'; got 'rom'"):
        MemoryBudget("1MiB", part="rom")
    with pytest.raises(BudgetError, match="can set planner to"):
        Budget.from_dict({**found[0].to_dict(), "planner": "mine"})


def test_allocation_meets_sram_and_flash_and_verifies() -> None:
    torch.manual_seed(0)
    model = Residual().eval()
    example = torch.randn(1, 3, 32, 32)
    result = dsa_hw.allocate(model, "memory.sram=70%, memory.flash=40%", example_inputs=example, method="uniform")
    sram, flash = result.certificate.entries
    assert str(result.certificate.verdict) == "MET"
    small = find_groups(result.model, (example,), verify=False)
    assert sram.measured == budgets.arena(small).dense <= 0.7 * sram.dense
    assert flash.measured == budgets.flash(small).dense <= 0.4 * flash.dense
    assert str(dsa_hw.verify(result.plan, model).verdict) == "MET"
