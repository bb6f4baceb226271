"""Detectors, dense prediction and language models: groups, equal masked and shrunk outputs, exact costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import dsa_hw.zoo.torchvision_compat  # noqa: F401  (libraries below import torchvision)
from dsa_hw import find_groups
from tests.fakes.proving import IMAGE, Net, conv, head, prove, sizes


def share(groups: Any) -> float:
    frame = groups.to_frame()
    return float(frame[frame.why_frozen == ""].flops_share.sum())


class Retina(nn.Module):
    """A detector in the form of RetinaNet: a backbone, a feature pyramid, and one head for all levels."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(conv(i, o, stride=2), nn.BatchNorm2d(o), nn.ReLU()) for i, o in ((3, 8), (8, 12), (12, 16))
        )
        self.lateral = nn.ModuleList(conv(i, 10, 1) for i in (8, 12, 16))
        self.classes = nn.Sequential(conv(10, 14), nn.GroupNorm(2, 14), nn.ReLU(), conv(14, 3 * 4))
        self.boxes = nn.Sequential(conv(10, 6), nn.ReLU(), conv(6, 3 * 4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        top, pyramid = None, []
        for lateral, level in zip(reversed(self.lateral), reversed(levels), strict=True):
            y = lateral(level)
            top = y if top is None else y + F.interpolate(top, size=y.shape[-2:])
            pyramid.append(top)
        flat = [[h(p).permute(0, 2, 3, 1).reshape(len(p), -1, 4) for p in pyramid] for h in (self.classes, self.boxes)]
        return {"scores": torch.cat(flat[0], 1), "boxes": torch.cat(flat[1], 1)}


def test_detector_with_a_pyramid_and_shared_heads() -> None:
    model, image = Retina(), torch.randn(2, 3, 32, 32)
    groups = find_groups(model, image)
    assert sizes(groups) == sorted([8, 12, 16, 10, 7, 6]), "backbone, pyramid, and the inner channels of both heads"
    prove(model, groups, image, seed=1)


def test_super_resolution_with_pixel_shuffle() -> None:
    model = Net(
        lambda n, x: n.last(F.pixel_shuffle(n.up((y := n.first(x)) + n.block(y)), 2)),
        first=conv(3, 8),
        block=nn.Sequential(conv(8, 12), nn.ReLU(), conv(12, 8)),
        up=conv(8, 24),
        last=conv(6, 3),
    )
    groups = find_groups(model, IMAGE)
    assert sizes(groups) == [6, 8, 12]
    prove(model, groups, IMAGE, seed=2)


class State(nn.Module):
    """Holds the number at which the network around it splits channels (as in RAFT)."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = 6
        self.conv = conv(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x)) + x


def test_number_that_a_module_inside_holds() -> None:
    def forward(n: Net, x: Tensor) -> Tensor:
        context = n.a(x)
        state, rest = torch.split(context, [n.state.hidden, context.shape[1] - n.state.hidden], 1)
        return n.h(torch.cat([n.state(state), rest], 1))

    model = Net(forward, a=conv(3, 10), state=State(), h=head(10))
    groups = find_groups(model, IMAGE)
    assert sizes(groups) == [4, 6]
    prove(model, groups, IMAGE, seed=3)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
WORDS = {"vocab_size": 31, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}


@pytest.mark.parametrize(
    ("name", "settings", "found"),
    [
        # residual stream; then for each of two layers heads (of keys, where queries share them) and MLP
        ("Llama", {**SMALL, **WORDS, "num_key_value_heads": 2}, [2, 2, 16, 24, 24]),
        ("GPT2", {**WORDS, "n_embd": 16, "n_layer": 2, "n_head": 4}, [4, 4, 16, 64, 64]),
    ],
)
def test_language_models_are_pruned_whole(name: str, settings: dict[str, Any], found: list[int]) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**settings)
    suffix = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{name}{suffix}")(config).eval()
    inputs = {"input_ids": torch.randint(3, 31, (1, 6))}
    groups = find_groups(model, inputs)
    assert sizes(groups) == found
    model.requires_grad_(False)  # torch's counter of FLOPs does not accept parameters as inputs otherwise
    small = prove(model, groups, inputs, seed=4, memory=False)
    assert small(input_ids=torch.randint(3, 31, (3, 9))).logits.shape == (3, 9, 31), "another batch and length"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("yolov5n", 59), ("yolov8n", 48), ("yolo11n", 58)])
def test_yolo(name: str, count: int) -> None:
    model = pytest.importorskip("ultralytics").YOLO(f"{name}.yaml", verbose=False).model
    image = torch.randn(1, 3, 64, 64)
    groups = find_groups(model, image)
    assert len(groups) == count
    assert share(groups) > 0.9
    prove(model.requires_grad_(False), groups, image, seed=5, memory=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Unet", "FPN", "MAnet"])
def test_segmentation(name: str) -> None:
    library = pytest.importorskip("segmentation_models_pytorch")
    model = getattr(library, name)("resnet18", encoder_weights=None)
    image = torch.randn(1, 3, 64, 64)
    groups = find_groups(model, image)
    assert share(groups) > 0.99
    prove(model.requires_grad_(False), groups, image, seed=6, memory=False)
