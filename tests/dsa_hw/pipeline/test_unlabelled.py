"""Inputs without labels: from batches and from nothing; held-out parts; the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import dsa_hw
from dsa_hw.errors import ModelError, TrainingError
from dsa_hw.pipeline import unlabelled
from dsa_hw.pipeline.model_inputs import loader_inputs
from dsa_hw.pipeline.unlabelled import NORMALISATIONS, UnlabelledSet, normalised, unlabelled_set
from dsa_hw.training.synthesis import statistics_distance
from dsa_hw.training.workload import measure_workload
from dsa_hw.zoo.data import Batches

EXAMPLE = (torch.zeros(1, 3, 8, 8),)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(unlabelled, "_IMAGES", 64)
    return tmp_path / "cache" / "synthesised"


def network(data: Tensor | None = None, seed: int = 0) -> nn.Module:
    """A network whose batch norms have seen data."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    data = torch.randn(64, 3, 8, 8).cumsum(3) if data is None else data
    with torch.no_grad():
        for _ in range(60):
            model(data)
    return model.eval()


def made(model: nn.Module, images: Any = None, seed: int = 0, seen: list[str] | None = None) -> UnlabelledSet:
    found = unlabelled_set(
        model, EXAMPLE, images, seed=seed, listener=lambda text, _: seen.append(text) if seen is not None else None
    )
    assert found is not None
    return found


def test_augmentation_of_our_loaders_is_left_out() -> None:
    pixels = torch.randint(0, 256, (40, 8, 8, 3), dtype=torch.uint8)
    loader = Batches(pixels, torch.arange(40), 8, (0.0,) * 3, (1.0,) * 3, shuffle=True, augment=3, flip=True)
    wanted = {tuple(image.flatten().tolist()) for image in pixels}
    for images in (loader, loader_inputs(loader, network(), EXAMPLE)):
        found = made(network(), images)
        seen = torch.cat([*found.used, *found.held_out]).mul(255).round().byte().permute(0, 2, 3, 1)
        assert {tuple(image.flatten().tolist()) for image in seen} == wanted
    assert loader.epoch == 0, "training begins with the same order as without"


def test_held_out_inputs_are_others_than_those_that_are_used() -> None:
    images = torch.randn(100, 3, 8, 8)
    for count, apart in ((100, 36), (40, 5), (1, 1)):
        found = made(network(), list(images[:count].split(7)))
        assert found.source == "images without labels"
        assert len(found.held_out[0]) == apart
        if count > 1:
            assert torch.equal(torch.cat([found.used[0], found.held_out[0]]), images[:count])


def test_synthesised_inputs_match_the_statistics_and_are_kept_for_the_next_call(cache: Path) -> None:
    model, seen = network(), list[str]()
    one = made(model, seen=seen)
    assert "synthesising inputs" in seen
    assert one.source == "synthesised inputs"
    noise = torch.randn(64, 3, 8, 8)
    assert statistics_distance(model, one.used[0]) < 0.2 * statistics_distance(model, noise)
    seen.clear()
    two = made(model, seen=seen)
    assert seen == []
    assert torch.equal(one.used[0], two.used[0])
    assert torch.equal(one.held_out[0], two.held_out[0])
    assert not torch.equal(made(model, seed=1).used[0], one.used[0])
    assert not torch.equal(made(network(seed=1)).used[0], one.used[0])
    assert len(list(cache.iterdir())) == 3


def test_damaged_cache_is_replaced(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    one = made(model)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    two = made(model)
    assert "synthesised again" in caplog.text
    assert torch.equal(one.used[0], two.used[0])
    seen = list[str]()
    made(model, seen=seen)
    assert seen == []


def test_cache_keeps_the_latest_networks_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unlabelled, "_KEPT", 2)
    for seed in range(4):
        made(network(), seed=seed)
    assert len(list(cache.iterdir())) == 2


def test_cache_that_cannot_be_written_is_no_error(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    assert len(made(network()).used[0]) == 56
    assert "not kept for the next call" in caplog.text


def test_number_of_synthesised_inputs_depends_on_the_work_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    work = measure_workload(model, EXAMPLE)
    assert work.largest == 8 * 64
    assert work.operations > 64 * 9 * 8 * (3 + 8)
    monkeypatch.setattr(unlabelled, "_SYNTHESIS", 40 * work.operations)
    found = made(model)
    assert len(found.used[0]) + len(found.held_out[0]) == 40


def test_networks_without_statistics_have_no_set() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    assert unlabelled_set(plain, EXAMPLE, None, seed=0, listener=lambda *_: None) is None


def write_images(folder: Path, count: int, shape: tuple[int, ...]) -> Tensor:
    """Write smooth coloured images, and return what the network would see of them, in [0, 1]."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.clip(rng.normal(120, 40, (count, 1, 1, *shape[2:])) + rng.normal(0, 20, (count, *shape)), 0, 255)
    pixels = pixels.astype(np.uint8)
    for number, one in enumerate(pixels):
        Image.fromarray(one).save(folder / f"{number}.png")
    return torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255.0


@pytest.mark.parametrize("name", NORMALISATIONS)
def test_normalisation_of_a_folder_is_that_of_the_training_data(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    pixels = write_images(tmp_path / "photographs" / "sub", 40, (8, 8, 3))
    data = normalised(pixels, name)
    found = made(network(data), tmp_path / "photographs")
    assert f"normalised to {name}" in caplog.text
    seen = torch.cat([found.used[0], found.held_out[0]])
    order = seen.flatten(1).sum(1).argsort()
    assert torch.allclose(seen[order], data[data.flatten(1).sum(1).argsort()], atol=1e-5)


def test_photographs_are_resized_and_damaged_files_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "photographs"
    write_images(folder, 3, (30, 50, 3))
    (folder / "damaged.jpg").write_bytes(b"no image")
    (folder / "notes.txt").write_text("no image either")
    Image.new("L", (20, 20), 128).save(folder / "grey.png")
    assert made(network(), folder).used[0].shape == (4, 3, 8, 8)
    assert "damaged.jpg" in caplog.text


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none", "no folder of images"), (tmp_path, "has no images")):
        with pytest.raises(ModelError, match=words):
            made(network(), path)
    with pytest.raises(ModelError, match="1 or 3 channels"):
        unlabelled_set(nn.Linear(3, 3), (torch.zeros(1, 3),), tmp_path, seed=0, listener=lambda *_: None)
    with pytest.raises(TrainingError, match="yields no inputs"):
        made(network(), [])


def test_unlabelled_inputs_guide_keep_ratios_and_order() -> None:
    """A channel that only noise excites is kept from noise, and goes where images never excite it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].weight[:4, 2] = 0.0  # four channels see the first two colours, four the third one only
        model[0].weight[4:, :2] = 0.0
        model[0].bias[:] = 0.0
        model[4].weight[:, 4:] *= 3.0
    images = torch.randn(64, 3, 8, 8) + torch.randn(64, 3, 1, 1)
    images[:, 2] = 0.0
    result = dsa_hw.allocate(
        model, dsa_hw.FlopsBudget("50%"), example_inputs=EXAMPLE, images=[images], progress=False,
        options={"steps": 9}, recovery="none",
    )  # fmt: skip
    assert set(result.plan.kept[0]) == {0, 1, 2, 3}
    assert result.quality.source == "images without labels"
