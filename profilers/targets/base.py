"""Targets: they load a network and give the time of each run.

A new target is a class with one method. `load` gets an artefact (an ``nn.Module`` or the bytes of an ONNX file,
as the class attribute ``artefact`` says) and the inputs. It returns a `Loaded` around a function that does one
complete run::

    @register("mine")
    class Mine(Target):
        def load(self, artefact, inputs):
            return Loaded(lambda: artefact(*inputs))

Warm-up, interleaving, the store and the command line then work unchanged.

A target that computes a time instead of measuring it sets ``estimated`` and returns ``Loaded.exact(seconds)``. One run
is then the whole measurement, and ``low`` and ``high`` are the value itself.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from dsa_hw.errors import MissingDependencyError, ProfileError
from dsa_hw.utils.text import unknown_name
from profilers.networks.loaded import Loaded
from profilers.networks.quantisation import PRECISIONS, SCHEMES, Int8, Ranges

if TYPE_CHECKING:
    from profilers.measuring.bench import Bench
    from profilers.remote.interface import RemoteDevice

__all__ = ["Loaded", "Target", "from_title", "register", "resolve", "runtimes"]

_BUILT_IN = ("torch", "compile", "onnxruntime", "openvino", "tensorrt", "table", "ssh", "adb", "litert", "ethos_u")
# Devices with a target of their own: prefix of the device -> module of profilers.targets, which is also the name that
# it registers. Such a target checks its device itself, in `Target.check`.
_OWN = {"table:": "table", "ssh:": "ssh", "adb:": "adb", "ethos-u": "ethos_u"}
_ACCELERATORS = ("cuda", "xpu", "mps", "npu", "hpu", "mtia")  # device types of torch, ROCm being cuda
# Titles of targets that are this computer's: no host, no path, no option.
_MOST_THREADS = 1024  # more than any CPU has; runtimes fail in their own ways beyond
_CONDITIONS = rf" (?P<precision>{PRECISIONS})( x(?P<threads>[1-9]\d{{0,3}}))?"  # the end of a title
_TITLE = re.compile(
    rf"(?P<runtime>\w+)/(?P<device>cpu|({'|'.join(_ACCELERATORS)})(:\d{{1,3}})?){_CONDITIONS}", re.ASCII
)
_CONDITIONS_END = re.compile(f"{_CONDITIONS}$", re.ASCII)
_PRECISION = re.compile(PRECISIONS, re.ASCII)
_ETHOS_U = re.compile(r"(?P<name>ethos-u\d+-\d+) int8 \w+ \w+", re.ASCII)
_REGISTRY: dict[str, type[Target]] = {}
_T = TypeVar("_T", bound="type[Target]")


class Target(ABC):
    """A runtime on a device.

    Subclasses set ``artefact`` and implement `load`; everything else has a default.

    Attributes:
        runtime: The name under which the class is registered.
        artefact: What `load` takes: an ``nn.Module``, or the bytes of an ONNX file.
        slow_to_load: Whether loading compiles for seconds; networks are then loaded once, and the grid sweep is short.
        warms_up: Whether a loaded network is run before it is timed; not where every run is a process of its own.
        cache: Bytes that the caches of the device may hold, roughly.
        bench_class: The class that measures networks on this target; None stands for `profilers.measuring.bench.Bench`.
        estimated: Where times are computed, by whom, e.g. "estimated by Vela 5.2.0"; None where they are measured.
        remote_device: The device, where it has its own clock and whole visits are made there; None for this computer.
        device: "cpu", an accelerator of torch such as "cuda", "cuda:1", "xpu" or "mps", or what the target defines.
        precision: "fp32", "fp16" or a form of "int8" (`Int8`); artefact and inputs are already converted to it.
        int8: The precision, where it is int8; None otherwise.
        schemes: Names of the int8 schemes that the target can run, the usual one first; empty without int8.
        threads: CPU threads of one run.
    """

    runtime: ClassVar[str] = ""
    artefact: ClassVar[Literal["module", "onnx"]] = "module"
    slow_to_load: ClassVar[bool] = False
    warms_up: ClassVar[bool] = True
    cache: ClassVar[int] = 2**25
    bench_class: ClassVar[type[Bench] | None] = None
    schemes: ClassVar[tuple[str, ...]] = ()
    estimated: str | None = None
    remote_device: RemoteDevice | None = None

    def __init__(self, device: str = "cpu", *, precision: str = "fp32", threads: int = 1) -> None:
        self.device = device
        self.int8 = Int8.parse(precision)
        if self.int8 is not None and self.int8.scheme is None and len(self.schemes) == 1:
            self.int8 = self.int8.chosen(SCHEMES[self.schemes[0]])
        self.precision = precision if self.int8 is None else str(self.int8)
        self.threads = threads

    def at(self, precision: str) -> Self:
        """Return the same target with another precision."""
        other = copy.copy(self)
        other.int8, other.precision = Int8.parse(precision), precision
        return other

    @abstractmethod
    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        """Make ``artefact`` ready to run on ``inputs`` (torch tensors on the CPU)."""

    def check(self) -> None:  # noqa: B027  (nothing to check is a valid default)
        """Raise `MissingDependencyError` if the runtime or the device is not available."""

    def check_int8(self) -> None:
        """Raise `ProfileError` if the target cannot run its int8 scheme."""
        if self.int8 is None:
            return
        if not self.schemes:
            raise ProfileError(
                f"Runtime {self.runtime!r} has no precision int8. Use onnxruntime, openvino, litert or tensorrt, or "
                "fp32."
            )
        if self.int8.scheme is not None and self.int8.scheme.name not in self.schemes:
            known = ", ".join(f"int8-{name}" for name in self.schemes)
            raise ProfileError(f"Runtime {self.runtime!r} runs int8 as {known}; got {self.precision!r}.")

    def template(self, model: Any, groups: Any, inputs: tuple[Any, ...]) -> Any:
        """Return an object whose ``make(kept)`` builds artefacts, or None.

        It is faster than shrinking the network.
        """
        return None

    def quantise(
        self, model: Any, inputs: tuple[Any, ...], batches: Iterable[Sequence[Any]], ranges: Ranges | None
    ) -> tuple[bytes, Ranges] | None:
        """Return a module in int8 as a file that `load` takes, and the ranges of its activations.

        None stands for an ONNX file with Q/DQ pairs, which `profilers.networks.quantised` makes.

        Args:
            model: The network in fp32, on the CPU.
            inputs: Its example inputs.
            batches: Calibration inputs, in batches of the size of ``inputs``.
            ranges: Those of an earlier call, in place of ``batches``.
        """
        return None

    def known_grid(self) -> int | None:
        """Return the multiple of channels at which this target is efficient.

        None: find it with a sweep.
        """
        return None

    def describe(self) -> dict[str, str]:
        """Return the versions and options that affect times.

        They are part of the environment of every measurement.
        """
        return {}

    def describe_int8(self) -> dict[str, str]:
        """Return how networks are quantised, as a part of `describe`; nothing for other precisions."""
        if self.int8 is None:
            return {}
        import onnxruntime

        how = str(self.int8.scheme) if self.int8.scheme else "not chosen"
        return {"int8": how, "onnxruntime.quantization": onnxruntime.__version__}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Apply process-wide settings (thread counts) while measuring, and restore them."""
        yield

    @property
    def name(self) -> str:
        """``runtime/device``, as `resolve` takes it.

        Only the device where it has a target of its own.
        """
        return self.device if _owner(self.device) else f"{self.runtime}/{self.device}"

    @property
    def title(self) -> str:
        """Runtime, device, precision and threads.

        Measurements of different titles are never mixed.
        """
        threads = f" x{self.threads}" if self.device == "cpu" else ""
        return f"{self.name} {self.precision}{threads}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.title}>"


