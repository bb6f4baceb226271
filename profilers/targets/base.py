"""What a target is: it takes a network, makes it ready to run, and says how long each run takes.

A new target is a class with one method. `load` gets an artefact (an ``nn.Module`` or the bytes of an ONNX file,
whichever the class asks for) and the inputs, and returns a `Loaded` around a function that does one complete run::

    @register("mine")
    class Mine(Target):
        def load(self, artefact, inputs):
            return Loaded(lambda: artefact(*inputs))

Warm-up, interleaving, the control workload, trust, the store and the command line then work unchanged.

A target that computes a time instead of measuring one says so in ``estimated`` and returns ``Loaded.exact(seconds)``:
one run is then the whole measurement, ``low`` and ``high`` are the value itself, and no control workload is run.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsa_hw.errors import MeasurementError, MissingDependencyError, ProfileError

if TYPE_CHECKING:
    from profilers.measuring.bench import Bench
    from profilers.remote.interface import Elsewhere

__all__ = ["Loaded", "Target", "from_title", "register", "resolve", "runtimes"]

Seconds = NDArray[np.float64]

_BUILT_IN = ("torch", "compile", "onnxruntime", "openvino", "tensorrt", "table", "ssh", "adb", "litert", "ethos_u")
# Devices that bring their own target: how the device is written -> module of profilers.targets, and the name that
# it registers. Such a target checks its device itself, in `Target.check`.
_OWN = {"table:": "table", "ssh:": "ssh", "adb:": "adb", "ethos-u": "ethos_u"}
# Titles of targets that are this computer's: no host, no path, no option.
_TITLE = re.compile(
    r"(?P<runtime>\w+)/(?P<device>cpu|cuda(:\d{1,3})?|mps) (?P<precision>fp32|fp16)( x(?P<threads>[1-9]\d{0,3}))?",
    re.ASCII,
)
_ETHOS_U = re.compile(r"(?P<name>ethos-u\d+-\d+) int8 \w+ \w+", re.ASCII)
_REGISTRY: dict[str, type[Target]] = {}
_T = TypeVar("_T", bound="type[Target]")


@dataclass(frozen=True, eq=False)
class Loaded:
    """A network that is ready to run.

    ``once`` does one complete run: when it returns, the outputs are there. ``clock`` replaces the host's clock where
    the device has a better one (CUDA events): it takes n and returns n seconds. ``operations`` gives seconds per
    operation. ``outputs`` gives the outputs as arrays, for checks.
    """

    once: Callable[[], object]
    clock: Callable[[int], Seconds] | None = None
    operations: Callable[[], dict[str, float]] | None = None
    outputs: Callable[[], list[NDArray[Any]]] | None = None

    @classmethod
    def exact(cls, seconds: float, operations: dict[str, float] | None = None) -> Loaded:
        """A network whose time was computed: every run takes ``seconds``; ``operations`` are the parts of it."""
        return cls(
            once=lambda: None,
            clock=lambda n: np.full(n, float(seconds)),
            operations=None if operations is None else lambda: dict(operations),
        )

    def run(self, n: int) -> Seconds:
        """Run ``n`` times back to back; seconds of each run, shape (n,)."""
        enabled = gc.isenabled()
        gc.disable()  # a collection in the middle of a run is our own interference
        try:
            seconds = self._host_clock(n) if self.clock is None else np.asarray(self.clock(n), np.float64)
        finally:
            if enabled:
                gc.enable()
        if seconds.shape != (n,) or not np.all(np.isfinite(seconds)) or np.any(seconds <= 0):
            raise MeasurementError(
                f"asked the target for {n} positive times, got {seconds!r:.120}; the target's clock is broken"
            )
        return seconds

    def _host_clock(self, n: int) -> Seconds:
        once, clock = self.once, time.perf_counter
        stamps = [clock()]
        for _ in range(n):
            once()
            stamps.append(clock())
        return np.diff(np.asarray(stamps))


class Target(ABC):
    """A runtime on a device. Subclasses set ``artefact`` and write `load`; the rest has sensible defaults.

    ``device`` is "cpu", "cuda", "cuda:1" or "mps"; ``precision`` is "fp32" or "fp16" (the artefact and the inputs
    arrive already in it); ``threads`` counts CPU threads of one run.
    """

    runtime: ClassVar[str] = ""
    artefact: ClassVar[Literal["module", "onnx"]] = "module"
    slow_to_load: ClassVar[bool] = False  # loading compiles for seconds: the grid sweep is then kept short
    estimated: str | None = None  # whose word it is, where times are computed: "estimated by Vela 4.2"
    elsewhere: Elsewhere | None = None  # the device, where it is not this computer's: visits are made over there

    def __init__(self, device: str = "cpu", *, precision: str = "fp32", threads: int = 1) -> None:
        self.device = device
        self.precision = precision
        self.threads = threads

    @abstractmethod
    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        """Make ``artefact`` ready to run on ``inputs`` (torch tensors on the CPU)."""

    def check(self) -> None:  # noqa: B027  (nothing to check is a fine default)
        """Raise `MissingDependencyError` where the runtime or the device is not here."""

    def template(self, model: Any, groups: Any, inputs: tuple[Any, ...]) -> Any:
        """Something whose ``make(kept)`` gives artefacts quickly, where the target has a better way than shrinking."""
        return None

    def known_grid(self) -> int | None:
        """The multiple of channels that this target likes, where that is known; None finds out with a sweep."""
        return None

    def bench(self, **options: Any) -> Bench:
        """Where networks on this target are measured; ``options`` are those of `profilers.measuring.bench.Bench`."""
        from profilers.measuring.bench import Bench

        return Bench(self, **options)

    def describe(self) -> dict[str, str]:
        """Versions and flags that change what is measured; part of the environment of every measurement."""
        return {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Hold process-wide settings (thread counts) while measuring, and give them back."""
        yield

    @property
    def name(self) -> str:
        """``runtime/device``, as it is written to `resolve`; the device alone where it brings its own target."""
        return self.device if _owner(self.device) else f"{self.runtime}/{self.device}"

    @property
    def title(self) -> str:
        """The target in full: runtime, device, precision and threads; measurements are kept apart by it."""
        threads = f" x{self.threads}" if self.device == "cpu" else ""
        return f"{self.name} {self.precision}{threads}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.title}>"


