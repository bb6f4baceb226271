"""Pictures in folders: which are found, in which order, and what becomes of damaged ones."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dsa_hw.errors import ModelError
from dsa_hw.zoo.image_folder import ImageBatches, class_folders, find_images, unlabelled_images
from dsa_hw.zoo.preprocessing import Preprocessing

SMALL = Preprocessing((8, 8), (9, 9))


def draw(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (12, 10, 3), np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(10):
        draw(tmp_path / "pets" / ("dog" if i % 2 else "cat") / f"{i}.png", i)
    (tmp_path / "pets" / "cat" / "notes.txt").write_text("no picture")
    return tmp_path / "pets"


def damage(folder: Path) -> list[Path]:
    """Cut off one file and empty another."""
    one, other = folder / "cat" / "0.png", folder / "dog" / "1.png"
    one.write_bytes(one.read_bytes()[:60])
    other.write_bytes(b"")
    return [one, other]


def test_classes_are_the_folders_in_the_order_of_their_names(folder: Path) -> None:
    found = class_folders(folder)
    assert list(found) == ["cat", "dog"]
    assert [len(files) for files in found.values()] == [5, 5]


@pytest.mark.parametrize("workers", [0, 2])
def test_order_and_augmentation_do_not_depend_on_workers(folder: Path, workers: int) -> None:
    def loader(workers: int) -> ImageBatches:
        files = find_images(folder)
        options = {"shuffle": True, "augment": True, "workers": workers, "seed": 3}
        return ImageBatches(files, range(len(files)), SMALL, 4, **options)

    plain, other = loader(0), loader(workers)
    first = list(plain)
    for (a, b), (x, y) in zip(first, other, strict=True):
        assert torch.equal(a, x)
        assert torch.equal(b, y)
    assert len(first) == len(plain) == 2  # a last batch of two is left out
    second = list(plain)
    assert not torch.equal(torch.cat([y for _, y in first]), torch.cat([y for _, y in second]))
    plain.epoch = 0
    assert torch.equal(next(iter(plain))[0], first[0][0])


def test_plain_images_are_the_files_without_augmentation(folder: Path) -> None:
    files = find_images(folder)
    loader = ImageBatches(files, range(len(files)), SMALL, 4, shuffle=True, augment=True)
    images = torch.cat([images for images, _ in loader.plain()])
    expected = torch.cat([images for images, _ in ImageBatches(files, range(len(files)), SMALL, 4)])
    assert len(images) == len(files), "a last batch that is not full is no longer left out"
    assert torch.equal(images.flatten(1).sum(1).sort().values, expected.flatten(1).sum(1).sort().values)
    assert (loader.augment, loader.epoch) == (True, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_images_are_skipped_and_counted(folder: Path, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    bad = damage(folder)
    files = find_images(folder)
    loader = ImageBatches(files, range(len(files)), SMALL, 4, workers=workers)
    with caplog.at_level(logging.WARNING):
        found = torch.cat([labels for _, labels in loader])
        assert len(list(loader)) == len(loader) == 3  # again: nothing is counted or reported twice
    assert sorted(loader.skipped) == sorted(bad)
    assert sorted(found.tolist()) == [i for i, file in enumerate(files) if file not in bad]
    assert len(caplog.records) == 2
    assert str(bad[0]) in caplog.text


def test_folder_without_a_readable_image_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"None of the 1 images can be read"):
        list(unlabelled_images(tmp_path, SMALL))


def test_unlabelled_images_are_batches_of_tensors(folder: Path) -> None:
    batches = list(unlabelled_images(folder, SMALL, batch=4))
    assert [tuple(batch.shape) for batch in batches] == [(4, 3, 8, 8), (4, 3, 8, 8), (2, 3, 8, 8)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: find_images(path / "none"), "There is no folder of images"),
        (find_images, "has no images"),
        (class_folders, "must have a folder for each class"),
    ],
)
def test_wrong_folders_are_refused(tmp_path: Path, make, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make(tmp_path)
