"""Convert networks to LiteRT files through the worker.

A network is converted once, then narrowed for every configuration.
"""

from __future__ import annotations

import contextlib
import io
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from dsa_hw.channels.trace import copy_sharing_tensors
from dsa_hw.errors import ModelError, ProfileError, TraceError
from dsa_hw.utils.arrays import Ints
from dsa_hw.utils.text import one_line
from profilers.litert.client import Worker, invalid_answer

if TYPE_CHECKING:
    from dsa_hw.channels import ChannelGroups

__all__ = ["ConvertedNetwork", "TfliteFile", "arrays_of", "convert", "quantise", "to_bytes", "written"]


class TfliteFile:
    """A LiteRT file in the worker's folder; it is deleted with this object."""

    def __init__(self, worker: Worker, path: Path) -> None:
        self.worker = worker
        self.name = path.name
        weakref.finalize(self, path.unlink, missing_ok=True)

    def content(self) -> bytes:
        """Return the bytes of the file."""
        return (self.worker.folder / self.name).read_bytes()


def convert(worker: Worker, model: nn.Module, inputs: tuple[Any, ...]) -> tuple[TfliteFile, str]:
    """Convert ``model`` in evaluation mode to a LiteRT file.

    Args:
        worker: The process that converts.
        model: The network.
        inputs: Its example inputs, floating point.

    Returns:
        The file, and why it cannot be narrowed (empty if it can).

    Raises:
        ModelError: The network or its inputs are not supported.
        TraceError: torch.export cannot trace the network.
    """
    if bad := [tuple(x.shape) for x in inputs if not x.is_floating_point()]:
        raise ModelError(f"LiteRT targets need floating-point inputs; got integers of shape {bad[0]}.")
    program, path = worker.path(".pt2"), worker.path(".tflite")
    try:
        program.write_bytes(_program(model, inputs))
        answer = worker.ask("convert", program=program.name, model=path.name, shapes=[list(x.shape) for x in inputs])
    finally:
        program.unlink(missing_ok=True)
    if not isinstance(answer.get("narrows"), str) or not path.is_file():
        raise invalid_answer("convert", one_line(repr(answer), 80))
    return TfliteFile(worker, path), one_line(answer["narrows"])


def written(worker: Worker, content: bytes) -> TfliteFile:
    """Return a file with this content."""
    path = worker.path(".tflite")
    path.write_bytes(content)
    return TfliteFile(worker, path)


def quantise(
    file: TfliteFile, inputs: tuple[Any, ...], ranges: Mapping[str, tuple[float, float]] | None = None
) -> tuple[TfliteFile, dict[str, tuple[float, float]]]:
    """Quantise a float32 file to int8: weights per output channel, activations with static ranges.

    Args:
        file: The float32 file; it stays as it is.
        inputs: Each input as one tensor, of a multiple of the file's batch size, to observe ranges on.
        ranges: The ranges of an earlier call for the same network, in place of ``inputs``.

    Returns:
        The int8 file, and the ranges by the number of the tensor.

    Raises:
        ModelError: The quantiser does not support the network.
    """
    worker, path = file.worker, file.worker.path(".int8.tflite")
    given = None if ranges is None else {name: list(pair) for name, pair in ranges.items()}
    with arrays_of(worker, inputs) as arrays:
        answer = worker.ask("quantise", model=file.name, to=path.name, inputs=arrays, ranges=given)
    found = answer.get("ranges")
    if not isinstance(found, dict) or not all(_is_range(pair) for pair in found.values()) or not path.is_file():
        raise invalid_answer("quantise", "ranges must be pairs of numbers")
    return TfliteFile(worker, path), {str(name): (float(low), float(high)) for name, (low, high) in found.items()}


def _is_range(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(type(end) in (int, float) for end in pair)


def to_bytes(model: nn.Module, inputs: tuple[Any, ...]) -> bytes:
    """Return ``model`` as the bytes of a float32 LiteRT file, images channel-last."""
    worker = Worker()
    try:
        return convert(worker, model, inputs)[0].content()
    finally:
        worker.close()


def _program(model: nn.Module, inputs: tuple[Any, ...]) -> bytes:
    """Return the archive of ``torch.export``, without example inputs, which would be pickled."""
    copied = copy_sharing_tensors(model).eval()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(copied, inputs, strict=False)
            exported.example_inputs = None
            buffer = io.BytesIO()
            torch.export.save(exported, buffer)
    except Exception as error:  # torch.export raises whatever the network's code raises
        raise TraceError(f"torch.export cannot trace this network: {one_line(error)}") from error
    return buffer.getvalue()


class ConvertedNetwork:
    """A network converted once, from which the worker makes any configuration."""

    def __init__(self, worker: Worker, model: nn.Module, groups: ChannelGroups, inputs: tuple[Any, ...]) -> None:
        self.groups = groups
        self._worker = worker
        self._file, self._reason = convert(worker, model, inputs)
        weakref.finalize(self, worker.forget, self._file.name)

    @property
    def plain(self) -> ConvertedNetwork:
        """What makes files in float32: this; a target in int8 quantises them when it loads them."""
        return self

    def make(self, kept: Sequence[Ints]) -> TfliteFile:
        """Return the LiteRT file of the configuration that keeps ``kept``.

        `ProfileError` if it cannot be narrowed.
        """
        if self._reason:
            raise ProfileError(f"Cannot narrow the converted network: {self._reason}.")
        mask = self.groups.flat_mask(kept)
        slices = {
            name: {str(axis): indices.tolist() for axis, indices in cuts.items()}
            for name, cuts in self.groups.slices(kept).items()
        }
        pads = [[pad.before, mask[units].tolist()] for pad, units in self.groups.pads]
        path = self._worker.path(".tflite")
        try:
            self._worker.ask("narrow", template=self._file.name, model=path.name, slices=slices, pads=pads)
        except ModelError as error:
            raise ProfileError(f"Cannot narrow the converted network: {error}.") from error
        return TfliteFile(self._worker, path)


@contextlib.contextmanager
def arrays_of(worker: Worker, inputs: tuple[Any, ...]) -> Iterator[list[str]]:
    """Save inputs as .npy files for the body, and yield their names.

    The files are in the worker's folder, channel-first.
    """
    paths = [worker.path(".npy") for _ in inputs]
    try:
        for path, x in zip(paths, inputs, strict=True):
            np.save(path, x.detach().cpu().float().numpy(), allow_pickle=False)
        yield [path.name for path in paths]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
