"""OpenVINO on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa_hw.errors import MeasurementError, MissingDependencyError
from profilers.targets.base import Loaded, Target, register

__all__ = ["OpenVino"]


def _module() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise MissingDependencyError(
            "runtime 'openvino' asked for, but it is not installed; pip install 'dsa-hw[openvino]'"
        ) from error
    return openvino


@register("openvino")
class OpenVino(Target):
    """An ONNX file through a synchronous infer request, latency hint, one stream."""

    artefact = "onnx"

    def check(self) -> None:
        """The package; and a device it serves."""
        _module()
        if self.device != "cpu":
            raise MissingDependencyError(
                f"the openvino target runs on the CPU, {self.device!r} was asked for; use another --runtime"
            )

    def _options(self, counters: bool) -> dict[str, Any]:
        return {
            "INFERENCE_NUM_THREADS": self.threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32" if self.precision == "fp32" else "f16",
            "PERF_COUNT": counters,
        }

    def _request(self, artefact: bytes, inputs: tuple[Any, ...], counters: bool = False) -> Any:
        core = _module().Core()
        try:
            compiled = core.compile_model(core.read_model(artefact), "CPU", self._options(counters))
        except RuntimeError as error:
            raise MeasurementError(
                f"OpenVINO refuses the network for {self.title}: {' '.join(str(error).split())[:300]}"
            ) from error
        request = compiled.create_infer_request()
        for index, value in enumerate(inputs):
            tensor = _module().Tensor(np.ascontiguousarray(value.cpu().numpy()))
            request.set_input_tensor(index, tensor)
        return request

    def load(self, artefact: bytes, inputs: tuple[Any, ...]) -> Loaded:
        """Compile the bytes of an ONNX file; inputs are set once, so one run is one ``infer``."""
        request = self._request(artefact, inputs)

        def outputs() -> list[NDArray[Any]]:
            request.infer()
            return [np.array(t.data) for t in request.output_tensors]

        return Loaded(request.infer, outputs=outputs, operations=lambda: self._operations(artefact, inputs))

    def describe(self) -> dict[str, str]:
        """Version and compile options."""
        options = " ".join(f"{k}={v}" for k, v in self._options(False).items())
        return {"openvino": _module().get_version(), "openvino options": options}

    def _operations(self, artefact: bytes, inputs: tuple[Any, ...]) -> dict[str, float]:
        request = self._request(artefact, inputs, counters=True)
        for _ in range(5):
            request.infer()
        return {i.node_name: i.real_time.total_seconds() for i in request.profiling_info if i.real_time}
