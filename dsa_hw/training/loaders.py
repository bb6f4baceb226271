"""Batches: moved to a device, counted, and repeated with a position that can be saved.

A batch is (inputs, targets). A batch of another form, such as a dict, is inputs and targets at once: the network or the
user's function takes from it what it needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dsa_hw.errors import TrainingError

__all__ = [
    "RepeatingLoader", "equal_batches", "known_length", "length_of", "on_device", "unlabelled", "whole_batch",
    "without_augmentation",
]  # fmt: skip


def on_device(batch: Any, device: torch.device) -> tuple[Any, Any]:
    """Return (inputs, targets) of a batch, moved to ``device``; of a batch that is no pair, twice the same object."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and batch[0] is not batch[1]:
        return _moved(batch[0], device), _moved(batch[1], device)
    pair = isinstance(batch, (tuple, list)) and len(batch) == 2  # what this function returned before
    moved = _moved(batch[0] if pair else batch, device)
    return moved, moved


def whole_batch(pair: tuple[Any, Any]) -> Any:
    """Return the batch as its loader yields it, from what `on_device` returned."""
    return pair[0] if pair[0] is pair[1] else pair


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(v, device) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(v, device) for v in value)
    if isinstance(value, Mapping):
        return {key: _moved(v, device) for key, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{key: _moved(v, device) for key, v in vars(value).items()})
    return value.to(device) if hasattr(value, "to") and callable(value.to) else value


def length_of(loader: Iterable[Any]) -> int:
    """Return the number of batches in one epoch.

    Raises:
        TrainingError: The loader has no length.
    """
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError as error:
        raise TrainingError(
            "The loader has no length, so the length of an epoch is unknown. Give a DataLoader, a list, or anything "
            "with len()."
        ) from error


class RepeatingLoader:
    """The batches of a loader in a cycle, with a position that can be saved and restored.

    A restored position gives the same batches if the loader repeats itself: `dsa_hw.zoo.data.Batches` does (by its
    ``epoch``), a ``DataLoader`` does with a ``sampler`` that has ``set_epoch``.
    """

    def __init__(self, loader: Iterable[Any], name: str = "train") -> None:
        """Start before the first batch; ``name`` is for messages."""
        self.loader, self.name = loader, name
        self.passes, self.position = 0, 0
        self._iterator: Iterator[Any] | None = None

    def _begin(self) -> None:
        sampler = getattr(self.loader, "sampler", None)
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.passes)
        elif hasattr(self.loader, "epoch"):
            self.loader.epoch = self.passes
        self._iterator = iter(self.loader)
        self.passes, self.position = self.passes + 1, 0

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            TrainingError: The loader is empty, or cannot be iterated again (a generator).
        """
        for _ in range(2):
            if self._iterator is None:
                self._begin()
            try:
                batch = next(self._iterator)  # type: ignore[arg-type]
            except StopIteration:
                self._iterator = None
                continue
            self.position += 1
            return batch
        raise TrainingError(
            f"The {self.name} loader gave no batch in pass {self.passes}. Give one that is not empty and can be "
            "iterated again (a DataLoader or a list, not a generator)."
        )

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"passes": self.passes, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to the position that ``state`` holds."""
        self.passes, self.position, self._iterator = int(state["passes"]), 0, None
        # At the end of a pass there is no need to read the batches again.
        if self.passes and int(state["position"]) == known_length(self.loader):
            self.position = int(state["position"])
        elif self.passes:
            self.passes -= 1
            for _ in range(int(state["position"])):
                next(self)


def known_length(loader: Iterable[Any]) -> int | None:
    """Return the number of batches in one epoch; None where the loader has no length."""
    try:
        return length_of(loader)
    except TrainingError:
        return None


def unlabelled(images: Iterable[Any], limit: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return up to ``limit`` inputs, each positional input as one tensor.

    Args:
        images: Batches of inputs, or of (inputs, anything); inputs that are a tuple or list are positional.
        limit: How many inputs, at most.
        device: Where to put them.

    Raises:
        TrainingError: There are no inputs, or they are not finite.
    """
    parts: list[tuple[Tensor, ...]] = []
    have = 0
    for batch in images:
        first = batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch
        inputs = tuple(first) if isinstance(first, (tuple, list)) else (first,)
        if not inputs or not all(isinstance(x, Tensor) for x in inputs):
            raise TrainingError(f"`images` must yield tensors or (inputs, targets); got a {type(batch).__name__}.")
        if not all(bool(torch.isfinite(x).all()) for x in inputs if x.is_floating_point()):
            raise TrainingError("An input contains NaN or infinity. Check the images and their normalisation.")
        parts.append(tuple(x[: limit - have].to(device) for x in inputs))
        have += len(parts[-1][0])
        if have >= limit:
            break
    if not have:
        raise TrainingError("`images` yields no inputs. Give at least one batch; a few hundred images are enough.")
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def without_augmentation(loader: Any) -> Any:
    """Return the loader of the same examples as they are, if it offers one by ``plain()``; else the loader itself.

    Least squares and batch-norm statistics of shifted and cropped images are not those of the images that the network
    will see.
    """
    plain = getattr(loader, "plain", None)
    return plain() if callable(plain) else loader


def equal_batches(inputs: tuple[Tensor, ...], most: int = 64) -> list[tuple[Tensor, ...]]:
    """Return inputs in batches of equal size, at most ``most`` and at least five batches if there are enough inputs."""
    have = len(inputs[0])
    size = max(min(have // 5, most, 64), 1)
    return [tuple(x[i : i + size] for x in inputs) for i in range(0, have - size + 1, size)]
