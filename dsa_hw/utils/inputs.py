"""Example inputs of a network in the forms that users give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dsa_hw.errors import ModelError

__all__ = ["as_inputs", "as_tensors"]


def as_inputs(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments for ``forward``.

    A tensor is the only argument, a sequence the positional arguments, a mapping the keyword arguments.

    Raises:
        ModelError: ``example_inputs`` has another type.
    """
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
        return tuple(example_inputs), {}
    raise ModelError(
        "`example_inputs` must be a tensor, a tuple of positional arguments or a dict of keyword arguments; "
        f"got {type(example_inputs).__name__}."
    )


def as_tensors(example_inputs: Any) -> tuple[Tensor, ...]:
    """Return the positional arguments of a network that takes only tensors by position, as a runtime does.

    Raises:
        ModelError: ``example_inputs`` is not a tensor or a sequence of tensors.
    """
    args, kwargs = as_inputs(example_inputs)
    if kwargs or not args or not all(isinstance(a, Tensor) for a in args):
        kinds = [f"{name}=" for name in kwargs] or [type(a).__name__ for a in args]
        raise ModelError(f"`example_inputs` must be a tensor or a tuple of tensors; got ({', '.join(kinds)}).")
    return args
