"""Targets: their common interface, and a new one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import profilers
from dsa_hw.errors import MeasurementError, MissingDependencyError, ProfileError
from profilers.measuring.rules import MeasuringRules
from profilers.networks.builder import loadable_module
from profilers.networks.onnx_export import export, generic
from profilers.targets import Loaded, Target, base, register, resolve, runtimes

ONNX = ("onnxruntime", "openvino")


def artefact(target: Target, model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return export(model, inputs).SerializeToString() if target.artefact == "onnx" else model


@pytest.mark.parametrize("runtime", ["torch", *ONNX])
def test_runs_outputs_and_description(runtime: str, tiny: tuple[nn.Module, tuple[torch.Tensor, ...]]) -> None:
    model, inputs = generic(tiny[0]), tiny[1]
    target = resolve(f"{runtime}/cpu", threads=1)
    with target.active():
        loaded = target.load(artefact(target, model, inputs), inputs)
        seconds = loaded.run(5)
        assert seconds.shape == (5,)
        assert (seconds > 0).all()
        assert (seconds < 1).all()
        assert loaded.outputs is not None
        with torch.no_grad():
            expected = model(*inputs).numpy()
        np.testing.assert_allclose(loaded.outputs()[0], expected, rtol=1e-3, atol=1e-4)
    described = target.describe()
    assert described
    assert all(isinstance(v, str) for v in described.values())
    assert target.title == f"{runtime}/cpu fp32 x1"


def test_session_options_are_recorded() -> None:
    text = resolve("onnxruntime/cpu", threads=2).describe()["session"]
    assert "intra_op_num_threads=2" in text
    assert "allow_spinning=0" in text


def test_telemetry_of_onnxruntime_is_off_before_it_is_imported() -> None:
    code = (
        "import sys, os; from profilers.targets import resolve; assert 'onnxruntime' not in sys.modules; "
        "resolve('onnxruntime/cpu'); print(os.environ['ORT_DISABLE_TELEMETRY'])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "1"


def test_torch_restores_its_threads() -> None:
    before = torch.get_num_threads()
    with resolve("torch/cpu", threads=before + 1).active():
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("torch/cuda", ("CUDA", "--device cpu")),
        ("torch/cuda:7", ("cuda:7",)),
        ("torch/mps", ("Apple silicon",)),
        ("torch/xpu", ("XPU build", "--device cpu")),
        ("torch/tpu", ("cpu, cuda, xpu, mps",)),
        ("tensorrt/cpu", ("pip install", "tensorrt")),
        ("nonsense/cpu", ("onnxruntime", "register")),
    ],
)
def test_missing_targets_are_errors_with_the_remedy(target: str, words: tuple[str, ...]) -> None:
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("this machine has more than a CPU")
    with pytest.raises(MissingDependencyError) as error:
        resolve(target)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)
    assert all(w in str(error.value) for w in words)


def test_invalid_options_are_errors() -> None:
    with pytest.raises(ProfileError, match="fp32, fp16 or int8"):
        resolve("torch/cpu", precision="int3")
    with pytest.raises(ProfileError, match="threads"):
        resolve("torch/cpu", threads=0)
    with pytest.raises(MissingDependencyError, match="--device cpu only"):
        base._find("openvino")("cuda").check()


def test_invalid_times_of_a_clock_are_an_error() -> None:
    with pytest.raises(MeasurementError, match="must return 3 positive times"):
        Loaded(lambda: None, clock=lambda n: np.zeros(n)).run(3)
    with pytest.raises(MeasurementError, match="must return 3 positive times"):
        Loaded(lambda: None, clock=lambda n: np.ones(n + 1)).run(3)


def test_registered_target_is_measured_and_profiled(
    tiny: tuple[nn.Module, tuple[torch.Tensor, ...]], lenient: MeasuringRules
) -> None:
    """The example of docs/guide/profiling.md."""

    @register("scripted")
    class Scripted(Target):
        def load(self, artefact: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Loaded:
            traced = torch.jit.freeze(torch.jit.trace(artefact.eval(), inputs))
            return Loaded(lambda: traced(*inputs))

        def describe(self) -> dict[str, str]:
            return {"torchscript": torch.__version__}

    try:
        assert "scripted" in runtimes()
        found = profilers.measure(*tiny, target="scripted/cpu", rules=lenient, time_limit=20)
        assert found.target == "scripted/cpu fp32 x1"
        assert found.seconds > 0
        assert found.environment["torchscript"] == torch.__version__
        with pytest.raises(ProfileError, match="already registered"):
            register("scripted")(type("Other", (Scripted,), {}))
        profile = profilers.profile(
            *tiny, target="scripted", samples=4, holdout=1, grid=8, rules=lenient, time_limit=60
        )
        assert len(profile) == 5
        assert profile.prepared == "shrunk"
    finally:
        base._REGISTRY.pop("scripted", None)


def test_fp16_network_is_a_copy(tiny: tuple[nn.Module, tuple[torch.Tensor, ...]]) -> None:
    target = resolve("torch/cpu", precision="fp16")
    network = loadable_module(*tiny, target)
    loaded = network.load()
    assert target.title == "torch/cpu fp16 x1"
    weights = sum(t.numel() for t in tiny[0].state_dict().values())
    assert 2 * weights <= network.size < 2.2 * weights, "two bytes for each"
    assert loaded.outputs is not None
    assert np.isfinite(loaded.outputs()[0]).all()
    result = loaded.once()
    assert isinstance(result, torch.Tensor)
    assert result.dtype == torch.float16
    assert all(p.dtype == torch.float32 for p in tiny[0].parameters()), "the original is untouched"


def test_every_copy_of_a_network_has_its_own_weights(tiny: tuple[nn.Module, tuple[torch.Tensor, ...]]) -> None:
    """Or copies that take turns would find them in the caches."""
    places: list[int] = []

    class Watched(Target):
        runtime = "watched"

        def load(self, artefact: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Loaded:
            places.extend(p.data_ptr() for p in artefact.parameters())
            kept.append(artefact)
            return Loaded(lambda: artefact(*inputs))

    kept: list[nn.Module] = []
    network = loadable_module(*tiny, Watched())
    for _ in range(3):
        network.load()
    assert len(set(places)) == len(places) == 3 * len(list(tiny[0].parameters()))


def test_invalid_network_is_an_error_of_one_line() -> None:
    with pytest.raises(MeasurementError, match="cannot load the network") as error:
        resolve("onnxruntime/cpu").load(b"no model", (torch.zeros(1),))
    assert "\n" not in str(error.value)
    with pytest.raises(MeasurementError, match="cannot load the network"):
        resolve("openvino/cpu").load(b"no model", (torch.zeros(1),))


class FakeTensorRT(types.ModuleType):
    """What TensorRT's documentation says of the builder, as far as we call it; records the calls."""

    __version__ = "11.4.0"

    class Logger:
        WARNING = 2
        ERROR = 1

        def __init__(self, level: int) -> None: ...

    class NetworkDefinitionCreationFlag:
        STRONGLY_TYPED = 1

    def __init__(self) -> None:
        super().__init__("tensorrt")
        self.flags: list[int] = []
        self.caches: list[bytes] = []
        fake = self

        class Cache:
            def __init__(self, content: bytes) -> None:
                self.content = content

            def serialize(self) -> bytes:
                return self.content + b"+kernel"

        class Config:
            def create_timing_cache(self, content: bytes) -> Cache:
                fake.caches.append(content)
                return Cache(content)

            def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> None:
                assert ignore_mismatch is False
                self.cache = cache

            def get_timing_cache(self) -> Cache:
                return self.cache

        class Builder:
            def __init__(self, logger: object) -> None: ...

            def create_network(self, flags: int) -> str:
                fake.flags.append(flags)
                return "network"

            def create_builder_config(self) -> Config:
                return Config()

            def build_serialized_network(self, network: str, config: Config) -> bytes:
                return b"plan"

        class OnnxParser:
            num_errors = 1

            def __init__(self, network: str, logger: object) -> None: ...

            def parse(self, content: bytes) -> bool:
                return content == b"onnx"

            def get_error(self, index: int) -> str:
                return "no such operation"

        self.Builder, self.OnnxParser = Builder, OnnxParser


