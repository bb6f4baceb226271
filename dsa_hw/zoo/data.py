"""Images in memory, as loaders: scikit-learn's digits (comes with scikit-learn) and CIFAR-10 (an .npz file).

A loader here is any re-iterable of (images, labels); torch's ``DataLoader`` is one, `Batches` is a quicker one for data
sets that fit into memory: it augments a whole batch at once and needs no workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_hw.errors import ModelError

__all__ = ["NAMES", "Batches", "Data", "load_data"]

NAMES = ("digits", "cifar10")
# Per-channel mean and deviation. CIFAR-10: ImageNet's, as the shared trained ResNet-20 expects.
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_CENTRED = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass
class Batches:
    """Images (N, H, W, C) uint8 and labels (N,) as batches of normalised float32 (B, C, H, W), channels last.

    ``augment`` shifts by up to that many pixels (zero padding) and, with ``flip``, mirrors half of the images. Order
    and shifts depend on ``seed`` and ``epoch`` alone; ``epoch`` counts itself up and can be set to resume.
    """

    images: Tensor
    labels: Tensor
    batch: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    shuffle: bool = False
    augment: int = 0
    flip: bool = False
    seed: int = 0
    epoch: int = 0

    def __len__(self) -> int:
        """Number of batches; while shuffling, a last one that is not full is left out."""
        whole, rest = divmod(len(self.images), self.batch)
        return max(whole, 1) if self.shuffle else whole + bool(rest)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch."""
        rng = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
        self.epoch += 1
        count, side = len(self.images), self.images.shape[1]
        order = torch.randperm(count, generator=rng) if self.shuffle else torch.arange(count)
        pad = self.augment
        source = torch.nn.functional.pad(self.images, (0, 0, pad, pad, pad, pad)) if pad else self.images
        # (x / 255 - mean) / deviation as one multiplication and one addition
        scale = 1.0 / (255.0 * torch.tensor(self.deviation))
        shift = -torch.tensor(self.mean) / torch.tensor(self.deviation)
        steps = torch.arange(side)
        for start in range(0, len(self) * self.batch, self.batch):
            index = order[start : start + self.batch]
            if pad or self.flip:
                size = len(index)
                rows = steps + torch.randint(0, 2 * pad + 1, (size, 1), generator=rng)
                columns = steps.expand(size, side)
                if self.flip:
                    mirrored = torch.rand((size, 1), generator=rng) < 0.5
                    columns = torch.where(mirrored, columns.flip(1), columns)
                columns = columns + torch.randint(0, 2 * pad + 1, (size, 1), generator=rng)
                picture = source[index[:, None, None], rows[:, :, None], columns[:, None, :]]
            else:
                picture = source[index]
            yield picture.float().mul_(scale).add_(shift).permute(0, 3, 1, 2), self.labels[index]

    def first(self, count: int) -> Batches:
        """The first ``count`` images only."""
        return replace(self, images=self.images[:count], labels=self.labels[:count])


@dataclass(frozen=True)
class Data:
    """Three disjoint loaders; ``shape`` is one example (1, C, H, W). ``val`` decides keep ratios, ``test`` reports."""

    name: str
    train: Batches
    val: Batches
    test: Batches
    shape: tuple[int, ...]
    classes: int

    @property
    def whole(self) -> Batches:
        """``train`` and ``val`` as one loader like ``train``: for weights, once no image is needed for keep ratios."""
        parts = (self.train, self.val)
        images, labels = (torch.cat([getattr(part, name) for part in parts]) for name in ("images", "labels"))
        return replace(self.train, images=images, labels=labels, epoch=0)


def load_data(
    name: str, path: str | Path | None = None, batch: int = 128, seed: int = 0, val_share: float = 0.1
) -> Data:
    """A data set by name. ``path``: CIFAR-10's .npz (x_train, y_train, x_test, y_test) or the folder with cifar10.npz.

    ``val_share`` of the training images go to ``val`` (the paper keeps 10 % for the keep ratios).
    """
    if name == "digits":
        return _digits(batch, seed, val_share)
    if name == "cifar10":
        return _cifar10(path, batch, seed, val_share)
    raise ModelError(f"no data set is called {name!r}: choose from {', '.join(NAMES)}, or give your own loaders")


def _digits(batch: int, seed: int, val_share: float) -> Data:
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = torch.from_numpy(digits.images).float()[:, None] / 16.0
    large = torch.nn.functional.interpolate(small, size=32, mode="bilinear", align_corners=False)
    images = (large * 255.0).round().to(torch.uint8).permute(0, 2, 3, 1).expand(-1, -1, -1, 3).contiguous()
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # the test set is always the same
    test, rest = order[:360], order[360:]
    # 1,437 images make few batches: smaller ones make more steps.
    train, val = _split(images[rest], labels[rest], min(batch, 64), _CENTRED, val_share, seed, augment=2, flip=False)
    return Data("digits", train, val, _plain(images[test], labels[test], batch, _CENTRED), (1, 3, 32, 32), 10)


def _cifar10(path: str | Path | None, batch: int, seed: int, val_share: float) -> Data:
    file = Path(path or ".")
    file = file / "cifar10.npz" if file.is_dir() else file
    try:
        with np.load(file, allow_pickle=False) as archive:
            parts: dict[str, NDArray[np.generic]] = {
                key: archive[key] for key in ("x_train", "y_train", "x_test", "y_test")
            }
    except (OSError, KeyError, ValueError) as error:
        raise ModelError(
            f"CIFAR-10 cannot be read from {file} ({error}): give the .npz with x_train, y_train, x_test, y_test "
            "(images uint8, N x 32 x 32 x 3)"
        ) from error
    tensors = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in parts.items()}
    train, val = _split(
        tensors["x_train"], tensors["y_train"].long(), batch, _IMAGENET, val_share, seed, augment=4, flip=True
    )
    test = _plain(tensors["x_test"], tensors["y_test"].long(), 500, _IMAGENET)
    return Data("cifar10", train, val, test, (1, 3, 32, 32), 10)


_Statistics = tuple[tuple[float, ...], tuple[float, ...]]


def _plain(images: Tensor, labels: Tensor, batch: int, statistics: _Statistics) -> Batches:
    return Batches(images, labels, batch, *statistics)


def _split(
    images: Tensor,
    labels: Tensor,
    batch: int,
    statistics: _Statistics,
    val_share: float,
    seed: int,
    *,
    augment: int,
    flip: bool,
) -> tuple[Batches, Batches]:
    """Training and validation loaders; validation is shuffled too (every step takes its next batch) but not moved."""
    if not 0.0 < val_share < 1.0:
        raise ModelError(f"val_share is {val_share}: it must lie between 0 and 1, for example 0.1")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    cut = round(val_share * len(labels))
    val, train = order[:cut], order[cut:]
    return (
        Batches(images[train], labels[train], batch, *statistics, shuffle=True, augment=augment, flip=flip, seed=seed),
        Batches(images[val], labels[val], batch, *statistics, shuffle=True, seed=seed),
    )
