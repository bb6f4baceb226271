from __future__ import annotations

import functools
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from dsa_hw.training.fingerprints import UnstableError, check_loader, fingerprint, fingerprint_loader
from dsa_hw.zoo.data import Batches

IMAGES, LABELS = torch.arange(40 * 3.0).reshape(40, 3), torch.arange(40) % 5


def loader(shift: float = 0.0, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(IMAGES + shift, LABELS), batch_size=8, **options)


class Noisy(Dataset[Any]):
    """Draws from every global source and from sources of its own, and counts what was read."""

    def __init__(self) -> None:
        self.mine, self.theirs, self.old = np.random.default_rng(3), random.Random(3), np.random.RandomState(3)
        self.read = 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        own = (self.mine.random(), self.theirs.random(), self.old.random())
        return torch.tensor([index, *own, random.random(), np.random.rand(), torch.rand(()).item()])


class Stream(IterableDataset[Any]):
    """Can be begun again."""

    def __iter__(self) -> Iterator[int]:
        yield from range(10)


class Rereadable:
    """A loader that is no DataLoader; it shuffles with the global random numbers and counts its epochs."""

    epoch = 0

    def __init__(self) -> None:
        self.epoch = 3

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.epoch += 1
        return iter([IMAGES[torch.randperm(40)[:8]] + self.epoch])


def states() -> list[Any]:
    found = np.random.get_state()
    return [random.getstate(), found[1].tolist(), found[2], torch.get_rng_state().tolist()]  # type: ignore[index, union-attr]


MAKERS: dict[str, Callable[[], Any]] = {
    "in order": loader,
    "shuffled": lambda: loader(shuffle=True),
    "own generator": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(7)),
    "own sampler": lambda: loader(
        sampler=RandomSampler(range(40), replacement=True, num_samples=16, generator=torch.Generator().manual_seed(7))
    ),
    "noisy": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "no DataLoader": Rereadable,
    "in memory": lambda: Batches(
        torch.arange(40 * 12, dtype=torch.uint8).reshape(40, 2, 2, 3), LABELS, 8, (0.5,) * 3, (0.5,) * 3, shuffle=True
    ),
    "list": lambda: [(IMAGES, LABELS)],
}


@pytest.mark.parametrize("name", MAKERS)
def test_fingerprint_leaves_random_states_and_loaders_unchanged(name: str) -> None:
    """What the loader gives afterwards, and the random numbers, are those of a loader that was never looked at."""

    def later(look: bool) -> tuple[Any, Any]:
        torch.manual_seed(5), np.random.seed(5), random.seed(5)
        made = MAKERS[name]()
        if look:
            before = states()
            fingerprint_loader(made)
            assert states() == before
        seen = [[fingerprint(batch) for batch in made] for _ in range(2)]
        return seen, states()

    assert later(look=True) == later(look=False)


@pytest.mark.parametrize("name", MAKERS)
def test_fingerprint_does_not_depend_on_random_states(name: str) -> None:
    torch.manual_seed(1)
    made = MAKERS[name]()
    found = fingerprint_loader(made)
    list(made)
    torch.rand(3), np.random.rand(3), random.random()
    assert fingerprint_loader(made) == found
    torch.manual_seed(2)
    assert fingerprint_loader(MAKERS[name]()) == found


def test_workers_are_not_kept_and_later_batches_are_the_same() -> None:
    def later(look: bool) -> list[str]:
        torch.manual_seed(5)
        made = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
        if look:
            fingerprint_loader(made)
            assert made._iterator is None
            assert made.num_workers == 2
        return [fingerprint(batch) for batch in made]

    assert later(look=True) == later(look=False)


