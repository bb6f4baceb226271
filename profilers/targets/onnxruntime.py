"""ONNX Runtime on the CPU and on CUDA."""

from __future__ import annotations

import os
from typing import Any

from numpy.typing import NDArray

from dsa_hw.errors import MeasurementError, MissingDependencyError
from profilers.targets.base import Loaded, Target, register

__all__ = ["OnnxRuntime", "providers"]


def _module() -> Any:
    # Official wheels from 1.29 on collect telemetry: a thread and files of their own. It must be off before the import.
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            "runtime 'onnxruntime' asked for, but it is not installed; pip install 'dsa-hw[onnx]'"
        ) from error
    return onnxruntime


def providers() -> tuple[str, ...]:
    """Execution providers of the installed ONNX Runtime."""
    return tuple(_module().get_available_providers())


@register("onnxruntime")
class OnnxRuntime(Target):
    """An ONNX file through ``InferenceSession.run``.

    Spinning is off: threads of a waiting session would otherwise burn processor time while others are timed.
    """

    artefact = "onnx"

    def check(self) -> None:
        """The package, what exports to it, and the provider of the device."""
        available = providers()
        if self.device.startswith("cuda") and "CUDAExecutionProvider" not in available:
            raise MissingDependencyError(
                f"device {self.device!r} asked for, but this ONNX Runtime has {', '.join(available)} only; "
                "pip install onnxruntime-gpu, or use --runtime torch"
            )
        if self.device == "mps":
            raise MissingDependencyError("ONNX Runtime has no Metal provider; use --runtime torch for --device mps")

    def load(self, artefact: bytes, inputs: tuple[Any, ...]) -> Loaded:
        """Create a session from the bytes of an ONNX file; inputs are bound in the order of the graph."""
        session = self._session(artefact)
        arrays = [x.cpu().numpy() for x in inputs]
        names = [x.name for x in session.get_inputs()]
        if len(names) != len(arrays):
            raise MeasurementError(f"the ONNX graph takes {names}, but {len(arrays)} inputs were given")
        feed = dict(zip(names, arrays, strict=True))
        if self.device == "cpu":
            run = session.run

            def once() -> object:
                return run(None, feed)

            def outputs() -> list[NDArray[Any]]:
                return list(run(None, feed))

            return Loaded(once, outputs=outputs, operations=lambda: self._operations(artefact, feed))
        return self._on_device(session, feed)

    def describe(self) -> dict[str, str]:
        """Version and session options, as they are set below."""
        return {
            "onnxruntime": _module().__version__,
            "session": f"intra_op_num_threads={self.threads} inter_op_num_threads=1 allow_spinning=0 "
            "graph_optimization_level=all execution_mode=sequential",
            "providers": self._provider(),
        }

    def _provider(self) -> str:
        return "CUDAExecutionProvider" if self.device.startswith("cuda") else "CPUExecutionProvider"

    def _session(self, artefact: bytes, profile: str | None = None) -> Any:
        ort = _module()
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        options.log_severity_level = 3
        if profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = profile
        provider: Any = self._provider()
        if self.device.startswith("cuda"):
            provider = (provider, {"device_id": self.device.partition(":")[2] or "0"})
        try:
            session = ort.InferenceSession(artefact, options, providers=[provider])
        except Exception as error:  # ONNX Runtime has a dozen unrelated exception classes
            raise MeasurementError(f"ONNX Runtime refuses the network for {self.title}: {_line(error)}") from error
        if session.get_providers()[0] != self._provider():
            raise MeasurementError(
                f"asked for {self._provider()}, ONNX Runtime fell back to {session.get_providers()[0]}; "
                "check the CUDA and cuDNN libraries it needs"
            )
        return session

    def _on_device(self, session: Any, feed: dict[str, Any]) -> Loaded:
        """Inputs and outputs stay on the device; ``run_with_iobinding`` returns when the stream is done."""
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

    def _operations(self, artefact: bytes, feed: dict[str, Any]) -> dict[str, float]:
        """Seconds per node, lowest of several runs, from ONNX Runtime's own profile of a second session."""
        import json
        import tempfile
        from pathlib import Path

        found: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as folder:
            session = self._session(artefact, profile=str(Path(folder) / "profile"))
            for _ in range(5):
                session.run(None, feed)
            events = json.loads(Path(session.end_profiling()).read_text())
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                name, seconds = event["name"].removesuffix("_kernel_time"), event["dur"] * 1e-6
                found[name] = min(seconds, found.get(name, seconds))
        return found


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
