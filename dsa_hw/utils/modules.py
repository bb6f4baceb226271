"""Copies, training modes, devices, weights, digests and finite numbers of modules."""

from __future__ import annotations

import contextlib
import copy
import logging
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

_log = logging.getLogger(__name__)


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
    """Load a state dict in place, also that of a module that contains the network.

    DataParallel, torch.compile, Lightning and other wrappers put a prefix before the names of the network's tensors,
    and may have tensors of their own.

    Args:
        model: The network.
        weights: Its state dict.
        name: The network in the error message.

    Raises:
        ModelError: The weights are those of another network, or of several such networks.
    """
    own = model.state_dict()
    prefixes = _prefixes(own, weights)
    if len(prefixes) > 1:
        raise ModelError(
            f"The weights contain {name} {len(prefixes)} times: {', '.join(map(repr, prefixes))}. Save the state dict "
            "of one of them."
        )
    if prefixes and (prefix := prefixes[0]):
        others = [key for key in weights if not key.startswith(prefix)]
        if others:
            _log.info("Weights without the prefix %r are not used: %s.", prefix, one_line(", ".join(others), 200))
        weights = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = _difference(own, weights) or one_line(error, 200)
        raise ModelError(
            f"The weights do not fit {name}: {reason}. Give the state dict that was saved from this network, with the "
            "same number of classes."
        ) from error


def _prefixes(own: Mapping[str, Any], weights: Mapping[str, Any]) -> list[str]:
    """Return what stands before the names of all tensors of the network; none where some are missing."""
    first = next(iter(own), "")
    found = [key.removesuffix(first) for key in weights if key == first or key.endswith(f".{first}")]
    needed = [key for key in own if not key.endswith("num_batches_tracked")]  # torch adds it to old files
    found = [prefix for prefix in found if all(prefix + key in weights for key in needed)]
    return [""] if "" in found else found


def _difference(own: Mapping[str, Tensor], weights: Mapping[str, Any]) -> str:
    """Describe how a state dict differs from the network's; empty where names and shapes are the same."""
    missing, unknown = [key for key in own if key not in weights], [key for key in weights if key not in own]
    both = [key for key in own if isinstance(weights.get(key), Tensor)]
    other = [key for key in both if own[key].shape != weights[key].shape]
    parts = [
        f"{len(keys)} of {total} tensors {what}, such as {one_line(keys[0], 80)}"
        for keys, total, what in (
            (missing, len(own), "of the network are not in the file"),
            (unknown, len(weights), "in the file are not in the network"),
        )
        if keys
    ]
    if other:
        theirs, ours = (_sides(part[other[0]]) for part in (weights, own))
        parts.append(f"{other[0]} is {theirs} in the file and {ours} in the network")
    return ", and ".join(parts)


def _sides(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a single number"


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
