"""ONNX files made by hand, without an exporter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def small_network(
    path: Path, *, opset: int = 17, batch: int | str = 1, extra: Sequence[Any] = (), side: Any = 12
) -> Path:
    """Write Conv(3, 8), Relu, Conv(8, 16), Relu, mean over the image, Linear(16, 5); ``extra`` nodes follow "y"."""
    import onnx
    from onnx import helper, numpy_helper

    numbers = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> Any:
        return numpy_helper.from_array((numbers.normal(size=shape) / 4).astype(np.float32), name)

    weights = [
        weight("w1", 8, 3, 3, 3), weight("b1", 8), weight("w2", 16, 8, 3, 3), weight("b2", 16), weight("w3", 5, 16),
        weight("b3", 5),
    ]  # fmt: skip
    if opset >= 18:
        weights.append(numpy_helper.from_array(np.array([2, 3], np.int64), "axes"))
        mean = helper.make_node("ReduceMean", ["r2", "axes"], ["m"], keepdims=0)
    else:
        mean = helper.make_node("ReduceMean", ["r2"], ["m"], axes=[2, 3], keepdims=0)
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], kernel_shape=[3, 3], strides=[2, 2]),
        helper.make_node("Relu", ["c2"], ["r2"]),
        mean,
        helper.make_node("Gemm", ["m", "w3", "b3"], ["y"], transB=1),
        *extra,
    ]
    last = nodes[-1].output[0]
    graph = helper.make_graph(
        nodes, "small", [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [batch, 3, side, side])],
        [helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, [batch, 5])], weights,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.example", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path
