"""Networks by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dsa_hw.errors import ModelError
from dsa_hw.zoo.cifar import SMALL
from dsa_hw.zoo.models import load_model, parse_shape


def test_torchvision_network_takes_the_requested_input() -> None:
    model, inputs = load_model("resnet18", (2, 3, 32, 32))
    assert not model.training
    assert model(*inputs).shape == (2, 1000)


def test_weights_are_those_of_the_file(tmp_path: Path) -> None:
    trained, (image,) = load_model("resnet8")
    torch.save({"state_dict": {f"module.{k}": v for k, v in trained.state_dict().items()}}, tmp_path / "resnet8.th")
    model, _ = load_model("resnet8", weights=tmp_path / "resnet8.th")
    assert torch.equal(model(image), trained(image))
    with pytest.raises(ModelError, match="not both"):
        load_model("resnet18", pretrained=True, weights=tmp_path / "resnet8.th")
    with pytest.raises(ModelError, match="do not fit resnet20"):
        load_model("resnet20", weights=tmp_path / "resnet8.th")


@pytest.mark.parametrize("name", SMALL)
def test_small_networks_classify_32_x_32_images(name: str) -> None:
    model, inputs = load_model(name)
    with torch.no_grad():
        assert model(*inputs).shape == (1, 10)


def factory() -> tuple[nn.Module, torch.Tensor]:
    return nn.Linear(4, 2), torch.zeros(3, 4)


def test_factory_of_the_user_gives_network_and_inputs() -> None:
    model, inputs = load_model(f"{__name__}:factory")
    assert model(*inputs).shape == (3, 2)
    assert load_model(f"{__name__}:factory", (5, 4))[1][0].shape == (5, 4)


def test_name_from_a_file_cannot_import_code() -> None:
    with pytest.raises(ModelError, match="must not choose code"):
        load_model(f"{__name__}:factory", imports=False)


@pytest.mark.parametrize("text", ["", "1x", "x3", "0x3", "1x-3", "1 x 3", "big"])
def test_malformed_shapes_are_rejected(text: str) -> None:
    assert parse_shape("1,3x8") == (1, 3, 8)
    with pytest.raises(ModelError, match="1x3x224x224"):
        parse_shape(text)
