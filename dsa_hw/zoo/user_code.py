"""Functions of the user by name: ``package.module:function``."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from dsa_hw.errors import ModelError
from dsa_hw.utils.text import first_line

__all__ = ["call_function", "is_code"]


def is_code(name: str) -> bool:
    """Tell whether a name has the form ``package.module:function``.

    >>> is_code("nets.small:make"), is_code("imagefolder:pictures/cats"), is_code("resnet18")
    (True, False, False)
    """
    module, colon, function = name.partition(":")
    known = module in ("imagefolder", "cifar10", "hf-hub")
    return bool(colon) and not known and all(part.isidentifier() for part in [*module.split("."), function])


def call_function(name: str, what: str, returns: str) -> Any:
    """Import a function of the user, from the current folder first, and call it without arguments.

    Args:
        name: ``package.module:function``.
        what: What the name stands for, in messages: "model" or "data".
        returns: What the function must return, in messages.

    Raises:
        ModelError: It cannot be imported, is not a function, or fails.
    """
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), attribute]):
        raise ModelError(
            f"Cannot import {what} {name!r}. Use the form package.module:function, with a function that takes no "
            "arguments."
        )
    with _current_folder_first():
        try:
            function = getattr(importlib.import_module(module), attribute)
        except (Exception, SystemExit) as error:  # whatever the module of the user raises
            reason = first_line(error) if isinstance(error, (ImportError, AttributeError)) else _described(error)
            raise ModelError(
                f"Cannot import {what} {name!r} ({reason}). Use the form package.module:function."
            ) from error
        if not callable(function):
            raise ModelError(f"{name} must be a function that returns {returns}; it is {type(function).__name__}.")
        try:
            return function()
        except (Exception, SystemExit) as error:  # whatever the function of the user raises
            raise ModelError(
                f"{name} failed ({_described(error)}). It must be a function that takes no arguments and returns "
                f"{returns}."
            ) from error


@contextlib.contextmanager
def _current_folder_first() -> Iterator[None]:
    """Import from the current folder first, as `python -m` does; afterwards last, where it hides no other module."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")
        if "" not in sys.path:
            sys.path.append("")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
