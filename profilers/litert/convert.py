"""``nn.Module`` -> LiteRT files, through the worker: converted once, then narrowed for every configuration."""

from __future__ import annotations

import contextlib
import io
import warnings
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dsa_hw.channels.trace import copy_sharing_tensors
from dsa_hw.errors import ModelError, ProfileError, TraceError
from profilers.litert.client import Worker

if TYPE_CHECKING:
    from dsa_hw.channels import ChannelGroups

__all__ = ["ConvertedNetwork", "TfliteFile", "arrays_of", "convert", "to_bytes"]


class TfliteFile:
    """A float32 LiteRT file in the worker's folder; the file goes with this object."""

    def __init__(self, worker: Worker, path: Path) -> None:
        self.worker = worker
        self.name = path.name
        weakref.finalize(self, path.unlink, missing_ok=True)

    def content(self) -> bytes:
        """The file."""
        return (self.worker.folder / self.name).read_bytes()


def convert(worker: Worker, model: nn.Module, inputs: tuple[Any, ...]) -> tuple[TfliteFile, str]:
    """``model`` in evaluation mode as a LiteRT file, and why it cannot be narrowed (empty where it can)."""
    if bad := [tuple(x.shape) for x in inputs if not x.is_floating_point()]:
        raise ModelError(f"LiteRT targets take images and other floating-point inputs, got integers of shape {bad[0]}")
    program, path = worker.path(".pt2"), worker.path(".tflite")
    try:
        program.write_bytes(_program(model, inputs))
        answer = worker.ask("convert", program=program.name, model=path.name, shapes=[list(x.shape) for x in inputs])
    finally:
        program.unlink(missing_ok=True)
    return TfliteFile(worker, path), str(answer["narrows"])


def to_bytes(model: nn.Module, inputs: tuple[Any, ...]) -> bytes:
    """``model`` as the bytes of a float32 LiteRT file, images channel-last."""
    worker = Worker()
    try:
        return convert(worker, model, inputs)[0].content()
    finally:
        worker.close()


def _program(model: nn.Module, inputs: tuple[Any, ...]) -> bytes:
    """The archive of ``torch.export``: graph as JSON, tensors as bytes; no example inputs: they would be pickled."""
    copied = copy_sharing_tensors(model).eval()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(copied, inputs, strict=False)
            exported.example_inputs = None
            buffer = io.BytesIO()
            torch.export.save(exported, buffer)
    except Exception as error:  # torch.export raises whatever the network's code raises
        raise TraceError(f"torch.export cannot trace this network: {' '.join(str(error).split())[:300]}") from error
    return buffer.getvalue()


class ConvertedNetwork:
    """A network converted once, from which any configuration can be made."""

    def __init__(self, worker: Worker, model: nn.Module, groups: ChannelGroups, inputs: tuple[Any, ...]) -> None:
        self.groups = groups
        self._worker = worker
        self._file, self._reason = convert(worker, model, inputs)
        weakref.finalize(self, _forget, worker, self._file.name)

    def make(self, kept: Sequence[NDArray[np.int64]]) -> TfliteFile:
        """The LiteRT file of the configuration that keeps ``kept``; `ProfileError` where it cannot be narrowed."""
        if self._reason:
            raise ProfileError(f"cannot narrow the converted network: {self._reason}")
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
            raise ProfileError(f"cannot narrow the converted network: {error}") from error
        return TfliteFile(self._worker, path)


def _forget(worker: Worker, name: str) -> None:
    if worker.pid is not None:
        worker.ask("forget", model=name)


@contextlib.contextmanager
def arrays_of(worker: Worker, inputs: tuple[Any, ...]) -> Iterator[list[str]]:
    """Inputs as .npy files in the worker's folder, channel-first as torch has them; their names."""
    paths = [worker.path(".npy") for _ in inputs]
    try:
        for path, x in zip(paths, inputs, strict=True):
            np.save(path, x.detach().cpu().float().numpy(), allow_pickle=False)
        yield [path.name for path in paths]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
