"""Data of the user: class folders with and without splits, and loaders of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from dsa_hw.errors import ModelError
from dsa_hw.zoo.data import in_order, load_data
from dsa_hw.zoo.preprocessing import Preprocessing
from tests.dsa_hw.zoo.test_image_folder import draw

SMALL = Preprocessing((8, 8), (9, 9))
X, Y = torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)


def pets(folder: Path, count: int, *parts: str) -> None:
    for part in parts or ("",):
        for i in range(count):
            draw(folder / part / ("dog" if i % 2 else "cat") / f"{i}.png", i)


def files(loader: Any) -> set[Path]:
    return set(loader.files)


def test_class_folders_are_divided_by_class_and_seed(tmp_path: Path) -> None:
    pets(tmp_path, 20)
    data = load_data(f"imagefolder:{tmp_path}", batch=4, preprocessing=SMALL, seed=1)
    parts = [files(loader) for loader in (data.train, data.val, data.test)]
    assert [len(part) for part in parts] == [16, 2, 2]
    assert len(set.union(*parts)) == 20
    assert all(sorted(loader.labels) == [0, 1] for loader in (data.val, data.test))
    assert (data.shape, data.classes) == ((1, 3, 8, 8), 2)
    same, other = (load_data(f"imagefolder:{tmp_path}", preprocessing=SMALL, seed=seed) for seed in (1, 2))
    assert files(same.test) == parts[2]
    assert files(other.train) != parts[0]
    images, labels = next(iter(data.train))
    assert (images.shape, labels.shape) == ((4, 3, 8, 8), (4,))
    assert {
        float(label) for label, file in zip(data.test.labels, data.test.files, strict=True) if "dog" in str(file)
    } == {1}


@pytest.mark.parametrize("last", ["val", "test"])
def test_reported_images_are_those_of_the_other_folder(tmp_path: Path, last: str) -> None:
    pets(tmp_path, 10, "train", last)
    data = load_data(f"imagefolder:{tmp_path}", preprocessing=SMALL)
    assert {file.parts[-3] for file in data.test.files} == {last}
    assert {file.parts[-3] for file in [*data.train.files, *data.val.files]} == {"train"}
    assert (len(data.train.files), len(data.val.files), len(data.test.files)) == (8, 2, 10)


def test_three_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    pets(tmp_path, 4, "train", "val", "test")
    data = load_data(f"imagefolder:{tmp_path}", preprocessing=SMALL)
    assert [loader.files[0].parts[-3] for loader in (data.train, data.val, data.test)] == ["train", "val", "test"]


def test_wrong_folders_say_what_is_expected(tmp_path: Path) -> None:
    pets(tmp_path / "a", 4, "val")
    with pytest.raises(ModelError, match="must have train and val or test"):
        load_data(f"imagefolder:{tmp_path / 'a'}")
    pets(tmp_path / "b", 4, "train", "val", "test")
    draw(tmp_path / "b" / "test" / "cow" / "1.png", 1)
    with pytest.raises(ModelError, match="such as 'cow'"):
        load_data(f"imagefolder:{tmp_path / 'b'}")
    pets(tmp_path / "c", 3)
    with pytest.raises(ModelError, match="Class 'cat' has 2 images; dividing them needs 3 or more"):
        load_data(f"imagefolder:{tmp_path / 'c'}")
    pets(tmp_path / "d" / "images", 4)
    with pytest.raises(ModelError, match=r"has only the class 'images'.*the folder that has a folder for each class"):
        load_data(f"imagefolder:{tmp_path / 'd'}")
    with pytest.raises(ModelError, match=r"it has no folders\. Give images without classes as --images DIR"):
        load_data(f"imagefolder:{tmp_path / 'd' / 'images' / 'cat'}")
    with pytest.raises(ModelError, match="Did you mean 'imagefolder:"):
        load_data(str(tmp_path / "d"))
    with pytest.raises(ModelError, match=r"Use digits, cifar10:FILE\.npz, imagefolder:DIR or package\.module:loaders"):
        load_data("imagefolder")


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("my_project")
    monkeypatch.setitem(sys.modules, "my_project", module)
    return module


def test_function_of_the_user_gives_loaders_and_loss(project: ModuleType) -> None:
    loss = torch.nn.functional.l1_loss
    project.loaders = lambda: {"train": [(X, Y)], "val": [(X, Y)], "loss": loss}
    data = load_data("my_project:loaders")
    assert (data.test, data.loss, data.shape) == (None, loss, (1, 3, 8, 8))
    project.loaders = lambda: ([(X, Y)], [{"x": X}], [(X, Y)])
    data = load_data("my_project:loaders")
    assert data.shape is None
    assert len(data.test) == 1


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([1], "must return a dict with train and val, or a tuple of two or three loaders; it returned a list"),
        ({"train": []}, "it returned a dict with train"),
        ({"train": [], "val": [], "tset": []}, "Did you mean 'test'"),
    ],
)
def test_other_values_are_refused(project: ModuleType, made: Any, message: str) -> None:
    project.loaders = lambda: made
    with pytest.raises(ModelError, match=message):
        load_data("my_project:loaders")
    with pytest.raises(ModelError, match="Unknown data"):
        load_data("my_project:loaders", imports=False)


def test_loader_in_order_yields_every_image(tmp_path: Path) -> None:
    pets(tmp_path, 20)
    train = load_data(f"imagefolder:{tmp_path}", batch=3, preprocessing=SMALL).train
    digits = load_data("digits").val
    assert not train.plain().augment
    for loader, count in ((train, 16), (digits, 144)):
        labels = torch.cat([y for _, y in in_order(loader)])
        assert len(labels) == count
        assert torch.equal(labels, torch.cat([y for _, y in in_order(loader)]))
    assert in_order([X]) == [X]


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise FileNotFoundError(f"{index}.png")


@pytest.mark.parametrize("workers", [0, 1])
def test_data_set_that_fails_is_named(project: ModuleType, workers: int) -> None:
    project.loaders = lambda: [[(X, Y)], DataLoader(Broken(), 2, num_workers=workers)]
    with pytest.raises(ModelError, match=r"first batch of `val` of my_project:loaders cannot be loaded .*0\.png"):
        load_data("my_project:loaders")


@pytest.mark.parametrize("loader", [3, Broken(), iter([(X, Y)])])
def test_what_is_no_loader_is_left_to_its_user(project: ModuleType, loader: Any) -> None:
    project.loaders = lambda: ([(X, Y)], loader)
    assert load_data("my_project:loaders").shape is None


def test_joining_class_folders_says_what_it_needs(tmp_path: Path) -> None:
    pets(tmp_path, 20)
    with pytest.raises(ModelError, match="cannot be joined; that needs images in memory"):
        _ = load_data(f"imagefolder:{tmp_path}", preprocessing=SMALL).whole
