"""Counted costs: exact against torch's counter and against sums done by hand; gradients against central differences."""

from __future__ import annotations

import time

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import budgets
from budgets.analytic import AnalyticCost, PeakCost
from budgets.quadratic import Quadratic
from dsa_hw import ChannelGroups, find_groups
from dsa_hw.errors import BudgetError, WidthError
from dsa_hw.zoo.models import load_model


class Block(nn.Module):
    """CIFAR residual block with a 1 x 1 convolution as its shortcut (the paper's ResNets)."""

    def __init__(self, incoming: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(incoming, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride > 1 or incoming != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(incoming, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def cifar_resnet(depth: int) -> nn.Module:
    blocks = (depth - 2) // 6
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    incoming = 16
    for planes in (16, 32, 64):
        for i in range(blocks):
            layers.append(Block(incoming, planes, 2 if i == 0 and planes > 16 else 1))
            incoming = planes
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def cifar_vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    incoming = 3
    for item in [64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"]:
        if item == "M":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(incoming, int(item), 3, padding=1), nn.BatchNorm2d(int(item)), nn.ReLU()]
            incoming = int(item)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def by_hand_cifar_resnet(depth: int) -> int:
    """2 x MACs of the convolutions: k k C_in C_out h w each, layer by layer."""
    n = (depth - 2) // 6
    macs = 9 * 3 * 16 * 32 * 32  # stem
    macs += 2 * n * (9 * 16 * 16 * 32 * 32)  # stage 1: 2n convolutions 16 -> 16 on 32 x 32
    for c, side in ((32, 16), (64, 8)):
        macs += (9 + 1) * (c // 2) * c * side * side  # first convolution with stride 2, and the shortcut
        macs += (2 * n - 1) * (9 * c * c * side * side)
    return 2 * macs


def by_hand_resnet18() -> int:
    macs = 49 * 3 * 64 * 112 * 112 + 4 * (9 * 64 * 64 * 56 * 56)
    for c, side in ((128, 28), (256, 14), (512, 7)):
        macs += (9 + 1) * (c // 2) * c * side * side + 3 * (9 * c * c * side * side)
    return 2 * macs


def by_hand_resnet50() -> int:
    macs = 49 * 3 * 64 * 112 * 112
    incoming = 64
    for width, count, side in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        area = side * side
        for i in range(count):
            # torchvision strides in the 3 x 3, so the first 1 x 1 of a stage still sees the larger image
            before = area * 4 if i == 0 and width > 64 else area
            macs += incoming * width * before + 9 * width * width * area + width * 4 * width * area
            if i == 0:
                macs += incoming * 4 * width * area
            incoming = 4 * width
    return 2 * macs


def by_hand_vgg16() -> int:
    plan = [(3, 64, 32), (64, 64, 32), (64, 128, 16), (128, 128, 16), (128, 256, 8), (256, 256, 8), (256, 256, 8)]
    plan += [(256, 512, 4), (512, 512, 4), (512, 512, 4), (512, 512, 2), (512, 512, 2), (512, 512, 2)]
    return 2 * sum(9 * i * o * side * side for i, o, side in plan)


@pytest.mark.parametrize(
    ("make", "shape", "expected"),
    [
        (lambda: cifar_resnet(20), (1, 3, 32, 32), by_hand_cifar_resnet(20)),
        (lambda: cifar_resnet(56), (1, 3, 32, 32), by_hand_cifar_resnet(56)),
        (lambda: load_model("resnet18")[0], (1, 3, 224, 224), by_hand_resnet18()),
        (lambda: load_model("resnet50")[0], (1, 3, 224, 224), by_hand_resnet50()),
        (cifar_vgg16, (1, 3, 32, 32), by_hand_vgg16()),
    ],
    ids=["resnet20", "resnet56", "resnet18", "resnet50", "vgg16"],
)
def test_paper_convention_equals_the_sum_by_hand(make: object, shape: tuple[int, ...], expected: int) -> None:
    groups = find_groups(make(), torch.randn(shape), verify=False)
    assert budgets.flops(groups, convention="paper").dense == expected
    linear = [o for o in groups.operations if o.kind == "linear"]
    assert budgets.flops(groups).dense == expected + sum(
        float(t(np.ones(len(groups)))) for o in linear for t in o.flops
    )


def costs(groups: ChannelGroups) -> list[AnalyticCost | PeakCost]:
    return [
        budgets.flops(groups),
        budgets.flops(groups, "paper"),
        budgets.params(groups),
        budgets.activation_memory(groups),
    ]


@pytest.fixture(scope="module")
def groups() -> ChannelGroups:
    model, inputs = load_model("mobilenet_v2", (1, 3, 64, 64))
    return find_groups(model, inputs, verify=False)


def test_gradients_equal_central_differences(groups: ChannelGroups) -> None:
    rng = np.random.default_rng(0)
    for cost in costs(groups):
        for _ in range(5):
            alpha = rng.uniform(0.1, 0.9, len(groups))
            step = 1e-5
            eye = step * np.eye(len(groups))
            numeric = (cost(alpha + eye) - cost(alpha - eye)) / (2 * step)
            np.testing.assert_allclose(cost.gradient(alpha), numeric, rtol=1e-6, atol=1e-6 * np.abs(numeric).max())
            tensor = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
            (automatic,) = torch.autograd.grad(cost.value(tensor), tensor)
            np.testing.assert_allclose(automatic.numpy(), cost.gradient(alpha), rtol=1e-12)


def test_values_and_tables_agree(groups: ChannelGroups) -> None:
    rng = np.random.default_rng(1)
    widths = np.stack([rng.integers(1, groups.sizes + 1) for _ in range(6)])
    table = pd.DataFrame(widths, columns=list(groups.names), index=list("abcdef"))
    for cost in costs(groups):
        predicted = cost.predict(table)
        assert list(predicted.index) == list("abcdef")
        alpha = widths / groups.sizes
        np.testing.assert_allclose(cost.value(torch.tensor(alpha)).numpy(), predicted, rtol=1e-12)
        np.testing.assert_allclose(cost.upper(alpha), predicted, rtol=1e-12)
        assert cost.gradient(alpha).shape == (6, len(groups))
        assert (predicted == predicted.round()).all()
        assert predicted.max() <= cost.dense


def test_depthwise_is_linear_and_dense_is_quadratic() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 5, 1))
    groups = find_groups(model, torch.randn(1, 3, 10, 10), verify=False)
    cost = budgets.flops(groups)
    a, b = 2 * 9 * 3 * 8 * 64, 2 * 9 * 8 * 36  # stem 8 x 8 outputs, depthwise 6 x 6 outputs
    np.testing.assert_allclose(cost.quadratic.A, [[0, 2 * 8 * 6 * 36 / 2], [2 * 8 * 6 * 36 / 2, 0]])
    np.testing.assert_allclose(cost.quadratic.B, [a + b, 2 * 6 * 5 * 36])
    assert cost.quadratic.c == 0


def test_peak_memory_equals_the_sum_by_hand() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    groups = find_groups(model, torch.randn(1, 3, 10, 10), verify=False)
    # input 3, first output 8, second output 8 (relu not in place), third output 2; floats of 4 bytes on 100 pixels
    assert budgets.activation_memory(groups).dense == 4 * 100 * (8 + 8)
    table = pd.DataFrame({"0": [1]})
    assert budgets.activation_memory(groups).predict(table)[0] == 4 * 100 * max(3 + 1, 1 + 1, 1 + 2)


def test_wrong_arguments_are_refused(groups: ChannelGroups) -> None:
    with pytest.raises(BudgetError, match="counted, paper"):
        budgets.flops(groups, convention="macs")
    with pytest.raises(WidthError, match="it has no '"):
        budgets.flops(groups).predict(pd.DataFrame({"nobody": [1]}))


@pytest.mark.speed
def test_a_hundred_groups_take_less_than_100_microseconds() -> None:
    """F and its gradient for K = 100 in under 100 microseconds (the best of many: the machine is shared)."""
    rng = np.random.default_rng(0)
    half = rng.uniform(size=(100, 100))
    quadratic = Quadratic(half + half.T, rng.uniform(size=100), 1.0)
    cost = AnalyticCost("flops", "FLOP", tuple(map(str, range(100))), np.full(100, 64), quadratic, quadratic)
    alpha = rng.uniform(size=100)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        cost(alpha)
        cost.gradient(alpha)
        times.append(time.perf_counter() - start)
    assert min(times) < 100e-6