def register(name: str) -> Callable[[_T], _T]:
    """Class decorator: make a target available under ``name``."""

    def decorate(cls: _T) -> _T:
        if name in _REGISTRY and _REGISTRY[name].__qualname__ != cls.__qualname__:
            raise ProfileError(f"target {name!r} is already registered by {_REGISTRY[name]!r}; choose another name")
        cls.runtime = name
        _REGISTRY[name] = cls
        return cls

    return decorate


def runtimes() -> tuple[str, ...]:
    """Names of all targets that can be asked for."""
    return tuple(dict.fromkeys((*_BUILT_IN, *_REGISTRY)))


def resolve(target: str | Target, *, precision: str = "fp32", threads: int = 1) -> Target:
    """A checked target from ``"runtime/device"``, ``"runtime"`` or ``"auto/device"``; a `Target` passes through.

    A device that brings its own target (``"table:pi3.csv"``) may stand alone or behind ``auto/``.
    """
    if isinstance(target, Target):
        target.check()
        return target
    runtime, _, device = ("auto", "/", target) if _owner(target) else target.partition("/")
    device = device or "cpu"
    owner = _owner(device)
    if precision not in ("fp32", "fp16"):
        raise ProfileError(f"precision {precision!r} is not known; use fp32 or fp16")
    if threads < 1:
        raise ProfileError(f"{threads} threads asked for; use 1 or more")
    if owner is not None:
        if runtime not in ("auto", owner):
            raise ProfileError(f"--runtime {runtime} does not go with --device {device}; leave --runtime out")
        runtime = owner
    else:
        _check_device(device)
        if runtime == "auto":
            runtime = _best_runtime(device)
    cls = _find(runtime)
    found = cls(device, precision=precision, threads=threads)
    found.check()
    return found


