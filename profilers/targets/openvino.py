"""OpenVINO on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa_hw.errors import MeasurementError, MissingDependencyError
from dsa_hw.utils.text import one_line
from profilers.targets.base import Loaded, Target, register

__all__ = ["OpenVino"]


def _module() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise MissingDependencyError(
            "Runtime 'openvino' is not installed. Run: pip install 'dsa-hw[openvino]'"
        ) from error
    return openvino


@register("openvino")
class OpenVino(Target):
    """An ONNX file run by synchronous infer requests.

    Options: the latency hint, one stream.
    """

    artefact = "onnx"

    def check(self) -> None:
        """Check that OpenVINO is installed and that the device is the CPU."""
        _module()
        if self.device != "cpu":
            raise MissingDependencyError(
                f"Runtime 'openvino' supports --device cpu only; got {self.device!r}. Use another --runtime."
            )

    def _options(self) -> dict[str, Any]:
        return {
            "INFERENCE_NUM_THREADS": self.threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32" if self.precision == "fp32" else "f16",
            "PERF_COUNT": False,
        }

    def _request(self, artefact: bytes, inputs: tuple[Any, ...]) -> Any:
        core = _module().Core()
        try:
            compiled = core.compile_model(core.read_model(artefact), "CPU", self._options())
        except RuntimeError as error:
            raise MeasurementError(f"OpenVINO cannot load the network for {self.title}: {one_line(error)}") from error
        request = compiled.create_infer_request()
        for index, value in enumerate(inputs):
            tensor = _module().Tensor(np.ascontiguousarray(value.cpu().numpy()))
            request.set_input_tensor(index, tensor)
        return request

    def load(self, artefact: bytes, inputs: tuple[Any, ...]) -> Loaded:
        """Compile the bytes of an ONNX file.

        Inputs are set once, so that one run is one ``infer``.
        """
        request = self._request(artefact, inputs)

        def outputs() -> list[NDArray[Any]]:
            request.infer()
            return [np.array(t.data) for t in request.output_tensors]

        return Loaded(request.infer, outputs=outputs)

    def describe(self) -> dict[str, str]:
        """Return the version and the compile options."""
        options = " ".join(f"{k}={v}" for k, v in self._options().items())
        return {"openvino": _module().get_version(), "openvino options": options}
