"""TensorRT 10.x and 11.x on CUDA.

Written after NVIDIA's documentation for what both major versions share: strongly typed networks (precision comes from
the types in the ONNX file and, for int8, from its pairs of Q and DQ; version 11 has no builder flag for either), named
tensors, ``execute_async_v3``. All configurations share one timing cache, so that equal layers always get the same
kernel. `.ci/tensorrt-types` checks every call against the types of NVIDIA's bindings, and a test lists what version 11
has removed.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from dsa_hw.errors import MeasurementError, MissingDependencyError
from dsa_hw.utils.text import one_line
from profilers.targets.accelerator import device_clock
from profilers.targets.base import Loaded, Target, register

if TYPE_CHECKING:
    import tensorrt as trt

__all__ = ["TensorRT"]

_REMEDY = (
    "Run: pip install 'dsa-hw[tensorrt]' on a machine with an NVIDIA driver, or use --runtime onnxruntime or torch."
)


def _check_installed() -> None:
    try:
        import tensorrt  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"Runtime 'tensorrt' is not installed. {_REMEDY}") from error


@register("tensorrt")
class TensorRT(Target):
    """An ONNX file built into an engine and timed with CUDA events.

    Runs use a stream of their own, optionally as a CUDA graph.
    """

    artefact = "onnx"
    slow_to_load = True
    schemes = ("s8sym",)

    def __init__(
        self, device: str = "cuda", *, precision: str = "fp32", threads: int = 1, cuda_graph: bool = False
    ) -> None:
        super().__init__(device, precision=precision, threads=threads)
        self.cuda_graph = cuda_graph
        self._timing_cache: bytes = b""

    def check(self) -> None:
        """Check the GPU, the version, and that TensorRT starts.

        It is started in a subprocess, which crashes without a GPU.
        """
        _check_installed()
        import tensorrt as trt

        if not self.device.startswith("cuda") or not torch.cuda.is_available():
            raise MissingDependencyError(
                f"TensorRT needs a CUDA device; got {self.device!r}, and torch finds {torch.cuda.device_count()} CUDA "
                "devices. Use --device cuda on a machine with an NVIDIA GPU."
            )
        major = int(trt.__version__.split(".")[0])
        if major < 10:
            raise MissingDependencyError(f"TensorRT must be version 10 or later; got {trt.__version__}. {_REMEDY}")
        probe = "import tensorrt as t; l = t.Logger(t.Logger.ERROR); assert t.Builder(l) and t.Runtime(l)"
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, timeout=120, check=False)
        if done.returncode:
            raise MissingDependencyError(
                f"TensorRT {trt.__version__} is installed but does not start (exit code {done.returncode}). {_REMEDY}"
            )

    def load(self, artefact: bytes, inputs: tuple[Any, ...]) -> Loaded:
        """Build the engine and bind inputs and outputs on the device."""
        import tensorrt as trt

        device = torch.device(self.device)
        with torch.cuda.device(device):
            engine = trt.Runtime(trt.Logger(trt.Logger.WARNING)).deserialize_cuda_engine(self._build(artefact))
            if engine is None:
                raise MeasurementError(f"TensorRT cannot load the engine that it built for {self.title}.")
            context = engine.create_execution_context()
            stream = torch.cuda.Stream(device)
            tensors = _bind(engine, context, inputs, device)

            def enqueue() -> None:
                if not context.execute_async_v3(stream.cuda_stream):
                    raise MeasurementError("TensorRT's execute_async_v3 failed; see its log.")

            once = self._as_graph(enqueue, stream) if self.cuda_graph else enqueue

        def outputs() -> list[NDArray[Any]]:
            once()
            stream.synchronize()
            return [t.float().cpu().numpy() for name, t in tensors.items() if name in _outputs(engine)]

        # Tensors and engine must outlive the closure: TensorRT holds plain addresses.
        once.__dict__["keep"] = (engine, context, tensors)
        return Loaded(once, clock=device_clock(once, device, stream), outputs=outputs)

    def describe(self) -> dict[str, str]:
        """Return version, device and builder settings.

        The settings are equal for TensorRT 10 and 11.
        """
        import tensorrt as trt

        properties = torch.cuda.get_device_properties(torch.device(self.device))
        return {
            "tensorrt": trt.__version__,
            "gpu": properties.name,
            "cuda": str(torch.version.cuda),
            "builder": f"strongly typed, shared timing cache, cuda graph {self.cuda_graph}",
            **self.describe_int8(),
        }

    def _build(self, artefact: bytes) -> trt.IHostMemory:
        import tensorrt as trt

        logger = trt.Logger(trt.Logger.WARNING)
        builder = trt.Builder(logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        if not parser.parse(artefact):
            reasons = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
            raise MeasurementError(f"TensorRT cannot parse the network: {one_line(reasons)}")
        config = builder.create_builder_config()
        cache = config.create_timing_cache(self._timing_cache)
        config.set_timing_cache(cache, ignore_mismatch=False)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise MeasurementError(f"TensorRT cannot build the network for {self.title}; see its log.")
        self._timing_cache = bytes(config.get_timing_cache().serialize())
        return plan

    def _as_graph(self, enqueue: Any, stream: Any) -> Any:
        with torch.cuda.stream(stream):
            for _ in range(3):  # lazy initialisation must not be part of the captured graph
                enqueue()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                enqueue()

        def replay() -> None:
            with torch.cuda.stream(stream):
                graph.replay()

        return replay


def _outputs(engine: trt.ICudaEngine) -> list[str]:
    import tensorrt as trt

    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    return [n for n in names if engine.get_tensor_mode(n) != trt.TensorIOMode.INPUT]


def _bind(
    engine: trt.ICudaEngine, context: trt.IExecutionContext, inputs: tuple[torch.Tensor, ...], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return device tensors by name and give their addresses to ``context``; inputs in the order of the graph."""
    import tensorrt as trt

    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    wanted = [n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
    if len(wanted) != len(inputs):
        raise MeasurementError(f"The engine takes the inputs {wanted}; got {len(inputs)} inputs.")
    tensors = {name: x.to(device).contiguous() for name, x in zip(wanted, inputs, strict=True)}
    for name in _outputs(engine):
        # trt.nptype lacks bfloat16, which an fp32 or fp16 export does not produce.
        dtype = torch.from_numpy(np.empty(0, trt.nptype(engine.get_tensor_dtype(name)))).dtype
        shape = engine.get_tensor_shape(name)
        tensors[name] = torch.empty([int(shape[i]) for i in range(len(shape))], dtype=dtype, device=device)
    for name, tensor in tensors.items():
        context.set_tensor_address(name, tensor.data_ptr())
    return tensors