def from_title(title: str) -> Target:
    """A checked target from a title that was read from a file: runtimes and devices of this computer only.

    A title that names a host, a phone, a file or a configuration is refused before anything is opened or connected:
    a file must not choose these. The user can, with `resolve`.
    """
    found = _TITLE.fullmatch(title)
    local = [name for name in runtimes() if name not in _OWN.values()]
    target: Target | None = None
    if found and found["runtime"] in local:
        name, threads = f"{found['runtime']}/{found['device']}", int(found["threads"] or 1)
        target = resolve(name, precision=found["precision"], threads=threads)
    elif accelerator := _ETHOS_U.fullmatch(title):
        target = resolve(accelerator["name"])
    if target is None or target.title != title:
        raise ProfileError(
            "A file cannot choose a target that is not a runtime on this computer with its usual settings. Name it "
            f"with --target (target= in Python), for example --target ssh://board or --target table:pi.csv; the file "
            f"names {title!r}."
        )
    return target


def _owner(device: str) -> str | None:
    """The target that a device brings with it, by how the device is written."""
    return next((name for prefix, name in _OWN.items() if device.startswith(prefix)), None)


def _find(runtime: str) -> type[Target]:
    if runtime in _BUILT_IN and runtime not in _REGISTRY:
        importlib.import_module(f"profilers.targets.{runtime}")
    if runtime not in _REGISTRY:
        raise MissingDependencyError(
            f"runtime {runtime!r} is not known; choose one of {', '.join(('auto', *runtimes()))}, "
            "or register your own with profilers.targets.register"
        )
    return _REGISTRY[runtime]


def _check_device(device: str) -> None:
    import torch

    kind, _, index = device.partition(":")
    if kind == "cpu" and not index:
        return
    if kind == "cuda" and (not index or index.isdigit()):
        if not torch.cuda.is_available():
            build = torch.version.cuda or "none: this is a CPU-only build"
            raise MissingDependencyError(
                f"device {device!r} asked for, but torch {torch.__version__} sees no CUDA device (CUDA in the build: "
                f"{build}); install a CUDA build of torch and the NVIDIA driver, or use --device cpu"
            )
        if index and int(index) >= torch.cuda.device_count():
            raise MissingDependencyError(
                f"device {device!r} asked for, but there are {torch.cuda.device_count()} CUDA devices; "
                f"use cuda:0 to cuda:{torch.cuda.device_count() - 1}"
            )
        return
    if kind == "mps" and not index:
        if not torch.backends.mps.is_available():
            raise MissingDependencyError(
                "device 'mps' asked for, but torch sees no Metal device; it needs Apple silicon with macOS 12.3 or "
                "later; use --device cpu elsewhere"
            )
        return
    own = ", ".join(f"{prefix}..." for prefix in _OWN)
    raise MissingDependencyError(f"device {device!r} is not known; use cpu, cuda, cuda:N or mps, or {own}")


def _best_runtime(device: str) -> str:
    """The runtime people ship with on this device, if it is installed: TensorRT, then ONNX Runtime, then torch."""
    from importlib.util import find_spec

    if device.startswith("cuda"):
        if find_spec("tensorrt"):
            return "tensorrt"
        if find_spec("onnxruntime"):
            onnxruntime = importlib.import_module("profilers.targets.onnxruntime")
            if "CUDAExecutionProvider" in onnxruntime.providers():
                return "onnxruntime"
    elif device == "cpu" and find_spec("onnxruntime") and find_spec("onnx") and find_spec("onnxscript"):
        return "onnxruntime"
    return "torch"
