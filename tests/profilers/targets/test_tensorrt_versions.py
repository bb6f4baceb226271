"""The TensorRT target uses nothing that TensorRT 11 has removed."""

from __future__ import annotations

import ast
import inspect

from profilers.targets import tensorrt

# NVIDIA's migration guide from 10 to 11: weakly typed networks, implicit quantisation and what had a successor.
REMOVED_IN_11 = {
    "BF16",
    "DIRECT_IO",
    "EXPLICIT_BATCH",
    "FP16",
    "FP8",
    "IInt8Calibrator",
    "IInt8EntropyCalibrator2",
    "INT4",
    "INT8",
    "OBEY_PRECISION_CONSTRAINTS",
    "PREFER_PRECISION_CONSTRAINTS",
    "device_memory_size",
    "get_calibration_profile",
    "int8_calibrator",
    "output_type_is_set",
    "precision_is_set",
    "reset_precision",
    "set_calibration_profile",
    "set_dynamic_range",
}


def used_names() -> set[str]:
    tree = ast.parse(inspect.getsource(tensorrt))
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_nothing_that_version_11_removed_is_used() -> None:
    names = used_names()
    assert {"execute_async_v3", "STRONGLY_TYPED", "set_tensor_address"} <= names, "or this test reads the wrong file"
    assert not names & REMOVED_IN_11
