"""Recovery within an allocation: with images, with labelled data, without any, and where it does not help."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dsa_hw
from dsa_hw.errors import DsaError
from dsa_hw.pipeline import recovering
from dsa_hw.pipeline import unlabelled as inputs_without_labels


def trained() -> tuple[nn.Module, torch.Tensor]:
    """A network whose batch norms have seen data."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4),
    )  # fmt: skip
    images = torch.randn(96, 3, 8, 8).cumsum(3)
    for _ in range(40):
        model(images)
    return model.eval(), images


@pytest.fixture(autouse=True)
def small_and_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short recoveries, and a cache of each test's own."""
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path))
    monkeypatch.setattr(inputs_without_labels, "_IMAGES", 128)
    monkeypatch.setattr(recovering, "_STEPS", 100)


def allocate(model: nn.Module, **options: Any) -> dsa_hw.Allocation:
    defaults: dict[str, Any] = {"example_inputs": torch.zeros(1, 3, 8, 8), "method": "uniform", "progress": False}
    return dsa_hw.allocate(model, dsa_hw.FlopsBudget("50%"), **{**defaults, **options})


def distance(small: nn.Module, dense: nn.Module, images: torch.Tensor) -> float:
    with torch.no_grad():
        wanted = dense(images)
        return float((small.eval()(images) - wanted).square().mean() / wanted.var())


def test_images_bring_the_outputs_closer_to_the_dense_network() -> None:
    model, images = trained()
    before = copy.deepcopy(model.state_dict())
    new = images[80:]
    found = {
        level: distance(allocate(model, images=[images[:80]], recovery=level).model, model, new)
        for level in ("none", "refit", "distil")
    }
    assert found["refit"] < 0.7 * found["none"]
    assert found["distil"] < found["none"]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "the user's network is not changed"


def test_refit_keeps_the_variances_that_its_targets_are_normalised_with() -> None:
    """Those of the network as cut belong to other outputs than the refitted ones."""
    model, images = trained()
    result = allocate(model, images=[images], recovery="refit")
    assert "refitted" in result.recovery
    variances = {name: value for name, value in model.state_dict().items() if name.endswith("running_var")}
    for name, value in result.model.state_dict().items():
        if name in variances:
            assert torch.isin(value, variances[name]).all(), name


def test_inputs_of_a_loader_are_used_and_the_result_says_so() -> None:
    model, images = trained()
    with torch.no_grad():
        labels = model(images).argmax(1)
    result = allocate(model, val=[(images[:64], labels[:64]), (images[64:], labels[64:])])
    assert "Weights refitted on 84 images" in result.recovery
    assert result.recovery in repr(result)
    assert distance(result.model, model, images) < distance(allocate(model, recovery="none").model, model, images)


def test_inputs_are_synthesised_where_there_are_none() -> None:
    model, images = trained()
    result = allocate(model)
    assert "synthetic inputs that match the batch-norm statistics" in result.recovery
    assert distance(result.model, model, images) < distance(allocate(model, recovery="none").model, model, images)


def test_network_without_statistics_stays_as_cut_and_says_so() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
    one, two = allocate(model), allocate(model, recovery="none")
    assert one.recovery.startswith("No recovery: without images")
    assert two.recovery == ""
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))


def test_weights_stay_as_cut_where_refitting_does_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = trained()

    def spoil(small: nn.Module, *_: Any, **__: Any) -> list[Any]:
        with torch.no_grad():
            for parameter in small.parameters():
                parameter.zero_()
        return []

    monkeypatch.setattr(recovering, "refit", spoil)
    monkeypatch.setattr(recovering, "distil", spoil)
    result = allocate(model, images=[images])
    assert "did not help" in result.recovery
    assert all(bool((p != 0).any()) for p in result.model.parameters() if p.ndim > 1)


def test_unknown_level_is_refused() -> None:
    with pytest.raises(
        DsaError, match=r"Unknown recovery 'all'. Available levels of recovery: auto, distil, none, refit\."
    ):
        allocate(trained()[0], recovery="all")


def test_default_trains_weights_only_where_there_are_no_labels() -> None:
    model, images = trained()
    with torch.no_grad():
        labels = model(images).argmax(1)
    assert "refitted and distilled" in allocate(model, images=[images]).recovery
    assert "distilled" not in allocate(model, val=[(images, labels)]).recovery
    assert "distilled" not in allocate(model, images=[images], recovery="refit").recovery


def test_resumed_allocation_is_recovered_too(tmp_path: Path) -> None:
    """The network of a proposal on disk is a copy with the same weights."""
    model, images = trained()
    more = {"images": [images], "method": "dsa", "options": {"steps": 6}, "recovery": "refit", "out": tmp_path / "out"}
    one, two = allocate(model, **more), allocate(model, **more)
    assert "Weights refitted" in one.recovery
    assert "Weights refitted" in two.recovery
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
