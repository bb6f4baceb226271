"""What users give: networks, example inputs and paths, checked where they enter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dsa_hw.errors import DsaError, ModelError

__all__ = ["as_inputs", "as_path", "as_tensors", "check_inputs", "check_model"]


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


def check_model(model: Any) -> None:
    """Check that ``model`` is a network.

    Raises:
        ModelError: It is something else, such as the class of a network or its state dict.
    """
    if isinstance(model, nn.Module):
        return
    kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
    hint = " Call it to make a network." if callable(model) else ""
    raise ModelError(f"`model` must be a torch.nn.Module; got {kind}.{hint}")


def as_path(value: Any, name: str) -> Path:
    """Return a path.

    Raises:
        DsaError: ``value`` is neither text nor a path.
    """
    if not isinstance(value, (str, os.PathLike)) or isinstance(os.fspath(value), bytes):
        raise DsaError(f"`{name}` must be a path; got {value!r}.")
    return Path(value)


def check_inputs(example_inputs: Any) -> None:
    """Check that no tensor is empty.

    Raises:
        ModelError: A tensor is, or ``example_inputs`` is of a wrong type.
    """
    args, kwargs = as_inputs(example_inputs)
    for tensor in (*args, *kwargs.values()):
        if isinstance(tensor, Tensor) and not tensor.numel():
            shape = "x".join(map(str, tensor.shape))
            raise ModelError(f"`example_inputs` must not be empty; got a tensor of shape {shape}.")
