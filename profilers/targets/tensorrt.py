"""TensorRT 10.x and 11.x on CUDA.

Written from NVIDIA's documentation for what both major versions share: strongly typed networks (precision comes from
the ONNX types; the fp16 builder flag is gone in 11), named tensors, ``execute_async_v3``. One timing cache serves
all configurations, so that the same kernel choice is not made twice with two outcomes.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa_hw.errors import MeasurementError, MissingDependencyError
from profilers.targets.base import Loaded, Target, register

__all__ = ["TensorRT"]

_REMEDY = (
    "pip install 'dsa-hw[tensorrt]' on a machine with an NVIDIA driver, or use --runtime onnxruntime or --runtime torch"
)


def _module() -> Any:
    try:
        import tensorrt
    except ImportError as error:
        raise MissingDependencyError(f"runtime 'tensorrt' asked for, but it is not installed; {_REMEDY}") from error
    return tensorrt


@register("tensorrt")
class TensorRT(Target):
    """An ONNX file built into an engine; timed with CUDA events on a stream of its own, optionally as a CUDA graph."""

    artefact = "onnx"
    slow_to_load = True

    def __init__(
        self, device: str = "cuda", *, precision: str = "fp32", threads: int = 1, cuda_graph: bool = False
    ) -> None:
        super().__init__(device, precision=precision, threads=threads)
        self.cuda_graph = cuda_graph
        self._timing_cache: bytes = b""

    def check(self) -> None:
        """TensorRT's own probe crashes the process where there is no GPU, so it is asked last and in a subprocess."""
        import torch

        trt = _module()
        if not self.device.startswith("cuda") or not torch.cuda.is_available():
            raise MissingDependencyError(
                f"TensorRT needs a CUDA device, {self.device!r} was asked for and torch sees "
                f"{torch.cuda.device_count()}; use --device cuda on a machine with an NVIDIA GPU"
            )
        major = int(trt.__version__.split(".")[0])
        if major < 10:
            raise MissingDependencyError(f"TensorRT {trt.__version__} found, 10 or later is needed; {_REMEDY}")
        probe = "import tensorrt as t; l = t.Logger(t.Logger.ERROR); assert t.Builder(l) and t.Runtime(l)"
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, timeout=120, check=False)
        if done.returncode:
            raise MissingDependencyError(
                f"TensorRT {trt.__version__} is installed but does not start (exit code {done.returncode}); {_REMEDY}"
            )

    def load(self, artefact: bytes, inputs: tuple[Any, ...]) -> Loaded:
        """Build the engine, put inputs and outputs on the device, and time runs between CUDA events."""
        import torch

        from profilers.targets.torch import cuda_clock

        trt = _module()
        device = torch.device(self.device)
        with torch.cuda.device(device):
            engine = trt.Runtime(trt.Logger(trt.Logger.WARNING)).deserialize_cuda_engine(self._build(artefact))
            if engine is None:
                raise MeasurementError(f"TensorRT cannot load the engine that it built for {self.title}")
            context = engine.create_execution_context()
            stream = torch.cuda.Stream(device)
            tensors = _bind(trt, engine, context, inputs, device)

            def enqueue() -> None:
                if not context.execute_async_v3(stream.cuda_stream):
                    raise MeasurementError("TensorRT's execute_async_v3 failed; its log says why")

            once = self._as_graph(enqueue, stream) if self.cuda_graph else enqueue

        def outputs() -> list[NDArray[Any]]:
            once()
            stream.synchronize()
            return [t.float().cpu().numpy() for name, t in tensors.items() if name in _outputs(trt, engine)]

        def operations() -> dict[str, float]:
            return _layer_times(trt, engine, tensors, stream)

        # Tensors and engine must outlive the closure: TensorRT holds plain addresses.
        once.__dict__["keep"] = (engine, context, tensors)
        return Loaded(once, clock=cuda_clock(once, device, stream), operations=operations, outputs=outputs)

    def describe(self) -> dict[str, str]:
        """Version, device and builder settings; trtexec's defaults differ between 10 and 11, ours do not."""
        import torch

        properties = torch.cuda.get_device_properties(torch.device(self.device))
        return {
            "tensorrt": _module().__version__,
            "gpu": properties.name,
            "cuda": str(torch.version.cuda),
            "builder": f"strongly typed, shared timing cache, cuda graph {self.cuda_graph}",
        }

    def _build(self, artefact: bytes) -> Any:
        trt = _module()
        logger = trt.Logger(trt.Logger.WARNING)
        builder = trt.Builder(logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        if not parser.parse(artefact):
            reasons = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
            raise MeasurementError(f"TensorRT cannot parse the network: {reasons[:300]}")
        config = builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        cache = config.create_timing_cache(self._timing_cache)
        config.set_timing_cache(cache, ignore_mismatch=False)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise MeasurementError(f"TensorRT cannot build the network for {self.title}; its log says why")
        self._timing_cache = bytes(config.get_timing_cache().serialize())
        return plan

    def _as_graph(self, enqueue: Any, stream: Any) -> Any:
        import torch

        with torch.cuda.stream(stream):
            for _ in range(3):  # lazy initialisation must not be captured
                enqueue()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                enqueue()

        def replay() -> None:
            with torch.cuda.stream(stream):
                graph.replay()

        return replay


def _outputs(trt: Any, engine: Any) -> list[str]:
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    return [n for n in names if engine.get_tensor_mode(n) != trt.TensorIOMode.INPUT]


def _bind(trt: Any, engine: Any, context: Any, inputs: tuple[Any, ...], device: Any) -> dict[str, Any]:
    """Device tensors by name, their addresses given to ``context``; inputs in the order of the graph."""
    import torch

    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    wanted = [n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
    if len(wanted) != len(inputs):
        raise MeasurementError(f"the engine takes {wanted}, but {len(inputs)} inputs were given")
    tensors = {name: x.to(device).contiguous() for name, x in zip(wanted, inputs, strict=True)}
    for name in _outputs(trt, engine):
        # trt.nptype has no bfloat16; the types that an fp32 or fp16 export can have are all there.
        dtype = torch.from_numpy(np.empty(0, trt.nptype(engine.get_tensor_dtype(name)))).dtype
        tensors[name] = torch.empty(tuple(engine.get_tensor_shape(name)), dtype=dtype, device=device)
    for name, tensor in tensors.items():
        context.set_tensor_address(name, tensor.data_ptr())
    return tensors


def _layer_times(trt: Any, engine: Any, tensors: dict[str, Any], stream: Any) -> dict[str, float]:
    """Seconds per layer through IProfiler, lowest of several runs, in a context of its own: profiling slows it down."""
    found: dict[str, float] = {}
    context = engine.create_execution_context()
    for name, tensor in tensors.items():
        context.set_tensor_address(name, tensor.data_ptr())

    class _Recorder(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            found[layer_name] = min(ms * 1e-3, found.get(layer_name, ms * 1e-3))

    context.profiler = _Recorder()
    for _ in range(5):
        context.execute_async_v3(stream.cuda_stream)
        stream.synchronize()
    return found
