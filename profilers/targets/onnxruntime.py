"""ONNX Runtime on the CPU and on CUDA."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from dsa_hw.errors import MeasurementError, MissingDependencyError
from dsa_hw.utils.text import one_line
from profilers.targets.base import Loaded, Target, register

__all__ = ["OnnxRuntime", "providers"]


def _module() -> Any:
    # Official wheels from 1.29 on collect telemetry in a thread of their own, which would disturb measurements. The
    # variable is read at import; a value that the user has set is kept.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            "Runtime 'onnxruntime' is not installed. Run: pip install 'dsa-hw[onnx]'"
        ) from error
    return onnxruntime


def providers() -> tuple[str, ...]:
    """Return the execution providers of the installed ONNX Runtime."""
    return tuple(_module().get_available_providers())


@register("onnxruntime")
class OnnxRuntime(Target):
    """An ONNX file run by ``InferenceSession.run``.

    Spinning is off: threads of an idle session would otherwise use processor time while other sessions are timed.
    """

    artefact = "onnx"
    schemes = ("u8", "s8", "u8layers")

    def check(self) -> None:
        """Check that ONNX Runtime is installed with the provider of the device."""
        available = providers()
        if self.device.startswith("cuda") and "CUDAExecutionProvider" not in available:
            raise MissingDependencyError(
                f"This ONNX Runtime has no provider for device {self.device!r}, only {', '.join(available)}. "
                "Run: pip install onnxruntime-gpu, or use --runtime torch."
            )
        if self.device == "mps":
            raise MissingDependencyError("ONNX Runtime has no Metal provider. Use --runtime torch with --device mps.")

    def load(self, artefact: bytes, inputs: tuple[Any, ...]) -> Loaded:
        """Create a session from the bytes of an ONNX file.

        Inputs are bound in the order of the graph.
        """
        session = self._session(artefact)
        arrays = [x.cpu().numpy() for x in inputs]
        names = [x.name for x in session.get_inputs()]
        if len(names) != len(arrays):
            raise MeasurementError(f"The ONNX graph takes the inputs {names}; got {len(arrays)} inputs.")
        feed = dict(zip(names, arrays, strict=True))
        if self.device == "cpu":
            run = session.run

            def once() -> object:
                return run(None, feed)

            def outputs() -> list[NDArray[Any]]:
                return list(run(None, feed))

            def run_on(values: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
                return list(run(None, dict(zip(names, values, strict=True))))

            return Loaded(once, outputs=outputs, run_on=run_on)
        return self._on_device(session, feed)

    def describe(self) -> dict[str, str]:
        """Return the version and the session options."""
        return {
            "onnxruntime": _module().__version__,
            "session": f"intra_op_num_threads={self.threads} inter_op_num_threads=1 allow_spinning=0 "
            "graph_optimization_level=all execution_mode=sequential",
            "providers": self._provider(),
            **self.describe_int8(),
        }

    def _provider(self) -> str:
        return "CUDAExecutionProvider" if self.device.startswith("cuda") else "CPUExecutionProvider"

    def _session(self, artefact: bytes) -> Any:
        ort = _module()
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        options.log_severity_level = 3
        provider: Any = self._provider()
        if self.device.startswith("cuda"):
            provider = (provider, {"device_id": self.device.partition(":")[2] or "0"})
        try:
            session = ort.InferenceSession(artefact, options, providers=[provider])
        except Exception as error:  # ONNX Runtime has a dozen unrelated exception classes
            raise MeasurementError(
                f"ONNX Runtime cannot load the network for {self.title}: {one_line(error)}"
            ) from error
        if session.get_providers()[0] != self._provider():
            raise MeasurementError(
                f"ONNX Runtime fell back from {self._provider()} to {session.get_providers()[0]}. Check the CUDA and "
                "cuDNN libraries that it needs."
            )
        return session

    def _on_device(self, session: Any, feed: dict[str, Any]) -> Loaded:
        """Keep inputs and outputs on the device; ``run_with_iobinding`` returns when the stream is done."""
        ort = _module()
        index = int(self.device.partition(":")[2] or 0)
        binding = session.io_binding()
        for name, array in feed.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, "cuda", index))
        for output in session.get_outputs():
            binding.bind_output(output.name, "cuda", index)

        def once() -> None:
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()

        def outputs() -> list[NDArray[Any]]:
            once()
            return list(binding.copy_outputs_to_cpu())

        return Loaded(once, outputs=outputs)
