"""Pictures in folders: batches of them, with labels from the names of the folders or without."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dsa_hw.errors import ModelError
from dsa_hw.utils.text import first_line
from dsa_hw.zoo.preprocessing import Preprocessing

__all__ = ["ImageBatches", "class_folders", "find_images", "unlabelled_images"]

_log = logging.getLogger(__name__)

_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_NAMED = 3  # skipped files that are named one by one


def find_images(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the picture files in a folder and its subfolders, sorted.

    Raises:
        ModelError: There is no such folder, or it has no pictures.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ModelError(f"There is no folder of images {str(folder)!r}.")
    found = sorted(
        Path(path, name)
        for path, _, names in os.walk(root, followlinks=True)
        for name in names
        if Path(name).suffix.lower() in _SUFFIXES
    )
    if not found:
        raise ModelError(f"The folder {root} has no images ({', '.join(sorted(_SUFFIXES))}).")
    return found


def class_folders(folder: str | os.PathLike[str]) -> dict[str, list[Path]]:
    """Return the pictures of each class: class folders, sorted by name, as torchvision's ``ImageFolder`` has them.

    Raises:
        ModelError: There are no class folders, or one has no pictures.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ModelError(f"There is no folder of images {str(folder)!r}.")
    names = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise ModelError(
            f"{root} must have a folder for each class, such as {root / 'cat'}; it has no folders. Give images "
            "without classes as --images DIR."
        )
    return {name: find_images(root / name) for name in names}


def unlabelled_images(
    folder: str | os.PathLike[str], preprocessing: Preprocessing, *, batch: int = 32, workers: int = 0, seed: int = 0
) -> ImageBatches:
    """Return batches (B, 3, H, W) of the pictures in a folder and its subfolders, in random order.

    Args:
        folder: The folder; names of subfolders have no meaning.
        preprocessing: How a picture becomes an input of the network.
        batch: Pictures in a batch.
        workers: Processes that read pictures.
        seed: Seed of the order.
    """
    return ImageBatches(find_images(folder), None, preprocessing, batch, shuffle=True, workers=workers, seed=seed)


class ImageBatches:
    """Loader of pictures in files: batches of float32 (B, 3, H, W), with labels (B,) where there are labels.

    Order and augmentation depend on ``seed`` and ``epoch`` only, not on the number of workers. Each iteration
    increments ``epoch``; set it to resume. Files that cannot be read are left out of their batch, and listed in
    ``skipped``.

    Attributes:
        files: The pictures.
        labels: A class for each; None where there are none.
        preprocessing: How a picture becomes an input.
        batch: Pictures in a batch.
        shuffle: Whether each epoch has its own order.
        augment: Whether pictures are cropped and flipped at random; a last batch that is not full is then left out.
        workers: Processes that read pictures; 0 reads them in this one.
        seed: Seed of order and augmentation.
        epoch: Number of the next epoch.
        skipped: Files that could not be read so far, and why.
    """

    def __init__(
        self,
        files: Sequence[Path],
        labels: Sequence[int] | None,
        preprocessing: Preprocessing,
        batch: int,
        *,
        shuffle: bool = False,
        augment: bool = False,
        workers: int = 0,
        seed: int = 0,
    ) -> None:
        """Keep the settings; nothing is read yet."""
        self.files, self.labels = list(files), None if labels is None else list(labels)
        self.preprocessing, self.batch = preprocessing, batch
        self.shuffle, self.augment, self.workers, self.seed = shuffle, augment, workers, seed
        self.epoch = 0
        self.skipped: dict[Path, str] = {}

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        whole, rest = divmod(len(self.files), self.batch)
        return max(whole, 1) if self.augment else whole + bool(rest)

    def plain(self) -> ImageBatches:
        """Return the same pictures without augmentation; what cannot be read is listed in the same ``skipped``."""
        found = copy.copy(self)
        found.augment = False
        return found

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one epoch.

        Raises:
            ModelError: No file can be read.
        """
        seed = 1_000_003 * self.seed + self.epoch
        self.epoch += 1
        order = list(range(len(self.files)))
        if self.shuffle:
            order = torch.randperm(len(self.files), generator=torch.Generator().manual_seed(seed)).tolist()
        parts = [order[i * self.batch : (i + 1) * self.batch] for i in range(len(self))]
        source = _Pictures(self.files, self.labels, self.preprocessing, seed if self.augment else None)
        loader: DataLoader[Any] = DataLoader(
            source,
            batch_sampler=parts,
            collate_fn=_collated,
            num_workers=self.workers,
        )
        empty = True
        for images, labels, bad in loader:
            for index, reason in bad:
                self._skip(self.files[index], reason)
            if len(images):
                empty = False
                yield images if self.labels is None else (images, labels)
        if empty:
            raise ModelError(
                f"None of the {len(self.files)} images can be read; the first is {self.files[0]} "
                f"({self.skipped.get(self.files[0])})."
            )

    def _skip(self, file: Path, reason: str) -> None:
        if file not in self.skipped and len(self.skipped) < _NAMED:
            _log.warning("Skipped an image that cannot be read: %s (%s).", file, reason)
        self.skipped[file] = reason


class _Pictures(Dataset[Any]):
    """The pictures as a data set for torch, so that its workers can read them."""

    def __init__(
        self, files: list[Path], labels: list[int] | None, preprocessing: Preprocessing, seed: int | None
    ) -> None:
        self.files, self.labels, self.preprocessing, self.seed = files, labels, preprocessing, seed

    def __getitem__(self, index: int) -> tuple[int, Tensor | str, int]:
        from PIL import Image

        try:
            with Image.open(self.files[index]) as picture:
                if self.seed is None:
                    found: Tensor | str = self.preprocessing(picture)
                else:
                    found = self.preprocessing.augmented(picture, self.seed * 1_000_003 + index)
        except ModelError:
            raise
        except Exception as error:  # Pillow raises a dozen unrelated classes for a damaged file
            found = first_line(error)
        return index, found, -1 if self.labels is None else self.labels[index]


def _collated(items: list[tuple[int, Tensor | str, int]]) -> tuple[Tensor, Tensor, list[tuple[int, str]]]:
    good = [(found, label) for _, found, label in items if isinstance(found, Tensor)]
    bad = [(index, found) for index, found, _ in items if isinstance(found, str)]
    images = torch.stack([found for found, _ in good]) if good else torch.empty(0)
    return images, torch.tensor([label for _, label in good]), bad
