"""What int8 does to each layer of a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor, nn

from dsa_hw.errors import ModelError
from dsa_hw.utils.modules import copy_module
from profilers.networks.onnx_export import export
from profilers.networks.quantisation import SCHEMES, Int8, calibrate, layers_of, quantise
from profilers.networks.quantised import graph_batches
from profilers.targets import resolve

__all__ = ["int8_sensitivity"]


def int8_sensitivity(
    model: nn.Module,
    inputs: tuple[Any, ...],
    batches: Sequence[Sequence[Tensor]],
    listener: Callable[[str, float], None] | None = None,
) -> pd.DataFrame:
    """Measure how much each layer alone costs in int8, in ONNX Runtime on the CPU.

    Every other operation stays in fp32. The scheme has unsigned activations.

    Args:
        model: The network in fp32; not changed.
        inputs: Its example inputs.
        batches: Inputs to calibrate and to compare the outputs on.
        listener: Called with the name of each layer and the share that is done.

    Returns:
        A row for each convolution and linear layer, worst first: ``layer``, and ``error``, the L2 norm of the
        difference of the outputs over that of the fp32 outputs.
    """
    arguments = tuple(x.cpu() for x in inputs)
    proto = export(copy_module(model).cpu().eval(), arguments)
    filled = [[x.cpu() for x in batch] for batch in graph_batches(batches, arguments)]
    ranges = calibrate(proto, filled)
    layers = list(layers_of(proto))
    if not layers:
        raise ModelError("The network has no convolution or linear layer that can be quantised.")
    here = resolve("onnxruntime/cpu")

    def outputs(content: Any) -> list[np.ndarray[Any, Any]]:
        run = here.load(bytes(content.SerializeToString()), arguments).run_on
        assert run is not None
        return [np.concatenate([x.ravel() for x in run([b.numpy() for b in batch])]) for batch in filled]

    wanted = outputs(proto)
    norm = float(np.sqrt(sum(float((x.astype(np.float64) ** 2).sum()) for x in wanted))) or 1.0
    rows = []
    for i, layer in enumerate(layers):
        if listener is not None:
            listener(layer, i / len(layers))
        alone = Int8(SCHEMES["u8layers"], tuple(name for name in layers if name != layer))
        found = outputs(quantise(proto, ranges, alone))
        squares = sum(float(((a - b).astype(np.float64) ** 2).sum()) for a, b in zip(wanted, found, strict=True))
        rows.append({"layer": layer, "error": float(np.sqrt(squares)) / norm})
    return pd.DataFrame(rows).sort_values("error", ascending=False, ignore_index=True)