def register(name: str) -> Callable[[_T], _T]:
    """Return a class decorator that makes a target available under ``name``."""

    def decorate(cls: _T) -> _T:
        if name in _REGISTRY and _REGISTRY[name].__qualname__ != cls.__qualname__:
            raise ProfileError(f"Target {name!r} is already registered by {_REGISTRY[name]!r}. Choose another name.")
        cls.runtime = name
        _REGISTRY[name] = cls
        return cls

    return decorate


def runtimes() -> tuple[str, ...]:
    """Return the names of all targets."""
    return tuple(dict.fromkeys((*_BUILT_IN, *_REGISTRY)))


def resolve(target: str | Target, *, precision: str = "fp32", threads: int = 1) -> Target:
    """Return a target whose runtime and device were checked.

    Args:
        target: ``"runtime/device"``, ``"runtime"`` or ``"auto/device"``. A device with a target of its own
            (``"table:pi3.csv"``) may stand alone. Precision and threads may follow, as in the title of a target:
            ``"onnxruntime/cpu int8"``, ``"onnxruntime/cpu fp32 x4"``. A `Target` is only checked.
        precision: "fp32", "fp16" or "int8", where the name has none.
        threads: CPU threads of one run, at least 1, where the name has none.

    Returns:
        The target.

    Raises:
        MissingDependencyError: The runtime or the device is not available.
        ProfileError: The precision, the number of threads or the combination is invalid.
    """
    if isinstance(target, Target):
        target.check()
        return target
    if not isinstance(target, str):
        raise ProfileError(f"`target` must be a Target or its name, for example 'onnxruntime/cpu'; got {target!r}.")
    if conditions := _CONDITIONS_END.search(target):
        target, precision = target[: conditions.start()], conditions["precision"]
        threads = int(conditions["threads"] or threads)
    runtime, _, device = ("auto", "/", target) if _owner(target) else target.partition("/")
    device = device or "cpu"
    owner = _owner(device)
    if owner is None and " " in device:
        raise ProfileError(
            f"Cannot read the target {target!r}. A precision (fp32, fp16, int8) and threads may follow the device, for "
            "example 'onnxruntime/cpu int8 x4'."
        )
    if not _PRECISION.fullmatch(precision):
        raise ProfileError(f"`precision` must be fp32, fp16 or int8; got {precision!r}.")
    if not 1 <= threads <= _MOST_THREADS:
        raise ProfileError(f"`threads` must be a number from 1 to {_MOST_THREADS}; got {threads}.")
    if owner is not None:
        if runtime not in ("auto", owner):
            raise ProfileError(f"Device {device} has a runtime of its own. Omit --runtime; got {runtime!r}.")
        runtime = owner
    else:
        _check_device(device)
        if runtime == "auto":
            runtime = _best_runtime(device)
    cls = _find(runtime)
    found = cls(device, precision=precision, threads=threads)
    found.check()
    found.check_int8()
    return found


