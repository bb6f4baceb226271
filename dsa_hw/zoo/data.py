"""Data sets by name: digits of scikit-learn, CIFAR-10 from an .npz file, pictures in class folders, the user's loaders.

A loader is any object that can be iterated repeatedly and yields (images, labels), such as torch's ``DataLoader``.
`Batches` is faster for data sets that fit into memory: it augments a whole batch at once and needs no workers.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dsa_hw.errors import ModelError
from dsa_hw.utils.text import first_line, one_line, unknown_name
from dsa_hw.zoo.image_folder import ImageBatches, class_folders
from dsa_hw.zoo.preprocessing import IMAGENET, Preprocessing
from dsa_hw.zoo.user_code import call_function, is_code

__all__ = ["FORMS", "Batches", "Data", "in_order", "load_data"]

FORMS = "digits, cifar10:FILE.npz, imagefolder:DIR or package.module:loaders"
_LARGEST = 2**31  # bytes; CIFAR-10 has 184 million
# Per-channel mean and standard deviation. CIFAR-10 uses those of ImageNet, as the pretrained ResNet-20 does.
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

    def plain(self) -> Batches:
        """Return the same batches without augmentation."""
        return replace(self, augment=0, flip=False)

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
    """Disjoint loaders of one data set, and how a network is trained on them.

    Attributes:
        name: The name.
        train: Loader for the weights.
        val: Loader for the keep ratios.
        test: Loader for reported accuracies; None where the user gives none.
        shape: Shape of one example, (1, C, H, W); None where the user's batches do not show it.
        classes: Number of classes; None where it is not known.
        loss: ``loss(outputs, targets)``; None is the cross entropy.
        step: ``step(model, batch)`` instead of ``loss``.
        metric: ``metric(outputs, targets)``; None is the accuracy.
    """

    name: str
    train: Iterable[Any]
    val: Iterable[Any]
    test: Any
    shape: tuple[int, ...] | None
    classes: int | None
    loss: Any = None
    step: Any = None
    metric: Any = None

    @property
    def skipped(self) -> int:
        """How many images could not be read so far."""
        loaders = (self.train, self.val, self.test)
        return len({file for loader in loaders for file in getattr(loader, "skipped", ())})

    @property
    def whole(self) -> Batches:
        """``train`` and ``val`` in one loader, for training weights after the keep ratios are determined.

        Raises:
            ModelError: They are not images in memory.
        """
        train, val = self.train, self.val
        if not isinstance(train, Batches) or not isinstance(val, Batches):
            raise ModelError(f"`train` and `val` of {self.name} cannot be joined; that needs images in memory.")
        images, labels = torch.cat([train.images, val.images]), torch.cat([train.labels, val.labels])
        return replace(train, images=images, labels=labels, epoch=0)


def in_order(loader: Iterable[Any]) -> Iterable[Any]:
    """Return a loader of this project without shuffling and augmentation, so that it yields every image as it is.

    A loader of the user is returned unchanged.
    """
    if not isinstance(loader, (Batches, ImageBatches)):
        return loader
    found = loader.plain()
    found.shuffle = False
    return found


def load_data(
    name: str,
    path: str | Path | None = None,
    batch: int = 128,
    seed: int = 0,
    val_share: float = 0.1,
    *,
    workers: int = 0,
    preprocessing: Preprocessing | None = None,
    imports: bool = True,
) -> Data:
    """Load a data set by name.

    ``imagefolder:DIR`` reads folders of classes. With DIR/train, DIR/val and DIR/test these are the three loaders. With
    train and one of the others, that one is ``test``, and ``val`` is taken from the training images. Class folders
    directly in DIR are divided: a tenth each for ``val`` and ``test``.

    ``package.module:loaders`` calls a function of the user. It returns a dict with ``train`` and ``val``, and possibly
    ``test``, ``loss``, ``step`` and ``metric``, or a tuple of two or three loaders.

    Args:
        name: ``digits`` (1,797 images, part of scikit-learn), ``cifar10`` or ``cifar10:FILE``, ``imagefolder:DIR``, or
            ``package.module:loaders``.
        path: For ``cifar10``, an .npz file with x_train, y_train, x_test and y_test, or the folder that contains it as
            cifar10.npz; the current folder where it is not given.
        batch: Images per batch; ``digits`` uses at most 64.
        seed: Seed of the split into ``train`` and ``val``, of the order and of the augmentation.
        val_share: Share of the training images for ``val``; the DSA paper uses 10%.
        workers: Processes that read pictures of ``imagefolder``.
        preprocessing: How its pictures become inputs; see `dsa_hw.zoo.models.preprocessing_of`.
        imports: Whether a function of the user may be imported; see `dsa_hw.zoo.models.load_model`.

    Returns:
        Loaders for training, validation and test.

    Raises:
        ModelError: The name is unknown, the file is missing or damaged, or the user's function fails.

    Example:
        >>> digits = load_data("digits")
        >>> len(digits.train.images), len(digits.val.images), len(digits.test.images)
        (1293, 144, 360)
    """
    kind, _, rest = name.partition(":")
    if name == "digits":
        return _digits(batch, seed, val_share)
    if kind == "cifar10":
        return _cifar10(rest or path, batch, seed, val_share)
    if kind == "imagefolder" and rest:
        return _image_folder(rest, batch, seed, val_share, workers, preprocessing or Preprocessing())
    if is_code(name) and imports:
        return _user_loaders(name)
    near = difflib.get_close_matches(kind, ("digits", "cifar10", "imagefolder"), 1)
    guess = f"imagefolder:{name}" if Path(name).is_dir() else near[0] if near and near[0] != kind else ""
    hint = f" Did you mean {one_line(guess, 80)!r}?" if guess else ""
    raise ModelError(f"Unknown data {one_line(name, 80)!r}.{hint} Use {FORMS}.")


def _image_folder(
    folder: str, batch: int, seed: int, val_share: float, workers: int, preprocessing: Preprocessing
) -> Data:
    root = Path(folder)
    parts = {name: class_folders(root / name) for name in ("train", "val", "test") if (root / name).is_dir()}
    if not parts:
        parts = _divided(class_folders(root), {"test": val_share, "val": val_share}, seed)
    elif "train" not in parts or len(parts) == 1:
        raise ModelError(
            f"{root} must have train and val or test, or only folders of classes; it has {', '.join(parts)}."
        )
    elif len(parts) == 2:
        test = next(name for name in parts if name != "train")
        parts = {**_divided(parts["train"], {"val": val_share}, seed), "test": parts[test]}
    classes = {name: i for i, name in enumerate(parts["train"])}
    if len(classes) == 1:
        raise ModelError(
            f"{root} has only the class {next(iter(classes))!r}, and a classifier needs two or more. Give the folder "
            "that has a folder for each class."
        )
    for name, found in parts.items():
        if other := [label for label in found if label not in classes]:
            raise ModelError(f"{root / name} has classes that {root / 'train'} has not, such as {other[0]!r}.")

    def loader(part: str, **options: Any) -> ImageBatches:
        pairs = [(file, classes[label]) for label, files in parts[part].items() for file in files]
        files, labels = zip(*pairs, strict=True)
        return ImageBatches(files, labels, preprocessing, batch, workers=workers, seed=seed, **options)

    shape = (1, 3, *preprocessing.size)
    train, val = loader("train", shuffle=True, augment=True), loader("val", shuffle=True)
    return Data(f"imagefolder:{root.name}", train, val, loader("test"), shape, len(classes))


def _divided(classes: dict[str, list[Path]], shares: dict[str, float], seed: int) -> dict[str, dict[str, list[Path]]]:
    """Divide the files of every class; what is left is ``train``.

    Raises:
        ModelError: A class has too few images.
    """
    found: dict[str, dict[str, list[Path]]] = {name: {} for name in ("train", *shares)}
    rng = torch.Generator().manual_seed(seed)
    for label, files in classes.items():
        rest = [files[i] for i in torch.randperm(len(files), generator=rng).tolist()]
        if len(rest) <= len(shares):
            raise ModelError(f"Class {label!r} has {len(rest)} images; dividing them needs {len(shares) + 1} or more.")
        for name, share in shares.items():
            cut = max(round(share * len(files)), 1)
            found[name][label], rest = sorted(rest[:cut]), rest[cut:]
        found["train"][label] = sorted(rest)
    return found


def _user_loaders(name: str) -> Data:
    what = "a dict with train and val, or a tuple of two or three loaders"
    made = call_function(name, "data", what)
    if isinstance(made, Data):
        return made
    if isinstance(made, (tuple, list)) and len(made) in (2, 3):
        made = dict(zip(("train", "val", "test"), made, strict=False))
    known = ("train", "val", "test", "loss", "step", "metric", "classes")
    if not isinstance(made, dict) or not {"train", "val"} <= set(made):
        got = f"a dict with {', '.join(map(str, made))}" if isinstance(made, dict) else f"a {type(made).__name__}"
        raise ModelError(f"{name} must return {what}; it returned {got}.")
    if other := [key for key in made if key not in known]:
        raise ModelError(unknown_name(f"key of {name}()", str(other[0]), known, "keys"))
    return Data(shape=_example_shape(name, made["val"]), **{"name": name, "test": None, "classes": None, **made})


def _example_shape(name: str, loader: Any) -> tuple[int, ...] | None:
    """Return the shape of one input of a loader of the user; None where its first batch does not show it.

    Raises:
        ModelError: The first batch cannot be loaded.
    """
    if isinstance(loader, (Iterator, Dataset)) or not isinstance(loader, Iterable):
        return None  # what uses the loader says what is wrong with it
    try:
        first = next(iter(loader), None)
    except Exception as error:  # whatever the data set of the user raises
        lines = str(error).strip().splitlines() or [type(error).__name__]  # of a worker: after its traceback
        raise ModelError(
            f"The first batch of `val` of {name} cannot be loaded ({one_line(lines[-1], 200)})."
        ) from error
    inputs = first[0] if isinstance(first, (tuple, list)) and first else None
    return (1, *inputs.shape[1:]) if isinstance(inputs, Tensor) and inputs.ndim > 1 else None


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
        tensors["x_train"], tensors["y_train"].long(), batch, IMAGENET, val_share, seed, augment=4, flip=True
    )
    test = _plain(tensors["x_test"], tensors["y_test"].long(), 500, IMAGENET)
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
