"""Pictures become the inputs that torchvision and timm make of them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from dsa_hw.zoo.preprocessing import IMAGENET, Preprocessing
from dsa_hw.zoo.torchvision_compat import torchvision


def picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * height).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("width", "height"), [(300, 200), (201, 333), (64, 64), (227, 500)])
def test_evaluation_inputs_are_those_of_torchvision(width: int, height: int, interpolation: str) -> None:
    mode = torchvision.transforms.InterpolationMode(interpolation)
    wanted = torchvision.transforms._presets.ImageClassification(crop_size=160, resize_size=183, interpolation=mode)
    found = Preprocessing((160, 160), (183, 183), interpolation=interpolation)
    image = picture(width, height)
    torch.testing.assert_close(found(image), wanted(image))


@pytest.mark.parametrize("mode", ["center", "squash"])
def test_evaluation_inputs_are_those_of_timm(mode: str) -> None:
    transforms = pytest.importorskip("timm.data.transforms_factory")
    made = transforms.transforms_imagenet_eval(
        img_size=96, crop_pct=0.9, crop_mode=mode, interpolation="bicubic", mean=IMAGENET[0], std=IMAGENET[1]
    )
    found = Preprocessing((96, 96), (106, 106), interpolation="bicubic", squash=mode == "squash")
    image = picture(231, 150)
    torch.testing.assert_close(found(image), made(image))


def test_augmented_inputs_depend_on_the_seed_alone() -> None:
    found = partial(Preprocessing((32, 48)).augmented, picture(60, 80))
    assert found(1).shape == (3, 32, 48)
    assert torch.equal(found(1), found(1))
    assert len({float(found(seed).sum()) for seed in range(8)}) == 8


def test_another_size_cuts_off_the_same_share() -> None:
    assert Preprocessing((224, 224), (256, 256)).at(112, 112).resize == (128, 128)


def test_grey_of_16_bits_is_the_same_picture_as_of_8_bits() -> None:
    grey = np.asarray(picture(64, 64).convert("L"))
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    found = Preprocessing((64, 64), (64, 64))
    torch.testing.assert_close(found(deep), found(Image.fromarray(grey)))
    torch.testing.assert_close(found.augmented(deep, 1), found.augmented(Image.fromarray(grey), 1))
