"""Example inputs: given, from the first batch of a loader, or inferred from the first layer by running the network."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dsa_hw.errors import ModelError
from dsa_hw.pipeline.model_inputs import possible_inputs
from dsa_hw.training.fingerprints import first_batch
from dsa_hw.utils.inputs import as_tensors
from dsa_hw.utils.modules import device_of, evaluating

__all__ = ["example_for"]

_log = logging.getLogger(__name__)

_SIDES = (224, 32, 28, 64, 96, 128, 299, 256, 16, 8)
# Networks for photographs halve the image five times before the last convolution, networks for 32 x 32 at most three
# times. At 224 the latter would be measured at a size at which nobody uses them.
_FEW_HALVINGS = 8


def example_for(
    model: nn.Module, example_inputs: Any = None, loaders: Mapping[str, Any] | None = None
) -> tuple[Any, ...]:
    """Return example inputs as a tuple.

    Args:
        model: The network.
        example_inputs: A tensor or several. None takes the first example of the first loader whose batches show what
            the network accepts; where there is none, one is inferred from the first layer, with a warning that names
            its shape.
        loaders: Loaders by name, None among them. One that can be read only once is not read.

    Raises:
        ModelError: The shape cannot be inferred.
    """
    if example_inputs is not None:
        return as_tensors(example_inputs)
    for name, loader in (loaders or {}).items():
        found = _first_example(model, loader)
        if found is not None:
            sizes = ", ".join("x".join(map(str, x.shape)) for x in found)
            _log.info("No example_inputs: %s, as in the first batch of %s.", sizes, name)
            return found
    first = next(_layers(model), None)
    if isinstance(first, nn.Linear):
        shapes: list[tuple[int, ...]] = [(1, first.in_features)]
    elif isinstance(first, nn.Conv2d):
        shapes = [(1, first.in_channels, side, side) for side in _SIDES]
    else:
        kind = "no layer with weights" if first is None else f"a {type(first).__name__} as its first layer"
        raise ModelError(
            f"Cannot infer the shape of the input: the network has {kind}. Set example_inputs to a tensor or a tuple "
            "of tensors that the network accepts."
        )
    for shape in shapes:
        example = _made(model, shape)
        smallest = _smallest_map(model, example)
        if smallest is None:
            continue
        if shape[-1] == 224 and 224 / smallest <= _FEW_HALVINGS:
            small = _made(model, (*shape[:2], 32, 32))
            example = small if _smallest_map(model, small) is not None else example
        _log.warning(
            "No example_inputs: assuming %s from the first layer. Set example_inputs for another size.",
            "x".join(map(str, example.shape)),
        )
        return (example,)
    tried = ", ".join("x".join(map(str, shape)) for shape in shapes)
    raise ModelError(f"The network accepts none of the inputs tried ({tried}). Set example_inputs.")


def _first_example(model: nn.Module, loader: Any) -> tuple[Tensor, ...] | None:
    """Return the first example of a loader; None where the loader does not show inputs that the network accepts."""
    if not hasattr(loader, "__iter__") or isinstance(loader, (str, bytes, Tensor)):
        return None
    device = device_of(model)
    for found in possible_inputs(first_batch(loader), model):
        example = tuple(x[:1].detach().clone().to(device) for x in found)
        try:
            with torch.no_grad(), evaluating(model):
                model(*example)
        except Exception:  # whatever the forward of the user raises; check_loader says what is wrong with the batch
            continue
        return example
    return None


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            yield module


def _made(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    parameter = next(model.parameters())
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return noise.to(parameter.device, parameter.dtype)


def _smallest_map(model: nn.Module, example: Tensor) -> float | None:
    """Return the smallest spatial size above 1 of any convolution output, or None if the forward pass fails."""
    sides = [float(example.shape[-1])]

    def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 4 and output.shape[-1] > 1:
            sides.append(float(output.shape[-1]))

    handles = [m.register_forward_hook(look) for m in model.modules() if isinstance(m, nn.Conv2d)]
    try:
        with torch.no_grad(), evaluating(model):
            model(example)
    except (RuntimeError, ValueError, AssertionError, IndexError, TypeError):
        return None
    finally:
        for handle in handles:
            handle.remove()
    return min(sides)
