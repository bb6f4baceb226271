"""Data sets by name: disjoint splits, reproducible batches, and typed errors for damaged files."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dsa_hw.errors import ModelError
from dsa_hw.zoo.data import Batches, load_data

Arrays = dict[str, np.ndarray]


def arrays() -> Arrays:
    """CIFAR-10 in miniature: 40 training and 10 test images, each with a colour of its own."""
    colours = np.arange(50, dtype=np.uint8)[:, None, None, None]
    images = np.broadcast_to(colours, (50, 32, 32, 3))
    labels = np.arange(50) % 10
    return {"x_train": images[:40], "y_train": labels[:40], "x_test": images[40:], "y_test": labels[40:]}


def colours(loader: Batches) -> list[int]:
    return sorted(loader.images[:, 0, 0, 0].tolist())


def test_cifar10_is_split_into_disjoint_parts_of_the_right_shapes(tmp_path: Path) -> None:
    np.savez(tmp_path / "cifar10.npz", **arrays())
    found = load_data("cifar10", tmp_path, batch=8, val_share=0.25, seed=3)
    assert (found.shape, found.classes) == ((1, 3, 32, 32), 10)
    assert (len(found.train.images), len(found.val.images), len(found.test.images)) == (30, 10, 10)
    assert sorted(colours(found.train) + colours(found.val)) == list(range(40))
    assert colours(found.test) == list(range(40, 50))
    for part in (found.train, found.val, found.test):
        assert torch.equal(part.labels, part.images[:, 0, 0, 0].long() % 10), "each image keeps its label"
    x, y = next(iter(found.train))
    assert (x.shape, x.dtype, y.dtype) == ((8, 3, 32, 32), torch.float32, torch.int64)
    other = load_data("cifar10", tmp_path / "cifar10.npz", val_share=0.25, seed=4)
    assert colours(other.val) != colours(found.val), "another seed, another split"
    assert colours(other.test) == colours(found.test)


def test_cifar10_is_normalised_with_the_statistics_of_imagenet(tmp_path: Path) -> None:
    np.savez(tmp_path / "cifar10.npz", **arrays())
    (x, y), *more = load_data("cifar10", tmp_path).test
    assert more == []
    assert y.tolist() == list(range(10))
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = (np.arange(40, 50)[:, None] / 255 - mean) / deviation
    np.testing.assert_allclose(x[:, :, 7, 9].numpy(), expected, rtol=1e-5)


def _archive(content: Arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **content)
    return file.getvalue()


def _array_alone() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


@pytest.mark.parametrize(
    "damage",
    [
        lambda: b"",
        lambda: b"not an archive",
        lambda: _archive(arrays())[:2000],
        lambda: _archive(arrays()).replace(b"\x05" * 64, b"\x06" * 64),  # the checksum of an array is wrong
        _array_alone,
        lambda: _archive({"x_train": arrays()["x_train"]}),
        lambda: _archive({**arrays(), "x_test": np.zeros((10, 3, 32, 32), np.uint8)}),
        lambda: _archive({**arrays(), "x_train": arrays()["x_train"].astype(np.float32)}),
        lambda: _archive({**arrays(), "y_train": arrays()["y_train"][:-1]}),
        lambda: _archive({**arrays(), "y_test": arrays()["y_test"] + 1}),
        lambda: _archive({**arrays(), "y_test": np.array([{}] * 10, object)}),
    ],
    ids=["empty", "text", "truncated", "altered", "array", "incomplete", "axes", "type", "labels", "classes", "pickle"],
)
def test_damaged_cifar10_is_a_typed_error_in_one_line(damage: Callable[[], bytes], tmp_path: Path) -> None:
    path = tmp_path / "cifar10.npz"
    path.write_bytes(damage())
    with pytest.raises(
        ModelError, match=r"^Cannot read CIFAR-10 from .*cifar10\.npz: .+\. Use an \.npz file"
    ) as caught:
        load_data("cifar10", tmp_path)
    assert "\n" not in str(caught.value)


def test_no_damage_of_cifar10_is_a_traceback_or_other_data(tmp_path: Path) -> None:
    content = _archive({key: value[:2] for key, value in arrays().items()})
    path = tmp_path / "cifar10.npz"
    path.write_bytes(content)
    wanted = load_data("cifar10", tmp_path, val_share=0.5).test
    generator = random.Random(0)
    for _ in range(200):
        changed = bytearray(content)
        for _ in range(generator.choice([1, 1, 20])):
            changed[generator.randrange(len(changed))] = generator.randrange(256)
        path.write_bytes(changed[: generator.choice([len(changed), generator.randrange(len(changed))])])
        with contextlib.suppress(ModelError):
            found = load_data("cifar10", tmp_path, val_share=0.5).test
            assert torch.equal(found.images, wanted.images)
            assert torch.equal(found.labels, wanted.labels)


def test_missing_file_and_unknown_data_set_are_typed_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Cannot read CIFAR-10 from .*cifar10\.npz: .*No such file"):
        load_data("cifar10", tmp_path)
    with pytest.raises(ModelError, match=r"Unknown data 'imagenet'\. .*Use digits, cifar10:FILE"):
        load_data("imagenet")
    with pytest.raises(ModelError, match=r"between 0 and 1.*got 1\.0"):
        load_data("digits", val_share=1.0)


def test_digits_are_split_augmented_and_repeatable() -> None:
    found = load_data("digits", batch=64, seed=1)
    total = len(found.train.images) + len(found.val.images) + len(found.test.images)
    assert total == 1797
    x, y = next(iter(found.train))
    assert x.shape == (64, 3, 32, 32)
    assert x.dtype == torch.float32
    found.train.epoch = 0
    again, labels = next(iter(found.train))
    assert torch.equal(x, again)
    assert torch.equal(y, labels)
    third, _ = next(iter(found.train))
    assert not torch.equal(x, third), "another epoch, another order"


def test_training_and_validation_images_in_one_loader() -> None:
    found = load_data("digits", seed=1)
    whole = found.whole
    assert len(whole.images) == len(found.train.images) + len(found.val.images)
    assert (whole.augment, whole.shuffle, whole.batch) == (found.train.augment, True, found.train.batch)
    both = torch.cat([found.train.labels, found.val.labels])
    assert torch.equal(whole.labels.bincount(), both.bincount())
    seen = torch.cat([labels for _, labels in whole])
    assert len(seen) == len(whole) * whole.batch > len(found.train.images)
