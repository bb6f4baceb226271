"""Copies, training modes, devices, weights, digests and finite numbers of modules."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dsa_hw.errors import DsaError, ModelError, TraceError
from dsa_hw.utils.text import first_line, one_line
from dsa_hw.utils.weights import tensors_digest

__all__ = [
    "check_finite_inputs",
    "check_finite_outputs",
    "check_finite_weights",
    "copy_module",
    "device_of",
    "evaluating",
    "load_weights",
    "modes_kept",
    "weights_digest",
]

# What DataParallel, torch.compile, Lightning and other wrappers put before the names of a network's tensors.
_PREFIXES = ("module.", "_orig_mod.", "model.", "network.", "net.", "ema.")


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the training mode of every module when the body ends."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode, and restore every module when the body ends.

    ``forward`` may assign attributes, append to lists and write to buffers. Attributes, the contents of lists, dicts
    and sets, and the values of buffers and of other tensors that are no parameters are restored, as are the modes.
    """
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    values = [value for held in attributes for value in held.values()]
    containers = [(value, copy.copy(value)) for value in values if isinstance(value, (list, dict, set))]
    tensors = [t for t in (*values, *model.buffers()) if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)]
    contents = [(t, t._version, t.detach().clone()) for t in tensors if not t.is_inference()]
    model.eval()
    try:
        yield
    finally:
        for module, held in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(held)
        for container, before in containers:
            if isinstance(container, list):
                container[:] = before
            else:
                container.clear()
                container.update(before)
        with torch.no_grad():
            for tensor, version, content in contents:
                if tensor._version != version:
                    tensor.detach().copy_(content)


def copy_module(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return ``copy.deepcopy(model, memo)``, also where modules hold results of an earlier forward pass.

    ``deepcopy`` refuses tensors with a history of gradients. In the copy they have none.

    Raises:
        TraceError: An attribute cannot be copied.
    """
    memo = {} if memo is None else memo
    try:
        for module in model.modules():
            for value in tree_leaves(dict(vars(module))):
                if isinstance(value, Tensor) and not value.is_leaf and id(value) not in memo:
                    memo[id(value)] = value.detach().clone()
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever the __deepcopy__ and __reduce__ of the user's attributes raise
        raise TraceError(
            f"{type(model).__name__} cannot be copied with copy.deepcopy, which pruning needs: {first_line(error)}. "
            "Remove the attribute that cannot be copied."
        ) from error


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter or buffer, or the CPU where there is none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def load_weights(model: nn.Module, weights: Mapping[str, Any], name: str) -> None:
    """Load a state dict in place; what wrappers put before all names is removed.

    Args:
        model: The network.
        weights: Its state dict.
        name: The network in the error message.

    Raises:
        ModelError: The weights are those of another network.
    """
    own = list(model.state_dict())
    averaged = {key: value for key, value in weights.items() if key != "n_averaged"}  # of torch's AveragedModel
    weights = weights if "n_averaged" in own else averaged
    while prefix := next((p for p in _PREFIXES if weights and all(key.startswith(p) for key in weights)), None):
        if any(key.startswith(prefix) for key in own):
            break
        weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ModelError(
            f"The weights do not fit {name}. Give the state dict that was saved from this network "
            f"({one_line(error, 200)})."
        ) from error


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers with their names, as hexadecimal digits."""
    return tensors_digest(model.state_dict())


def check_finite_weights(model: nn.Module, what: str = "the network", error: type[DsaError] = ModelError) -> None:
    """Refuse a network with NaN or infinite weights, and name the first tensor that has one.

    Infinity is accepted in buffers that are not statistics of a normalisation: masks of attention have it.

    Args:
        model: The network.
        what: The network in the error message.
        error: The class to raise.

    Raises:
        DsaError: A parameter or buffer is not finite; of class ``error``.
    """
    for path, module in model.named_modules():
        masks = not isinstance(module, nn.modules.batchnorm._NormBase)
        parameters = module.named_parameters(recurse=False)
        buffers = module.named_buffers(recurse=False)
        found = [(n, t, False) for n, t in parameters] + [(n, t, masks) for n, t in buffers]
        for name, tensor, infinite in found:
            if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
                continue
            bad = tensor.detach().isnan() if infinite else ~tensor.detach().isfinite()
            if bool(bad.any()):
                raise error(
                    f"{f'{path}.{name}' if path else name} of {what} has {_kinds(tensor)} in {int(bad.sum())} of "
                    f"{tensor.numel()} values. Load weights of a network that was trained without divergence."
                )


def check_finite_inputs(inputs: tuple[Any, ...]) -> None:
    """Refuse example inputs with NaN or infinity.

    Raises:
        ModelError: A number in ``inputs`` is not finite.
    """
    for i, tensor in enumerate(inputs):
        if _is_bad(tensor):
            raise ModelError(f"Example inputs must be finite numbers; input {i} has {_kinds(tensor)}.")


def check_finite_outputs(model: nn.Module, inputs: tuple[Any, ...], what: str = "the network") -> None:
    """Run a network in evaluation mode, and refuse outputs with NaN or infinity.

    Args:
        model: The network.
        inputs: Its arguments, finite.
        what: The network in the error message.

    Raises:
        ModelError: An output is not finite.
    """
    device = device_of(model)
    with torch.no_grad(), evaluating(model):
        outputs = model(*(x.to(device) if isinstance(x, Tensor) else x for x in inputs))
    for tensor in tree_leaves(outputs):
        if _is_bad(tensor):
            raise ModelError(
                f"The outputs of {what} on the example inputs have {_kinds(tensor)}. Check its weights, the statistics "
                "of its normalisation layers and the range of the inputs."
            )


def _is_bad(value: Any) -> bool:
    real = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and not value.is_meta
    return real and not bool(value.detach().isfinite().all())


def _kinds(tensor: Tensor) -> str:
    return "NaN" if bool(tensor.detach().isnan().any()) else "infinity"
