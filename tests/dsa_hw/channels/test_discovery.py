"""Groups of real networks and of random ones: equal masked and shrunk outputs, exact costs, reasons for frozen ones."""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dsa_hw import find_groups, shrink
from dsa_hw.zoo.models import load_model
from dsa_hw.zoo.torchvision_compat import torchvision
from tests.fakes.proving import IMAGE, Attention, Net, OptionA, conv, head, prove, sizes

SMALL_ZOO = {  # name -> number of channel groups
    "resnet18": 12,
    "resnext50_32x4d": 37,
    "densenet121": 120,
    "mobilenet_v2": 25,
    "mobilenet_v3_small": 27,
    "efficientnet_b0": 40,
    "shufflenet_v2_x0_5": 20,
    "squeezenet1_1": 25,
    "mnasnet0_5": 25,
    "regnet_y_400mf": 53,
    "googlenet": 57,
    "inception_v3": 94,
    "convnext_tiny": 22,
}


@pytest.mark.parametrize("name", SMALL_ZOO)
def test_groups_of_torchvision_networks_are_exact(name: str) -> None:
    side = 80 if name == "inception_v3" else 64  # the smallest input that it accepts
    model, inputs = load_model(name, (1, 3, side, side))
    groups = find_groups(model, inputs)
    frame = groups.to_frame()
    assert len(groups) == SMALL_ZOO[name]
    assert frame.flops_share.sum() == pytest.approx(1.0)
    prove(model, groups, inputs, seed=1)


def vision_transformer() -> nn.Module:
    """vit_b_16 with three narrow blocks instead of twelve: the others repeat them, and tracing them takes seconds."""
    return torchvision.models.VisionTransformer(
        image_size=64, patch_size=16, num_layers=3, num_heads=4, hidden_dim=48, mlp_dim=64, num_classes=10
    )


def swin_transformer() -> nn.Module:
    """swin_t with two stages instead of four: plain and shifted windows, and the merging of patches."""
    return torchvision.models.SwinTransformer(
        patch_size=[4, 4], embed_dim=24, depths=[2, 2], num_heads=[3, 6], window_size=[7, 7], num_classes=10
    )


@pytest.mark.parametrize(("make", "blocks"), [(vision_transformer, 3), (swin_transformer, 4)])
def test_transformers_are_pruned_whole(make: Callable[[], nn.Module], blocks: int) -> None:
    """Their attention ties the width of heads to the width of the input, so that it is replaced by its graph."""
    model, inputs = make().eval(), torch.randn(1, 3, 64, 64)
    groups = find_groups(model, inputs)
    frame = groups.to_frame()
    assert frame[frame.why_frozen == ""].flops_share.sum() > 0.95
    assert sum("qkv" in name or "in_proj" in name for name in groups.names) == blocks, "heads of every block"
    small = prove(model, groups, inputs, seed=1, memory=False)
    assert sum(type(m).__name__.startswith("Resized") for m in small.modules()) == blocks
    assert small(torch.randn(3, 3, 64, 64)).shape == (3, 10), "another batch size"
    assert list(small.state_dict()) == list(model.state_dict())
    again = pickle.loads(pickle.dumps(small))
    assert torch.equal(again(inputs), small(inputs))
    small.train()(torch.randn(2, 3, 64, 64)).sum().backward()
    assert all(p.grad is not None for p in small.parameters())
    further = find_groups(small, inputs)
    assert not any("depends on" in f.reason for f in further.frozen), "a pruned network can be pruned again"


def test_unpruned_modules_keep_their_class() -> None:
    model = vision_transformer()
    groups = find_groups(model, torch.randn(1, 3, 64, 64))
    same = shrink(model, groups, groups.sizes)
    assert [type(m) for m in same.modules()] == [type(m) for m in model.modules()]


