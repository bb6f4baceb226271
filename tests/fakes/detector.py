"""A small detector like RetinaNet: backbone, feature pyramid, two heads, and a focal and a box loss of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SIDE, CLASSES = 32, 3


@dataclass
class Detections:
    """Class scores (B, A, classes) and boxes (B, A, 4), as centre and size, of all cells of all levels."""

    scores: Tensor
    boxes: Tensor


def _block(before: int, after: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
    )


class Detector(nn.Module):
    """Two levels, one anchor for each cell, heads shared between the levels."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(_block(3, width, 2), _block(width, width, 2))
        self.deep = _block(width, 2 * width, 2)
        self.lateral = nn.ModuleList([nn.Conv2d(width, width, 1), nn.Conv2d(2 * width, width, 1)])
        self.tower = _block(width, width)
        self.classes = nn.Conv2d(width, CLASSES, 3, padding=1)
        self.boxes = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, images: Tensor) -> Detections:
        fine = self.stem(images)
        coarse = self.lateral[1](self.deep(fine))
        fine = self.lateral[0](fine) + functional.interpolate(coarse, scale_factor=2.0)
        towers = [self.tower(fine), self.tower(coarse)]
        parts = [[head(level).flatten(2).mT for level in towers] for head in (self.classes, self.boxes)]
        return Detections(torch.cat(parts[0], 1), torch.cat(parts[1], 1).sigmoid())

    def loss(self, batch: dict[str, Any]) -> Tensor:
        """Focal loss of the nearest cell of each level to each object, and L1 distance of its box."""
        found = self(batch["image"])
        cells = torch.cat([_centres(SIDE // 4), _centres(SIDE // 8)])
        wanted = torch.zeros_like(found.scores)
        distance = found.boxes.new_zeros(())
        for picture, label, box in zip(batch["picture"], batch["label"], batch["box"], strict=True):
            nearest = int((cells - box[:2]).square().sum(1).argmin())
            wanted[picture, nearest, label] = 1.0
            distance = distance + (found.boxes[picture, nearest] - box).abs().sum()
        entropy = functional.binary_cross_entropy_with_logits(found.scores, wanted, reduction="none")
        focal = ((1 - (-entropy).exp()) ** 2 * entropy).sum()
        return (focal + distance) / max(len(batch["label"]), 1)


def _centres(count: int) -> Tensor:
    line = (torch.arange(count) + 0.5) / count
    return torch.stack([line.repeat(count), line.repeat_interleave(count)], 1)


def scenes(count: int, size: int = 8, seed: int = 0) -> list[dict[str, Any]]:
    """Return batches of pictures with one to three coloured squares each; objects of all pictures are in one list."""
    rng = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        image, picture, labels, boxes = torch.zeros(size, 3, SIDE, SIDE), [], [], []
        for i in range(size):
            for _ in range(int(torch.randint(1, 4, (1,), generator=rng))):
                side, label = int(torch.randint(6, 14, (1,), generator=rng)), int(torch.randint(3, (1,), generator=rng))
                x, y = (int(torch.randint(0, SIDE - side, (1,), generator=rng)) for _ in range(2))
                image[i, label, y : y + side, x : x + side] = 1.0
                picture.append(i)
                labels.append(label)
                boxes.append([(x + side / 2) / SIDE, (y + side / 2) / SIDE, side / SIDE, side / SIDE])
        batches.append({"image": image, "picture": picture, "label": labels, "box": torch.tensor(boxes)})
    return batches
