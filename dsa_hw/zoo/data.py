"""Data sets by name: the digits of scikit-learn, and CIFAR-10 from an .npz file.

A loader is any object that can be iterated repeatedly and yields (images, labels), such as torch's ``DataLoader``.
`Batches` is faster for data sets that fit into memory: it augments a whole batch at once and needs no workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_hw.errors import ModelError
from dsa_hw.utils.text import first_line, unknown_name

__all__ = ["NAMES", "Batches", "Data", "load_data"]

NAMES = ("digits", "cifar10")
# Per-channel mean and standard deviation. CIFAR-10 uses those of ImageNet, as the pretrained ResNet-20 does.
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_LARGEST = 2**31  # bytes; CIFAR-10 has 184 million
_CENTRED = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass
class Batches:
    """Loader of images in memory: batches of float32 (B, C, H, W) in channels-last format, and labels (B,).

    Order and augmentation depend on ``seed`` and ``epoch`` only. Each iteration increments ``epoch``; set it to resume.

    Attributes:
        images: All images, (N, H, W, C) uint8.
        labels: All labels, (N,).
        batch: Images per batch.
        mean: Mean per channel of images scaled to [0, 1].
        deviation: Standard deviation per channel.
        shuffle: Whether each epoch has its own order; a last batch that is not full is then left out.
        augment: Largest random shift in pixels, padded with zeros.
        flip: Whether half of the images are mirrored.
        seed: Seed of order and augmentation.
        epoch: Number of the next epoch.
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
        """Return the number of batches of an epoch."""
        whole, rest = divmod(len(self.images), self.batch)
        return max(whole, 1) if self.shuffle else whole + bool(rest)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of one epoch."""
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


@dataclass(frozen=True)
class Data:
    """Three disjoint loaders of one data set; ``val`` is for the keep ratios, ``test`` for reported accuracies.

    ``shape`` is the shape of one example, (1, C, H, W).
    """

    name: str
    train: Batches
    val: Batches
    test: Batches
    shape: tuple[int, ...]
    classes: int

    @property
    def whole(self) -> Batches:
        """``train`` and ``val`` in one loader, for training weights after the keep ratios are determined."""
        parts = (self.train, self.val)
        images, labels = (torch.cat([getattr(part, name) for part in parts]) for name in ("images", "labels"))
        return replace(self.train, images=images, labels=labels, epoch=0)


def load_data(
    name: str, path: str | Path | None = None, batch: int = 128, seed: int = 0, val_share: float = 0.1
) -> Data:
    """Load a data set by name.

    Args:
        name: ``digits`` (1,797 images, part of scikit-learn) or ``cifar10``.
        path: For ``cifar10``, an .npz file with x_train, y_train, x_test and y_test, or the folder that contains it as
            cifar10.npz; the current folder where it is not given.
        batch: Images per batch; ``digits`` uses at most 64.
        seed: Seed of the split into ``train`` and ``val``, of the order and of the augmentation.
        val_share: Share of the training images for ``val``; the DSA paper uses 10%.

    Returns:
        Loaders for training, validation and test.

    Raises:
        ModelError: The name is unknown, or the file is missing or damaged.

    Example:
        >>> digits = load_data("digits")
        >>> len(digits.train.images), len(digits.val.images), len(digits.test.images)
        (1293, 144, 360)
    """
    if name == "digits":
        return _digits(batch, seed, val_share)
    if name == "cifar10":
        return _cifar10(path, batch, seed, val_share)
    raise ModelError(unknown_name("data set", name, NAMES))


def _digits(batch: int, seed: int, val_share: float) -> Data:
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = torch.from_numpy(digits.images).float()[:, None] / 16.0
    large = torch.nn.functional.interpolate(small, size=32, mode="bilinear", align_corners=False)
    images = (large * 255.0).round().to(torch.uint8).permute(0, 2, 3, 1).expand(-1, -1, -1, 3).contiguous()
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # one test set for all seeds
    test, rest = order[:360], order[360:]
    # Small batches, so that an epoch of 1,293 images has enough steps.
    train, val = _split(images[rest], labels[rest], min(batch, 64), _CENTRED, val_share, seed, augment=2, flip=False)
    return Data("digits", train, val, _plain(images[test], labels[test], batch, _CENTRED), (1, 3, 32, 32), 10)


def _cifar10(path: str | Path | None, batch: int, seed: int, val_share: float) -> Data:
    file = Path(path or ".")
    file = file / "cifar10.npz" if file.is_dir() else file
    try:
        with open(file, "rb") as opened:
            if opened.read(2) != b"PK":  # NumPy would take text for a pickle and advise to trust it
                raise ValueError("it is not an .npz file")
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it contains a single array")
        with archive:
            if archive.zip is not None and sum([part.file_size for part in archive.zip.infolist()]) > _LARGEST:
                raise ValueError(f"it has more than {_LARGEST} bytes")
            parts = {key: np.ascontiguousarray(archive[key]) for key in ("x_train", "y_train", "x_test", "y_test")}
        for images, labels in (("x_train", "y_train"), ("x_test", "y_test")):
            _check_cifar10(images, parts[images], parts[labels])
    except Exception as error:  # NumPy, zipfile and zlib raise a dozen unrelated classes for a damaged file
        said = "it is damaged" if isinstance(error, (MemoryError, RuntimeError)) else first_line(error)
        raise ModelError(
            f"Cannot read CIFAR-10 from {file}: {said}. Use an .npz file with x_train and "
            "x_test (uint8, N x 32 x 32 x 3), y_train and y_test (N integers from 0 to 9)."
        ) from error
    tensors = {key: torch.from_numpy(value) for key, value in parts.items()}
    train, val = _split(
        tensors["x_train"], tensors["y_train"].long(), batch, _IMAGENET, val_share, seed, augment=4, flip=True
    )
    test = _plain(tensors["x_test"], tensors["y_test"].long(), 500, _IMAGENET)
    return Data("cifar10", train, val, test, (1, 3, 32, 32), 10)


def _check_cifar10(name: str, images: NDArray[Any], labels: NDArray[Any]) -> None:
    if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3) or not len(images):
        raise ValueError(f"{name} has type {images.dtype} and shape {images.shape}")
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() > 9:
        raise ValueError(f"the labels of {name} do not match its {len(images)} images or are not from 0 to 9")


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
    """Return loaders for training and validation; validation is shuffled, but not augmented."""
    if not 0.0 < val_share < 1.0:
        raise ModelError(f"`val_share` must be between 0 and 1, for example 0.1; got {val_share}.")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    cut = round(val_share * len(labels))
    val, train = order[:cut], order[cut:]
    return (
        Batches(images[train], labels[train], batch, *statistics, shuffle=True, augment=augment, flip=flip, seed=seed),
        Batches(images[val], labels[val], batch, *statistics, shuffle=True, seed=seed),
    )
