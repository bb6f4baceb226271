"""From a picture to the input of a network: size, crop and normalisation as the weights were trained with."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dsa_hw.errors import ModelError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["IMAGENET", "Preprocessing"]

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation per channel of images scaled to [0, 1]."""
_AREA = (0.35, 1.0)  # of the random crop; less than usual is cut off, because fine-tuning is short
_RATIO = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Preprocessing:
    """How a picture becomes a tensor (3, H, W).

    Attributes:
        size: Height and width of the crop from the centre.
        resize: Height and width that the picture is resized to before, keeping its proportions; it covers both.
        mean: Mean per channel of images scaled to [0, 1].
        deviation: Standard deviation per channel.
        interpolation: "bilinear", "bicubic", "nearest" or "lanczos".
        squash: Whether resizing ignores the proportions.
    """

    size: tuple[int, int] = (224, 224)
    resize: tuple[int, int] = (256, 256)
    mean: tuple[float, ...] = IMAGENET[0]
    deviation: tuple[float, ...] = IMAGENET[1]
    interpolation: str = "bilinear"
    squash: bool = False

    def at(self, height: int, width: int) -> Preprocessing:
        """Return the same for another size of the input; the share that the crop cuts off stays."""
        rows, columns = (
            max(round(r * new / old), new) for r, new, old in zip(self.resize, (height, width), self.size, strict=True)
        )
        return replace(self, size=(height, width), resize=(rows, columns))

    def __call__(self, picture: Image) -> Tensor:
        """Resize, crop the centre and normalise, as for evaluation."""
        height, width = self.size
        picture = _colour(picture)
        picture = picture.resize(self._resized(*picture.size), self._filter())
        left, top = round((picture.width - width) / 2), round((picture.height - height) / 2)
        return self._normalised(picture.crop((left, top, left + width, top + height)))

    def augmented(self, picture: Image, seed: int) -> Tensor:
        """Crop a random part, flip it or not, and normalise, as for training."""
        rng = random.Random(seed)
        height, width = self.size
        picture = _colour(picture)
        area = rng.uniform(*_AREA) * picture.width * picture.height
        ratio = math.exp(rng.uniform(*map(math.log, _RATIO))) * width / height
        columns = min(max(round(math.sqrt(area * ratio)), 1), picture.width)
        rows = min(max(round(math.sqrt(area / ratio)), 1), picture.height)
        left, top = rng.randint(0, picture.width - columns), rng.randint(0, picture.height - rows)
        box = (left, top, left + columns, top + rows)
        found = self._normalised(picture.resize((width, height), self._filter(), box=box))
        return found.flip(2) if rng.random() < 0.5 else found

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        rows, columns = self.resize
        if self.squash:
            return columns, rows
        if rows == columns:  # the shorter side exactly, the other one rounded down, as torchvision does
            short, long = sorted((width, height))
            longer = int(rows * long / short)
            return (rows, longer) if width <= height else (longer, rows)
        factor = max(rows / height, columns / width)
        return round(width * factor), round(height * factor)

    def _filter(self) -> int:
        from PIL.Image import Resampling

        name = self.interpolation.upper()
        if name not in Resampling.__members__:
            raise ModelError(f"Unknown interpolation {self.interpolation!r}. Use bilinear or bicubic.")
        return Resampling[name]

    def _normalised(self, picture: Image) -> Tensor:
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255.0
        mean, deviation = torch.tensor(self.mean), torch.tensor(self.deviation)
        return ((pixels - mean[:, None, None]) / deviation[:, None, None]).contiguous()


def _colour(picture: Image) -> Image:
    """Return a picture with three channels of 8 bits; of 16 bits of grey, Pillow's own conversion makes white."""
    if picture.mode.startswith("I"):
        from PIL import Image

        picture = Image.fromarray((np.asarray(picture) // 256).clip(0, 255).astype(np.uint8))
    return picture.convert("RGB")
