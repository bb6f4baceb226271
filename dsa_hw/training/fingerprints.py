"""Fingerprints of data, losses and options: what a result on disk was computed from.

Equal fingerprints in two processes mean that a result can be reused. A value whose content cannot be compared between
processes (a lambda, an object of an unknown class, a loader that can be read only once) raises `UnstableError`, and
nothing is reused.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import inspect
import random
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from dsa_hw.errors import TrainingError
from dsa_hw.training.loaders import on_device
from dsa_hw.training.losses import Loss, OwnLoss, checked_loss, outputs_of
from dsa_hw.utils.modules import device_of, evaluating
from dsa_hw.utils.text import first_line, one_line
from dsa_hw.zoo.data import Batches

__all__ = ["UnstableError", "check_loader", "fingerprint", "fingerprint_loader"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format, Path)
# Attributes of a loader behind which data, order and random numbers come from.
_NO_BATCH = "no batch"  # in place of the first batch of an empty loader
_PARTS = ("loader", "dataset", "sampler", "batch_sampler", "transform", "collate_fn")


class UnstableError(Exception):
    """The value has no fingerprint that another process would find too; the message says which value."""


def fingerprint(value: Any) -> str:
    """Return the SHA-256 of a plain value, tensor, array, container, module, or function that can be imported.

    Functions and classes count by qualified name and source text, not by what they call.

    Raises:
        UnstableError: The value, or something in it, has no identity that survives the process.
    """
    found = hashlib.sha256()
    try:
        _feed(found, value)
    except RecursionError as error:
        raise UnstableError(f"a {type(value).__name__} that contains itself") from error
    return found.hexdigest()


def fingerprint_loader(loader: Any) -> str:
    """Return the SHA-256 of a list or `dsa_hw.zoo.data.Batches`, or of the sizes and first batch of another loader.

    Sizes are the numbers of batches and of examples.

    The first batch is read with fixed random numbers, so that a loader that shuffles gives the same one in every
    process. Random states, and the attributes of the loader, its data set and its samplers, are restored afterwards.

    Raises:
        UnstableError: The loader can be read only once, or its batches have no fingerprint.
    """
    if loader is None or type(loader) in (list, tuple):
        return fingerprint(loader)
    if isinstance(loader, Batches):
        return fingerprint(("Batches", {k: v for k, v in vars(loader).items() if k != "epoch"}))
    return fingerprint(("loader", _length(loader), _length(getattr(loader, "dataset", None)), _first_batch(loader)))


def first_batch(loader: Any) -> Any:
    """Return the first batch, and leave the loader and all random numbers as they were.

    None where there is no batch, or where the loader can be read only once.
    """
    try:
        batch = _first_batch(loader)
    except UnstableError:
        return None
    return None if isinstance(batch, str) else batch


def check_loader(model: nn.Module, loader: Any, name: str, loss: Loss | None = None, *, labelled: bool = True) -> None:
    """Check that the network runs on the first batch of a loader; a loader that can be read only once is not read.

    The state of the loader and all random numbers are the same afterwards as before.

    Args:
        model: The network; not changed.
        loader: The loader; None is accepted.
        name: The argument in the message.
        loss: The loss; an `OwnLoss` is computed, because it runs the network itself.
        labelled: Whether the message asks for targets.

    Raises:
        TrainingError: The loader is something else, gives no batch, or gives inputs that are not finite or that the
            network does not accept.
    """
    if loader is None:
        return
    if isinstance(loader, (str, bytes)) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        kind = "(inputs, targets)" if labelled else "batches"
        raise TrainingError(f"`{name}` must be a loader of {kind}; got {loader!r}.")
    if isinstance(loader, (Dataset, Tensor)):
        given = "a tensor" if isinstance(loader, Tensor) else f"the data set {type(loader).__name__}"
        raise TrainingError(
            f"`{name}` must be a loader of batches, for example DataLoader(dataset, batch_size=64) or a list of "
            f"batches; got {given}."
        )
    try:
        batch = _first_batch(loader)
    except UnstableError:
        return
    if batch is _NO_BATCH:
        raise TrainingError(
            f"The {name} loader is empty. Give one with at least one batch; with drop_last=True the batch must not be "
            "larger than the data."
        )
    moved = on_device(batch, device_of(model))
    if not any(isinstance(a, Tensor) for a in tree_leaves(moved)):
        raise TrainingError(
            f"The {name} loader must yield tensors, or batches with tensors; got {one_line(batch, 60)!r}."
        )
    own = isinstance(loss, OwnLoss)
    tensors = [a for a in tree_leaves(moved[0]) if isinstance(a, Tensor)]
    if not all(bool(torch.isfinite(x).all()) for x in tensors if x.is_floating_point()):
        raise TrainingError(f"The {name} loader gives NaN or infinity. Check the inputs and their normalisation.")
    try:
        with torch.no_grad(), evaluating(model):
            if own:
                checked_loss(model, moved, loss)  # type: ignore[arg-type]
            else:
                outputs_of(model, moved[0])
    except TrainingError as error:
        raise TrainingError(f"`step` fails on a batch of the {name} loader: {error}") from error
    except Exception as error:  # whatever the forward or the step of the user raises
        if own:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise TrainingError(f"`step` fails on a batch of the {name} loader ({reason}).") from error
        given = ", ".join(f"{'x'.join(map(str, a.shape))} {str(a.dtype).removeprefix('torch.')}" for a in tensors)
        advice = "Give inputs of the type and shape of `example_inputs`."
        if moved[0] is moved[1]:
            advice = "A loader yields (inputs, targets), or a dict of arguments of the network; for others give step=."
        raise TrainingError(
            f"The network does not run on a batch of the {name} loader ({given}): {first_line(error)}. {advice}"
        ) from error


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except TypeError:
        return None


def _feed(digest: Any, value: Any) -> None:
    """Add ``value`` to the digest: a tag and the lengths first, so that different values never give the same bytes."""
    kind = type(value)

    def tag(*words: object) -> None:
        digest.update(repr((kind.__module__, kind.__qualname__, *words)).encode())

    if isinstance(value, _PLAIN):
        tag(str(value) if isinstance(value, Path) else value)
    elif isinstance(value, torch.Tensor):
        tag(str(value.dtype), tuple(value.shape))
        data = value.detach().cpu().contiguous().reshape(-1)
        digest.update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    elif isinstance(value, (np.ndarray, np.generic)):
        array = np.ascontiguousarray(value)
        if array.dtype.hasobject:
            raise UnstableError("an array of Python objects")
        tag(array.dtype.str, np.shape(value))
        digest.update(array.tobytes())
    elif isinstance(value, Mapping):
        tag(len(value))
        for key in sorted(value, key=repr):
            _feed(digest, key)
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        tag(len(value))
        for item in value:
            _feed(digest, item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        tag()
        _feed(digest, vars(value))
    elif isinstance(value, functools.partial):
        tag()
        for part in (value.func, value.args, value.keywords):
            _feed(digest, part)
    elif isinstance(value, types.MethodType):
        tag(value.__name__)
        _feed(digest, value.__self__)
        _feed(digest, value.__func__)
    elif isinstance(value, nn.Module):
        tag()
        _feed(digest, kind)
        _feed(digest, {k: v for k, v in vars(value).items() if not k.startswith("_") and k != "training"})
        _feed(digest, [dict(value._parameters), dict(value._buffers), dict(value._modules)])
    elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
        tag(value.__module__, value.__qualname__, _source(value))
    else:
        raise UnstableError(f"a {kind.__module__}.{kind.__qualname__}, whose content is unknown")


def _source(value: Any) -> str:
    """Return the source text of a function or class of a module; "" if it has none."""
    found: Any = sys.modules.get(value.__module__ or "")
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is not value:
        raise UnstableError(f"{value.__qualname__}, which is not a function or class of a module")
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):  # written in C, or typed at a prompt
        return ""


def _first_batch(loader: Any) -> Any:
    parts = _parts(loader)
    for part in parts:
        kept = [v for k, v in getattr(part, "__dict__", {}).items() if k != "_iterator"]  # DataLoader's own, see below
        if any(isinstance(v, Iterator) for v in (part, *kept)):
            raise UnstableError("a loader that can be read only once (an iterator or a generator)")
    with _fixed_random_numbers(parts):
        if isinstance(loader, DataLoader):
            # Use a copy: persistent workers would stay, and the later run would get other random numbers.
            loader = copy.copy(loader)
            vars(loader).update(num_workers=min(loader.num_workers, 1), persistent_workers=False, _iterator=None)
        iterator = iter(loader)
        if iterator is loader or (not isinstance(loader, DataLoader) and iterator is iter(loader)):
            raise UnstableError("a loader that can be read only once (an iterator or a generator)")
        try:
            return next(iterator)
        except StopIteration:
            return _NO_BATCH
        finally:
            if isinstance(iterator, types.GeneratorType):
                iterator.close()


def _parts(loader: Any) -> list[Any]:
    """Return the loader and the objects behind it that may hold state."""
    found: list[Any] = []
    waiting = [loader]
    while waiting:
        part = waiting.pop()
        if part is None or any(part is other for other in found):
            continue
        found.append(part)
        held = getattr(part, "__dict__", {})
        waiting += [held[name] for name in _PARTS if name in held]
    return found


@contextlib.contextmanager
def _fixed_random_numbers(parts: list[Any]) -> Iterator[None]:
    """Seed every source of random numbers with 0, set epochs to 0, and restore all of it afterwards."""
    held_by = [getattr(part, "__dict__", None) for part in parts]
    attributes = [(held, dict(held)) for held in held_by if isinstance(held, dict)]
    owned = [value for _, saved in attributes for value in saved.values()]
    restore: list[Any] = []
    generators = [torch.default_generator, *(v for v in owned if isinstance(v, torch.Generator))]
    for generator in generators:
        restore.append(functools.partial(generator.set_state, generator.get_state()))
    for source in (v.bit_generator for v in owned if isinstance(v, np.random.Generator)):
        restore.append(functools.partial(setattr, source, "state", source.state))
        source.state = type(source)(0).state
    legacy: list[Any] = [np.random, *(v for v in owned if isinstance(v, np.random.RandomState))]
    for state in legacy:
        restore.append(functools.partial(state.set_state, state.get_state()))
        state.seed(0)
    standard: list[Any] = [random, *(v for v in owned if isinstance(v, random.Random))]
    for plain in standard:
        restore.append(functools.partial(plain.setstate, plain.getstate()))
        plain.seed(0)
    if torch.cuda.is_initialized():
        restore.append(functools.partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
        torch.cuda.manual_seed_all(0)
    try:
        for generator in generators:
            generator.manual_seed(0)
        for held, saved in attributes:
            if isinstance(saved.get("epoch"), int):
                held["epoch"] = 0
        yield
    finally:
        for held, saved in attributes:
            for name in [name for name in held if name not in saved]:
                del held[name]
            held.update((name, value) for name, value in saved.items() if held.get(name) is not value)
        for undo in restore:
            undo()