def test_other_data_have_another_fingerprint() -> None:
    made = [
        loader(), loader(1e-3), DataLoader(TensorDataset(IMAGES, LABELS + 1), batch_size=8),
        DataLoader(TensorDataset(IMAGES.double(), LABELS), batch_size=8),
        DataLoader(TensorDataset(IMAGES, LABELS), batch_size=4),
        DataLoader(TensorDataset(IMAGES[:32], LABELS[:32]), batch_size=8),
        loader(shuffle=True), None, [], [(IMAGES, LABELS)], [(IMAGES, LABELS), (IMAGES, LABELS)],
        [(IMAGES, LABELS), (IMAGES, LABELS + 1)], MAKERS["in memory"](),
    ]  # fmt: skip
    found = [fingerprint_loader(one) for one in made]
    assert len(set(found)) == len(found)
    last = MAKERS["in memory"]()
    last.images = last.images.clone()
    last.images[-1] += 1
    assert fingerprint_loader(last) != found[-1], "of data in memory every image counts"


def batches() -> Iterator[Any]:
    for _ in range(3):
        yield IMAGES, LABELS


class Holder:
    """Looks like a loader, and can be read once."""

    def __init__(self) -> None:
        self.source = batches()

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


class Same:
    """Gives the same iterator again."""

    __slots__ = ("source",)

    def __init__(self) -> None:
        self.source = batches()

    def __iter__(self) -> Iterator[Any]:
        return self.source


class OnceDataset(IterableDataset[Any]):
    def __init__(self) -> None:
        self.source = batches()

    def __iter__(self) -> Iterator[Any]:
        return self.source


@pytest.mark.parametrize(
    "make", [batches, lambda: iter([1, 2, 3]), Holder, Same, lambda: DataLoader(OnceDataset(), batch_size=None)]
)
def test_loaders_that_can_be_read_once_are_not_read(make: Callable[[], Any]) -> None:
    made = make()
    with pytest.raises(UnstableError, match="only once"):
        fingerprint_loader(made)
    assert len(list(made)) == 3
    check_loader(nn.Linear(1, 1), made, "train")


def module_level(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


class Custom(nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(weight))
        self.inner = nn.CrossEntropyLoss()


LOSSES: list[Any] = [
    nn.functional.cross_entropy, nn.functional.nll_loss, module_level, nn.CrossEntropyLoss(),
    nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(weight=torch.ones(3)), nn.MSELoss(),
    nn.MSELoss(reduction="sum"), functools.partial(nn.functional.cross_entropy, label_smoothing=0.1),
    functools.partial(nn.functional.cross_entropy, label_smoothing=0.2), Custom(1.0), Custom(2.0), Custom(1.0).forward,
]  # fmt: skip


def test_different_losses_have_different_fingerprints() -> None:
    found = [fingerprint(loss) for loss in LOSSES]
    assert len(set(found)) == len(found)
    assert found == [fingerprint(loss) for loss in LOSSES]
    assert fingerprint(nn.CrossEntropyLoss(label_smoothing=0.1)) == found[4]


def test_different_values_of_equal_parts_have_different_fingerprints() -> None:
    values: list[Any] = [
        1, 1.0, True, "1", b"1", None, (), [], {}, "", (1,), [1], [[1]], [1, 1], ["11"], ["1", "1"], {"a": 1}, {"a": 2},
        {"a": {"b": 1}}, {"a": 1, "b": 1}, torch.tensor(1), torch.tensor([1]), torch.tensor([[1]]), torch.tensor(1.0),
        torch.tensor(2.0), np.array(1), np.array([1]), np.float32(1), torch.zeros(0), torch.zeros(0, 2), torch.float32,
        torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([True]),
    ]  # fmt: skip
    found = [fingerprint(value) for value in values]
    assert len(set(found)) == len(found)
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})


def test_values_without_a_stable_identity_are_refused() -> None:
    def local() -> None: ...

    own: list[Any] = []
    own.append(own)
    for value in (lambda: 0, local, functools.partial(local), object(), {"loss": lambda: 0}, own, np.array([object()])):
        with pytest.raises(UnstableError):
            fingerprint(value)


def test_another_process_computes_the_same_fingerprint() -> None:
    code = "import tests.dsa_hw.training.test_fingerprints as t; print(t.everything())"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**_environment(), "PYTHONHASHSEED": seed}
        )
        assert done.stdout.strip() == everything(), done.stderr


def everything() -> str:
    return fingerprint([*(fingerprint_loader(make()) for make in MAKERS.values()), LOSSES])


def _environment() -> dict[str, str]:
    import os

    return dict(os.environ)
