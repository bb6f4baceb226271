"""Networks by name, as on the command line.

``resnet18`` is a network of torchvision, ``resnet20`` one of `dsa_hw.zoo.cifar` for 32 x 32 images, ``timm/resnet50d``
one of timm. ``package.module:factory`` calls a function of the user, which returns a network or (network,
example_inputs). Weights are random: nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import math
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dsa_hw.errors import MissingDependencyError, ModelError
from dsa_hw.utils.text import first_line, one_line
from dsa_hw.zoo.cifar import SMALL

__all__ = ["load_model", "parse_shape"]

_DEFAULT_SHAPE = (1, 3, 224, 224)
_MOST_NUMBERS = 2**30  # 4 GiB as float32; a slip of the keyboard asks for more


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse an input shape.

    >>> parse_shape("1x3x224x224")
    (1, 3, 224, 224)
    """
    if not re.fullmatch(r"[1-9][0-9]*([x,][1-9][0-9]*)*", text):
        raise ModelError(
            "An input shape has the form BATCHxCHANNELSxHEIGHTxWIDTH, for example 1x3x224x224; got "
            f"{one_line(text, 60)!r}."
        )
    sides = re.split("[x,]", text)
    if sum(len(side) for side in sides) > 30 or math.prod(map(int, sides)) > _MOST_NUMBERS:
        raise ModelError(
            f"An input may have at most {_MOST_NUMBERS:.0e} numbers (1x3x224x224 has 150528); got "
            f"{one_line(text, 60)!r}."
        )
    return tuple(map(int, sides))


def load_model(
    name: str, input_shape: Sequence[int] | None = None, *, imports: bool = True
) -> tuple[nn.Module, tuple[Any, ...]]:
    """Build a network by name.

    Args:
        name: Name of a network of torchvision or of `dsa_hw.zoo.cifar`, ``timm/NAME``, or ``package.module:factory``.
        input_shape: Shape of the example input; the default of the network where it is not given.
        imports: Whether ``package.module:factory`` is allowed. Use False for a name that was read from a file: a file
            must not choose which code runs.

    Returns:
        The network in evaluation mode with random weights, and a tuple of example inputs.

    Raises:
        ModelError: The name is unknown, or the factory cannot be imported or does not return a network.
        MissingDependencyError: timm is not installed.

    Example:
        >>> model, (image,) = load_model("resnet20")
        >>> tuple(image.shape)
        (1, 3, 32, 32)
    """
    example: tuple[Any, ...] | None = None
    if ":" in name:
        if not imports:
            raise ModelError(
                f"A file must not choose code to import. Name the model on the command line; got {name!r}."
            )
        model, example = _user_network(name)
    elif name.startswith("timm/"):
        model, size = _timm(name.removeprefix("timm/"))
        input_shape = input_shape or (1, *size)
    elif name in SMALL:
        model = SMALL[name]()
        input_shape = input_shape or (1, 3, 32, 32)
    else:
        model, size = _torchvision(name)
        input_shape = input_shape or (1, *size)
    if input_shape is not None or example is None:
        shape = tuple(input_shape or _DEFAULT_SHAPE)
        if math.prod(shape) > _MOST_NUMBERS:
            raise ModelError(f"An input may have at most {_MOST_NUMBERS:.0e} numbers; got a shape of {shape}.")
        example = (torch.randn(shape, generator=torch.Generator().manual_seed(0)),)
    return model.eval(), example


def _torchvision(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    from dsa_hw.zoo.torchvision_compat import torchvision

    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise _unknown(name, [*known, *SMALL])
    options: dict[str, Any] = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    side = 299 if name == "inception_v3" else 224
    return torchvision.models.get_model(name, weights=None, **options), (3, side, side)


def _timm(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    import dsa_hw.zoo.torchvision_compat  # noqa: F401  (timm imports torchvision)

    try:
        import timm
    except ImportError as error:
        raise MissingDependencyError(
            f"Model timm/{name} needs timm, which is not installed. Run pip install 'dsa-hw[timm]'."
        ) from error
    if not timm.is_model(name):
        raise _unknown(f"timm/{name}", [f"timm/{n}" for n in timm.list_models()])
    model = timm.create_model(name, pretrained=False)
    return model, tuple(getattr(model, "default_cfg", {}).get("input_size", _DEFAULT_SHAPE[1:]))


def _unknown(name: str, known: Sequence[str]) -> ModelError:
    near = difflib.get_close_matches(name, known, 3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return ModelError(
        f"Unknown model {name!r}.{hint} Use the name of a torchvision model, timm/NAME, or package.module:factory."
    )


def _user_network(name: str) -> tuple[nn.Module, tuple[Any, ...] | None]:
    """Import the factory of a user and call it; return its network and, where it gives them, example inputs."""
    module_name, _, attribute = name.partition(":")
    parts = [*module_name.split("."), attribute]
    if not all(part.isidentifier() for part in parts):
        raise ModelError(
            f"Cannot import model {name!r}. Use the form package.module:factory, with a function that takes no "
            "arguments."
        )
    with _current_folder_first():
        try:
            factory = getattr(importlib.import_module(module_name), attribute)
        except (Exception, SystemExit) as error:  # whatever the module of the user raises
            reason = first_line(error) if isinstance(error, (ImportError, AttributeError)) else _described(error)
            raise ModelError(
                f"Cannot import model {name!r} ({reason}). Use the form package.module:factory."
            ) from error
        if not callable(factory):
            raise ModelError(
                f"{name} must be a function that returns a torch.nn.Module; it is {type(factory).__name__}."
            )
        try:
            made = factory()
        except (Exception, SystemExit) as error:  # whatever the factory of the user raises
            raise ModelError(
                f"{name} failed ({_described(error)}). It must be a function that takes no arguments and returns a "
                "torch.nn.Module."
            ) from error
    example = None
    if isinstance(made, tuple) and len(made) == 2:
        made, given = made
        example = given if isinstance(given, tuple) else (given,)
    if not isinstance(made, nn.Module):
        raise ModelError(
            f"{name} must return a torch.nn.Module or (module, example_inputs); it returned {type(made).__name__}."
        )
    return made, example


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
