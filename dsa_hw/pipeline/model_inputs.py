"""The inputs of a network in the batches of a loader, whatever form these have."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from dsa_hw.training.fingerprints import first_batch
from dsa_hw.training.loaders import without_augmentation

__all__ = ["inputs_in", "loader_inputs", "possible_inputs"]

_TARGETS = ("labels", "label", "targets", "target", "y")  # arguments that are no inputs


def inputs_in(batch: Any, model: nn.Module, example: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
    """Return the positional inputs of the network in a batch; None where the batch does not show them.

    Args:
        batch: (inputs, targets), inputs alone, or a dict: its values for the first parameters of ``forward``, or the
            only one with the shape of the example.
        model: The network.
        example: Its example inputs.
    """
    first = batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch
    if isinstance(first, Mapping):
        names = list(inspect.signature(model.forward).parameters)[: len(example)]
        found: tuple[Any, ...] = tuple(first.get(name) for name in names)
        if not _are_like(found, example):
            found = tuple(value for value in first.values() if _are_like((value,), example))
    else:
        found = tuple(first) if isinstance(first, (tuple, list)) else (first,)
    return found if _are_like(found, example) else None


def possible_inputs(batch: Any, model: nn.Module) -> Iterator[tuple[Tensor, ...]]:
    """Yield what may be the positional inputs of the network in a batch, the most likely first.

    Args:
        batch: (inputs, targets), inputs alone, a dict with names of parameters of ``forward``, or None.
        model: The network.
    """
    parts = [batch]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        parts = [batch[0], batch]
    for part in parts:
        if isinstance(part, Mapping):
            found: tuple[Any, ...] = tuple(_named_inputs(part, model))
        else:
            found = tuple(part) if isinstance(part, (tuple, list)) else (part,)
        if found and all(isinstance(x, Tensor) and x.ndim and x.numel() for x in found):
            yield found


def _named_inputs(batch: Mapping[str, Any], model: nn.Module) -> Iterator[Any]:
    """Yield the values for the first parameters of ``forward``, up to one that is missing or a target."""
    for name in inspect.signature(model.forward).parameters:
        if name not in batch or name in _TARGETS:
            return
        yield batch[name]


def loader_inputs(loader: Iterable[Any], model: nn.Module, example: tuple[Any, ...]) -> Iterable[Any] | None:
    """Return batches of positional inputs, to be read any number of times; None where batches do not show them.

    Augmentation is left out where the loader can do that. A loader that can be read only once is returned as it is.
    """
    loader = without_augmentation(loader)
    batch = first_batch(loader)
    if batch is None:
        return loader
    return None if inputs_in(batch, model, example) is None else _Inputs(loader, model, example)


class _Inputs:
    def __init__(self, loader: Iterable[Any], model: nn.Module, example: tuple[Any, ...]) -> None:
        self.loader, self.model, self.example = loader, model, example

    def __iter__(self) -> Iterator[tuple[tuple[Tensor, ...], None]]:
        for batch in self.loader:
            found = inputs_in(batch, self.model, self.example)
            if found is not None:
                yield found, None


def _are_like(found: tuple[Any, ...], example: tuple[Any, ...]) -> bool:
    return len(found) == len(example) and all(
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.shape[1:] == b.shape[1:]
        and a.is_floating_point() == b.is_floating_point()
        for a, b in zip(found, example, strict=True)
    )