def from_title(title: str) -> Target:
    """Return a checked target of this computer from a title in a file.

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
    """Return the target that a device has of its own, by its prefix."""
    return next((name for prefix, name in _OWN.items() if device.startswith(prefix)), None)


def _find(runtime: str) -> type[Target]:
    if runtime in _BUILT_IN and runtime not in _REGISTRY:
        importlib.import_module(f"profilers.targets.{runtime}")
    if runtime not in _REGISTRY:
        raise MissingDependencyError(
            f"{unknown_name('runtime', runtime, ('auto', *runtimes()))} Register your own with "
            "profilers.targets.register."
        )
    return _REGISTRY[runtime]


def _check_device(device: str) -> None:
    kind, _, index = device.partition(":")
    if kind == "cpu" and not index:
        return
    if kind in _ACCELERATORS and (not index or index.isdigit()):
        importlib.import_module("profilers.targets.accelerator").check_accelerator(device)
        return
    own = ", ".join(f"{prefix}..." for prefix in _OWN)
    known = ", ".join(("cpu", *_ACCELERATORS, "cuda:N"))
    raise MissingDependencyError(f"Unknown device {device!r}. Available devices: {known}, {own}.")


def _best_runtime(device: str) -> str:
    """Return the runtime commonly deployed on a device, if installed: TensorRT, then ONNX Runtime, then torch."""
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
