"""Example inputs that nobody gave: from the loaders, as they are, else from the first layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsa_hw
from dsa_hw.pipeline.example_inputs import example_for


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, tokens: Tensor, mask: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.linear((self.embedding(tokens) * mask[..., None]).mean(1))


@pytest.mark.parametrize(
    "batch",
    [
        (torch.randn(4, 3, 48, 40), torch.zeros(4)),
        torch.randn(4, 3, 48, 40),
        {"input": torch.randn(4, 3, 48, 40), "labels": torch.zeros(4)},
        {"input": torch.randn(4, 3, 48, 40)},
    ],
    ids=["pair", "inputs", "dict with labels", "dict"],
)
def test_shape_is_that_of_the_first_example_of_a_loader(batch: Any) -> None:
    (found,) = example_for(conv_net(), None, {"train": None, "val": [batch]})
    assert found.shape == (1, 3, 48, 40)


def test_structure_is_that_of_the_loader() -> None:
    tokens, mask = torch.randint(10, (4, 6)), torch.ones(4, 6)
    batches: list[Any] = [((tokens, mask), torch.zeros(4)), {"tokens": tokens, "mask": mask, "labels": torch.zeros(4)}]
    for batch in batches:
        found = example_for(TwoInputs(), None, {"train": [batch]})
        assert [(tuple(x.shape), x.dtype) for x in found] == [((1, 6), torch.int64), ((1, 6), torch.float32)]


def test_loader_that_is_read_once_keeps_its_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    batches: Iterator[Any] = iter([torch.full((1, 3, 48, 48), float(i)) for i in range(3)])
    (found,) = example_for(conv_net(), None, {"images": batches})
    assert found.shape == (1, 3, 32, 32)
    assert "assuming 1x3x32x32 from the first layer" in caplog.text
    assert [float(batch[0, 0, 0, 0]) for batch in batches] == [0, 1, 2]


def test_batches_that_the_network_does_not_accept_and_folders_are_passed_over() -> None:
    loaders = {"train": [torch.randn(4, 5, 48, 48)], "val": [({"other": 1}, 2)], "images": "photos/"}
    assert example_for(conv_net(), None, loaders)[0].shape == (1, 3, 32, 32)
    assert example_for(conv_net(), torch.zeros(1, 3, 20, 20), loaders)[0].shape == (1, 3, 20, 20)


def test_allocate_and_minimize_measure_and_refit_at_the_size_of_the_data() -> None:
    torch.manual_seed(0)
    model = conv_net().eval()
    images = torch.randn(200, 3, 24, 24)
    val = [(images, model(images).argmax(1))]
    result = dsa_hw.allocate(model, "flops=60%", val=val, method="uniform", progress=False)
    assert result.plan.inputs == ((1, 3, 24, 24),)
    assert "refitted" in result.recovery
    found = dsa_hw.minimize(model, "flops", "90%", val=val, method="uniform", most=1, progress=False)
    assert found.plan.inputs == ((1, 3, 24, 24),)