class Scaled(nn.Module):
    """A module that divides by its channel count: a number that a graph contains and the network does not."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.drop, self.conv = nn.Dropout(0.9), conv(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        y = self.drop(self.conv(x.reshape(b, 2, c // 2, h, w).flatten(1, 2)) * (8**-0.5))
        return y.view(b, 8, h, w)


def test_rewritten_modules_keep_training_mode_and_verify() -> None:
    model = nn.Sequential(conv(3, 8), Scaled(8), head(8))
    groups = find_groups(model, IMAGE)
    assert sizes(groups) == [4, 8]
    small = prove(model, groups, IMAGE, seed=3, memory=False)
    assert type(small[1]).__name__ == "ResizedScaled"
    small.train()
    assert not torch.equal(small(IMAGE), small(IMAGE)), "dropout is active"
    small.eval()
    assert torch.equal(small(IMAGE), small(IMAGE))


class Cifar(nn.Module):
    """The trained ResNet-20's architecture (akamaster): option-A shortcuts."""

    class Block(nn.Module):
        def __init__(self, incoming: int, planes: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(incoming, planes, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(planes)
            self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(planes)
            self.shortcut = OptionA(planes // 4, planes // 4) if stride > 1 else nn.Sequential()

        def forward(self, x: Tensor) -> Tensor:
            y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
            return F.relu(y + self.shortcut(x))

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        plan = {"layer1": (16, 16, 1), "layer2": (16, 32, 2), "layer3": (32, 64, 2)}
        for name, (incoming, planes, stride) in plan.items():
            blocks = [self.Block(incoming, planes, stride), *(self.Block(planes, planes, 1) for _ in range(2))]
            setattr(self, name, nn.Sequential(*blocks))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(F.avg_pool2d(x, x.size(3)).view(x.size(0), -1))


def test_groups_of_resnet20_with_option_a_shortcuts() -> None:
    model, image = Cifar(), torch.randn(2, 3, 32, 32)
    groups = find_groups(model, image)
    # The 16 channels of stage 1 pass through all stages; stage 2 adds 16 and stage 3 adds 32; 9 inner groups.
    assert sizes(groups) == sorted([16, 16, 32] + 3 * [16] + 3 * [32] + 3 * [64])
    small = prove(model, groups, image, seed=2)
    assert type(small.layer2[0].shortcut).__name__ == "ShrunkPadding"


@pytest.mark.needs_data
def test_trained_resnet20_of_the_shared_data(shared_data: Callable[[str], Path]) -> None:
    path = shared_data("weights/resnet20-12fca82f.th")
    state = torch.load(path, weights_only=True, map_location="cpu")["state_dict"]
    model = Cifar()
    model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    image = torch.randn(2, 3, 32, 32)
    prove(model, find_groups(model, image), image, seed=3)


class Hard(nn.Module):
    """A network whose forward contains a channel count."""

    def __init__(self, view: str) -> None:
        super().__init__()
        self.a, self.b, self.h, self.view = conv(3, 8), conv(8, 8), head(8), view

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.view == "fails":
            x = x.view(x.shape[0], 8, -1).view(x.shape[0], 8, 8, 8)
        elif self.view == "changes the outputs":
            x = x / x.shape[1]
        return self.h(self.b(x))


@pytest.mark.parametrize(
    ("view", "message"),
    [
        ("fails", r"the code at test_discovery.py:\d+ depends on this channel count"),
        ("changes the outputs", "shrinking changes the outputs"),
    ],
)
def test_hard_coded_channel_counts_are_frozen_with_the_line(view: str, message: str) -> None:
    model = Hard(view)
    groups = find_groups(model, IMAGE)
    assert groups.names == ("b",), "the other group is still pruned"
    (frozen,) = [f for f in groups.frozen if f.name == "a"]
    assert re.search(message, frozen.reason)
    prove(model, groups, IMAGE, seed=8)


def test_channel_padding_inside_a_larger_forward_is_frozen_with_the_remedy() -> None:
    model = Net(lambda n, x: n.h(n.b(x) + F.pad(n.a(x), (0, 0, 0, 0, 2, 2))), a=conv(3, 8), b=conv(3, 12), h=head(12))
    groups = find_groups(model, IMAGE)
    assert sizes(groups) == [8], "the padded channels are frozen, those that pass through are not"
    assert [f.channels for f in groups.frozen if "put it into a module of its own" in f.reason] == [4]
    prove(model, groups, IMAGE, seed=9)


# --- random networks -------------------------------------------------------------------------------------------------


def _residual(c: int) -> tuple[nn.Module, int]:
    return Net(lambda n, x: F.relu(x + n.b(F.relu(n.a(x)))), a=conv(c, c + 2), b=conv(c + 2, c)), c


def _projected(c: int) -> tuple[nn.Module, int]:
    return Net(
        lambda n, x: F.relu(n.s(x) + n.a(x)),
        a=nn.Sequential(conv(c, c + 4), nn.BatchNorm2d(c + 4)),
        s=conv(c, c + 4, 1),
    ), c + 4


def _dense(c: int) -> tuple[nn.Module, int]:
    return Net(lambda n, x: torch.cat([x, n.a(F.relu(n.n(x)))], 1), n=nn.BatchNorm2d(c), a=conv(c, 4)), c + 4


def _inverted(c: int) -> tuple[nn.Module, int]:
    wide = 2 * c
    inner = nn.Sequential(
        conv(c, wide, 1),
        nn.BatchNorm2d(wide),
        nn.ReLU6(),
        conv(wide, wide, groups=wide),
        nn.Hardswish(),
        conv(wide, c, 1),
    )
    return Net(lambda n, x: x + n.inner(x), inner=inner), c


def _grouped(c: int) -> tuple[nn.Module, int]:
    return nn.Sequential(conv(c, 12, 1), nn.ReLU(), conv(12, 8, groups=4), nn.BatchNorm2d(8)), 8


def _excite(c: int) -> tuple[nn.Module, int]:
    gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv(c, 4, 1), nn.ReLU(), conv(4, c, 1), nn.Hardsigmoid())
    return Net(lambda n, x: x * n.g(x), g=gate), c


def _option_a(c: int) -> tuple[nn.Module, int]:
    return Net(lambda n, x: n.a(x) + n.s(x), a=conv(c, c + 4, stride=2), s=OptionA(1, 3)), c + 4


def _halves(c: int) -> tuple[nn.Module, int]:
    half = 6
    return Net(
        lambda n, x: torch.cat([(p := n.e(x).chunk(2, 1))[0], n.a(p[1])], 1), e=conv(c, 2 * half, 1), a=conv(half, half)
    ), 2 * half


def _shuffle(c: int) -> tuple[nn.Module, int]:
    return nn.Sequential(conv(c, 12, 1), nn.ChannelShuffle(3), conv(12, 8, groups=2)), 8


def _up_down(c: int) -> tuple[nn.Module, int]:
    return nn.Sequential(nn.ConvTranspose2d(c, 6, 2, 2), nn.GELU(), nn.MaxPool2d(2)), 6


def _next(c: int) -> tuple[nn.Module, int]:
    def forward(n: Net, x: Tensor) -> Tensor:
        y = n.m(n.n(n.d(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return x + n.scale * y

    mlp = nn.Sequential(nn.Linear(c, 10), nn.GELU(), nn.Linear(10, c))
    return Net(forward, d=conv(c, c, groups=c), n=nn.LayerNorm(c), m=mlp, scale=nn.Parameter(torch.ones(c, 1, 1))), c


def _transformer(c: int) -> tuple[nn.Module, int]:
    def forward(n: Net, x: Tensor) -> Tensor:
        _, _, h, w = x.shape
        y = x.flatten(2).transpose(1, 2)
        y = y + n.t(n.n(y))
        return y.transpose(1, 2).unflatten(2, (h, w))

    return Net(forward, t=Attention(c, 3, 2), n=nn.LayerNorm(c)), c


def _group_norm(c: int) -> tuple[nn.Module, int]:
    return nn.Sequential(conv(c, 8, 1), nn.GroupNorm(2, 8), nn.SiLU()), 8


BLOCKS: list[Callable[[int], tuple[nn.Module, int]]] = [
    _residual,
    _projected,
    _dense,
    _inverted,
    _grouped,
    _excite,
    _option_a,
    _halves,
    _shuffle,
    _up_down,
    _next,
    _transformer,
    _group_norm,
]


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=5), st.integers(0, 1000))
def test_groups_of_random_networks_are_exact(blocks: list[Callable[[int], tuple[nn.Module, int]]], seed: int) -> None:
    channels = 6
    parts: list[nn.Module] = [conv(3, channels), nn.BatchNorm2d(channels)]
    for block in blocks:
        part, channels = block(channels)
        parts.append(part)
    model = nn.Sequential(*parts, head(channels))
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    groups = find_groups(model, image)
    assert len(groups) > 0
    assert not any("changes the outputs" in f.reason for f in groups.frozen), groups.frozen
    prove(model, groups, image, seed)


@pytest.mark.speed
def test_finding_groups_takes_at_most_three_times_the_export() -> None:
    """A ratio within one run, the best of three each: the machine is shared."""
    model, inputs = load_model("resnet50", (1, 3, 224, 224))
    export, find = [], []
    for _ in range(3):
        start = time.perf_counter()
        torch.export.export(model, inputs, strict=False)
        middle = time.perf_counter()
        find_groups(model, inputs)
        export.append(middle - start)
        find.append(time.perf_counter() - middle)
    assert min(find) < 3 * min(export)


@pytest.mark.speed
def test_shrinking_densenet_takes_less_than_a_second() -> None:
    model, inputs = load_model("densenet121", (1, 3, 64, 64))
    groups = find_groups(model, inputs, verify=False)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        shrink(model, groups, groups.sizes // 2)
        times.append(time.perf_counter() - start)
    assert min(times) < 1.0
