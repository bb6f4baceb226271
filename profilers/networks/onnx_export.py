"""``nn.Module`` -> ONNX, in the form that people ship: evaluation mode, optimised, one file."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import threading
import warnings
from typing import Any

import torch
from torch import nn

from dsa_hw.channels.trace import copy_sharing_tensors
from dsa_hw.errors import MeasurementError, MissingDependencyError, ModelError

__all__ = ["at_precision", "export", "generic"]

_LARGEST = 2**31 - 1  # bytes of one protobuf message
_ONE = threading.Lock()  # the exporter, and the silence around it, are of the whole process


def at_precision(model: nn.Module, inputs: tuple[Any, ...], precision: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """``model`` and ``inputs`` in "fp32" or "fp16"; the originals are untouched."""
    if precision == "fp32":
        return model, inputs
    half = tuple(x.half() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs)
    return copy.deepcopy(model).half(), half


def generic(model: nn.Module, seed: int = 0) -> nn.Module:
    """A copy of ``model`` in evaluation mode in which no parameter or buffer is constant by accident.

    A network that was never trained has biases of 0, scales of 1, running means of 0. Exporters fold such values away
    (a convolution loses its bias) and merge equal tensors, and the network timed is not the one that will be
    shipped. Constant tensors get small random values; all others, and so every trained network, stay as they are.
    """
    other = copy.deepcopy(model).eval()
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            if tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
                tensor.add_((0.01 + 0.1 * torch.rand(tensor.shape, generator=source)).to(tensor))
    return other


def export(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """The optimised ONNX graph (``onnx.ModelProto``) of ``model`` in evaluation mode, weights inside."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"exporting to ONNX needs the package {error.name}, which is not installed; pip install 'dsa-hw[onnx]'"
        ) from error
    size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    if size >= _LARGEST:
        raise MeasurementError(
            f"the weights take {size / 2**30:.1f} GiB and one ONNX file holds 2; use --precision fp16 or torch"
        )
    copied = copy_sharing_tensors(model).eval()
    try:
        with _ONE, _silence():
            program = torch.onnx.export(copied, inputs, dynamo=True, verbose=False, external_data=False)
    except Exception as error:  # the exporter raises whatever its passes raise
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"torch cannot export this network to ONNX ({reason}); use --runtime torch") from error
    if program is None:
        raise ModelError("torch's ONNX exporter returned nothing; use --runtime torch")
    return program.model_proto


@contextlib.contextmanager
def _silence() -> Any:
    """The exporter warns and logs about its own internals; what matters comes as an exception."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
