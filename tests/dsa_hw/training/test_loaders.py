"""Repeating loaders, and batches on a device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dsa_hw.errors import TrainingError
from dsa_hw.training.loaders import RepeatingLoader, length_of, on_device, whole_batch


class Epochs:
    """Three batches that name the pass and their position."""

    epoch = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[tuple[int, int]]:
        yield from ((self.epoch, i) for i in range(3))


@pytest.mark.parametrize("read", range(8))
def test_restored_position_gives_the_same_batches(read: int) -> None:
    source = RepeatingLoader(Epochs())
    first = [next(source) for _ in range(read)]
    assert first == [divmod(i, 3) for i in range(read)]
    again = RepeatingLoader(Epochs())
    again.load_state_dict(source.state_dict())
    assert [next(again) for _ in range(4)] == [next(source) for _ in range(4)]


@pytest.mark.parametrize("loader", [[], iter([1])], ids=["empty", "iterator"])
def test_loader_that_cannot_be_repeated_is_refused(loader: Any) -> None:
    with pytest.raises(TrainingError, match="val loader gave no batch"):
        list(itertools.islice(RepeatingLoader(loader, "val"), 2))


def test_loader_without_a_length_is_refused() -> None:
    assert length_of([1, 2]) == 2
    with pytest.raises(TrainingError, match="no length"):
        length_of(iter([1]))


def test_nested_inputs_are_moved_and_other_batches_are_their_own_targets() -> None:
    inputs, targets = on_device(((torch.zeros(1), [torch.ones(2)]), "label"), torch.device("meta"))
    assert inputs[0].device.type == inputs[1][0].device.type == "meta"
    assert targets == "label"
    batch = {"image": torch.zeros(1), "boxes": [torch.ones(2)], "names": ["a"]}
    pair = on_device(batch, torch.device("meta"))
    assert pair[0] is pair[1]
    assert pair[0]["boxes"][0].device.type == "meta"
    assert whole_batch(pair) is pair[0]
    pair = on_device([torch.zeros(1), torch.ones(1)], torch.device("meta"))
    assert whole_batch(pair) is pair