def test_tensorrt_builds_are_strongly_typed_and_share_a_timing_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTensorRT()
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    target = base._find("tensorrt")("cuda")
    assert [target._build(b"onnx") for _ in range(3)] == [b"plan"] * 3  # type: ignore[attr-defined]
    assert fake.flags == [1 << 1] * 3
    assert fake.caches == [b"", b"+kernel", b"+kernel+kernel"]
    with pytest.raises(MeasurementError, match="no such operation"):
        target._build(b"something else")  # type: ignore[attr-defined]


def test_onnxruntime_never_falls_back_to_the_cpu_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    """As onnxruntime-gpu does on a machine without CUDA's libraries: it has the provider, and the session has not."""
    onnxruntime = pytest.importorskip("onnxruntime")

    class Session:
        def __init__(self, content: bytes, options: object, providers: list[object]) -> None:
            assert providers == [("CUDAExecutionProvider", {"device_id": "1"})]

        def get_providers(self) -> list[str]:
            return ["CPUExecutionProvider"]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    with pytest.raises(MeasurementError, match="fell back from CUDAExecutionProvider to CPUExecutionProvider"):
        base._find("onnxruntime")("cuda:1").load(b"onnx", ())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_tensorrt_without_a_gpu_is_never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runtime crashes the process there, so the GPU is asked for first."""
    monkeypatch.setitem(sys.modules, "tensorrt", FakeTensorRT())
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("TensorRT was started"))
    with pytest.raises(MissingDependencyError, match="needs a CUDA device"):
        base._find("tensorrt")("cuda").check()


@pytest.mark.skipif(not any(shutil.which(c) for c in ("c++", "g++", "clang++")), reason="no C++ compiler")
def test_compile_runs_compiled_code_for_every_configuration() -> None:
    from torch._dynamo.utils import counters

    target = resolve("compile/cpu")
    torch._dynamo.reset()
    counters.clear()
    x = torch.randn(2, 4)
    for width in (3, 5):
        loaded = target.load(nn.Sequential(nn.Linear(4, width), nn.ReLU()), (x,))
        assert loaded.run(2).shape == (2,)
    assert counters["stats"]["unique_graphs"] >= 2, "a compiled graph for each width, no falling back to eager"


_DROPPED = """
import faulthandler, gc, signal, threading, onnx, torch
from onnx import TensorProto, helper
from profilers.targets import resolve

faulthandler.enable()
shape = [1, 3, 8, 8]
ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in "xy"]
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
content = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()
kept = [resolve("openvino/cpu").load(content, (torch.zeros(shape),))]
kept[0].run(1)
drop = threading.Thread(target=lambda: (kept.clear(), gc.collect()))
drop.start()
drop.join()
signal.signal(signal.SIGCHLD, lambda number, frame: print("handled"))
signal.raise_signal(signal.SIGCHLD)
"""


def test_signal_after_openvino_was_dropped_in_another_thread() -> None:
    """The runtime gives the thread that loads a stack for signals; it must not be freed while that thread lives."""
    pytest.importorskip("openvino")
    done = subprocess.run([sys.executable, "-c", _DROPPED], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr
