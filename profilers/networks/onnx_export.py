"""Export an ``nn.Module`` to one optimised ONNX file."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import warnings
from typing import Any

import torch
from torch import nn

from dsa_hw.channels.trace import copy_sharing_tensors
from dsa_hw.errors import MeasurementError, MissingDependencyError, ModelError
from dsa_hw.utils.modules import copy_module
from dsa_hw.utils.text import one_line

__all__ = ["at_precision", "export", "generic"]

_LARGEST = 2**31 - 1  # bytes of one protobuf message
_ONE = threading.Lock()  # the exporter, and what `_silence` changes, are process-wide


def at_precision(model: nn.Module, inputs: tuple[Any, ...], precision: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return ``model`` and ``inputs``, as copies in fp16 where that is the precision; int8 begins with fp32."""
    if precision != "fp16":
        return model, inputs
    half = tuple(x.half() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs)
    return copy_module(model).half(), half


def generic(model: nn.Module, seed: int = 0) -> nn.Module:
    """Return a copy of ``model`` in which no parameter or buffer is constant.

    The copy is in evaluation mode. An untrained network has biases of 0, scales of 1 and running means of 0. Exporters
    remove such values (a convolution loses its bias) and merge equal tensors, so that the network that is timed would
    not be the one that is deployed. Constant tensors get small random values; all other tensors, and so trained
    networks, do not change.
    """
    other = copy_module(model).eval()
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            if tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
                tensor.add_((0.01 + 0.1 * torch.rand(tensor.shape, generator=source)).to(tensor))
    return other


def export(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Return the ONNX graph of ``model`` in evaluation mode, with its weights.

    The graph is an optimised ``onnx.ModelProto``.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"Export to ONNX needs the package {error.name}, which is not installed. Run: pip install 'dsa-hw[onnx]'"
        ) from error
    size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    if size >= _LARGEST:
        raise MeasurementError(
            f"One ONNX file holds at most 2 GiB of weights; got {size / 2**30:.1f} GiB. Use --precision fp16 or "
            "--runtime torch."
        )
    copied = copy_sharing_tensors(model).eval()
    try:
        with _ONE, _silence():
            program = torch.onnx.export(copied, inputs, dynamo=True, verbose=False, external_data=False)
    except Exception as error:  # the exporter raises whatever its passes raise
        reason = one_line(error)
        raise ModelError(f"torch cannot export this network to ONNX ({reason}). Use --runtime torch.") from error
    if program is None:
        raise ModelError("torch's ONNX exporter returned nothing. Use --runtime torch.")
    return program.model_proto


@contextlib.contextmanager
def _silence() -> Any:
    """Suppress warnings and logs about the exporter's internals; real problems are exceptions."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
