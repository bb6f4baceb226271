"""OpenVINO on the CPU."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa_hw.errors import MeasurementError, MissingDependencyError, ProfileError
from dsa_hw.utils.files import write_bytes
from dsa_hw.utils.text import one_line
from profilers.targets.base import Loaded, Target, register

__all__ = ["OpenVino", "write_ir"]


def _module() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise MissingDependencyError(
            "Runtime 'openvino' is not installed. Run: pip install 'dsa-hw[openvino]'"
        ) from error
    return openvino


@functools.cache
def _core() -> Any:
    """Return the one core of this process, which lives as long as the process.

    Its CPU plugin gives the calling thread a stack for signals and frees it with the last core; freed in another
    thread, the next signal that Python handles (the end of a data loader's worker, say) would end the process.
    """
    return _module().Core()


@register("openvino")
class OpenVino(Target):
    """An ONNX file run by synchronous infer requests.

    Options: the latency hint, one stream.
    """

    artefact = "onnx"
    schemes = ("u8", "s8", "u8layers")

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
            "INFERENCE_PRECISION_HINT": "f16" if self.precision == "fp16" else "f32",
            "PERF_COUNT": False,
        }

    def _request(self, artefact: bytes, inputs: tuple[Any, ...]) -> Any:
        core = _core()
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

        def run_on(values: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
            found = request.infer(dict(enumerate(values)))
            return [np.array(found[i]) for i in range(len(found))]

        return Loaded(request.infer, outputs=outputs, run_on=run_on)

    def describe(self) -> dict[str, str]:
        """Return the version and the compile options."""
        options = " ".join(f"{k}={v}" for k, v in self._options().items())
        return {"openvino": _module().get_version(), "openvino options": options, **self.describe_int8()}


def write_ir(content: bytes, path: Path) -> int:
    """Write an ONNX file as OpenVINO IR: ``path`` (.xml) and the weights beside it (.bin).

    Args:
        content: The bytes of the ONNX file.
        path: The .xml file.

    Returns:
        The size of both files in bytes.

    Raises:
        ProfileError: The path does not end in .xml.
        DsaError: A file cannot be written.
    """
    if path.suffix != ".xml":
        raise ProfileError(f"A file of OpenVINO IR must end in .xml; got {str(path)!r}.")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / path.name
        _module().save_model(_core().read_model(content), made, compress_to_fp16=False)
        parts = {end: made.with_suffix(end).read_bytes() for end in (".bin", ".xml")}
    for end, part in parts.items():
        write_bytes(path.with_suffix(end), part)
    return sum(map(len, parts.values()))
