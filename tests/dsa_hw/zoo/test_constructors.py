"""Networks of libraries are recognised, and made again from plain data."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dsa_hw.errors import ModelError
from dsa_hw.zoo.constructors import Constructor, constructor_of
from dsa_hw.zoo.models import load_model
from dsa_hw.zoo.torchvision_compat import torchvision

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


def image(side: int, channels: int = 3) -> torch.Tensor:
    return torch.zeros(1, channels, side, side)


def own_head() -> Made:
    model = torchvision.models.resnet18()
    model.fc = nn.Linear(512, 5)
    return model, (image(32),)


def mobilenet() -> Made:
    return torchvision.models.get_model("mobilenet_v3_small", num_classes=4), (image(64),)


def segmentation() -> Made:
    model = torchvision.models.get_model(
        "lraspp_mobilenet_v3_large", weights=None, weights_backbone=None, num_classes=3
    )
    return model, (image(64),)


def timm_network() -> Made:
    timm = pytest.importorskip("timm", reason="pip install 'dsa-hw[timm]'")
    return timm.create_model("test_resnet", in_chans=1, num_classes=3), (image(48, 1),)


def timm_vit() -> Made:
    timm = pytest.importorskip("timm", reason="pip install 'dsa-hw[timm]'")
    return timm.create_model("test_vit", img_size=64, num_classes=3), (image(64),)


def bert() -> Made:
    transformers = pytest.importorskip("transformers", reason="pip install 'dsa-hw[transformers]'")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, num_labels=3,
        hidden_act="relu", max_position_embeddings=20,
    )  # fmt: skip
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    return transformers.BertForSequenceClassification(config), (tokens, torch.ones_like(tokens))


def hf_resnet() -> Made:
    transformers = pytest.importorskip("transformers", reason="pip install 'dsa-hw[transformers]'")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )  # fmt: skip
    return transformers.ResNetForImageClassification(config), (image(32),)


@pytest.mark.parametrize(
    "make", [lambda: load_model("resnet20", classes=3), own_head, mobilenet, segmentation, timm_network, timm_vit, bert,
             hf_resnet],
    ids=["dsa_hw", "own head", "mobilenet", "segmentation", "timm", "timm vit", "bert", "hf resnet"],
)  # fmt: skip
def test_network_is_made_again_from_its_record(make: Callable[[], Made]) -> None:
    model, inputs = make()
    model.eval()
    before = copy.deepcopy(model.state_dict())
    found = constructor_of(model, inputs)
    assert found is not None
    text = json.dumps(found.model_dump(mode="json"))
    again = Constructor.model_validate_json(text).build()
    again.load_state_dict(model.state_dict())
    noise = [torch.randn(x.shape) if x.is_floating_point() else x for x in inputs]
    with torch.no_grad():
        for a, b in zip(_tensors(model(*noise)), _tensors(again(*noise)), strict=True):
            torch.testing.assert_close(a, b)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else [v for v in outputs.values() if v is not None]


def test_network_that_computes_something_else_has_no_record() -> None:
    model, inputs = own_head()
    model.relu = nn.Tanh()
    assert constructor_of(model.eval(), inputs) is None, "equal names and shapes, other outputs"
    model, inputs = own_head()
    model.extra = nn.Linear(2, 2)
    assert constructor_of(model.eval(), inputs) is None
    assert constructor_of(nn.Sequential(nn.Linear(2, 2)), (torch.zeros(1, 2),)) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": None}, "permitted for torchvision: num_classes"),
        ({"num_classes": "many"}, "must be a number"),
        ({"num_classes": [[[[[1]]]]]}, "must be a number"),
        ({"image_size": 32}, "Cannot make torchvision resnet18"),
    ],
)
def test_arguments_that_are_not_permitted_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Constructor(library="torchvision", name="resnet18", arguments=arguments).build()
