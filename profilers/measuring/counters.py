"""Energy counters: functions that return joules, and how to find the counter of this machine.

Counters of chips are read through Zeus (NVML, AMD SMI, RAPL, Jetson, Apple silicon; ``pip install 'dsa-hw[energy]'``).
Any other meter is a user's function that returns joules since some moment: ``--counter package.module:function``.

Zeus returns empty fields on a machine without a counter, and some drivers always return the same number. Both are
errors here. RAPL zones are found by Zeus but read here: Zeus counts their wraps in a separate process that reads them
once a second, so that a reading just after a wrap is too low by a whole range until the next second.
"""

from __future__ import annotations

import importlib
import math
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsa_hw.errors import MeasurementError, MissingDependencyError
from dsa_hw.utils.text import one_line

__all__ = ["Counter", "Total", "find"]

_POWERCAP = (Path("/sys/class/powercap/intel-rapl"), Path("/zeus_sys/class/powercap/intel-rapl"))
_OTHERWISE = (
    "Alternatively, use your own meter with --counter package.module:function (a function that returns joules), or "
    "estimate energy with EstimatedEnergyBudget('60%')."
)
_REMEDY = (
    "Check its driver and permissions (RAPL: sudo chmod -R a+r /sys/class/powercap, or run zeusd and set "
    "ZEUSD_SOCK_PATH; NVIDIA: nvidia-smi must work)."
)


def _nothing() -> dict[str, float]:
    return {}


@dataclass(frozen=True, eq=False)
class Counter:
    """An energy meter.

    Attributes:
        name: Name for reports; part of the environment.
        read_joules: Returns the energy since some fixed moment.
        wraps_at: Joules at which the counter restarts from 0; None where it does not.
        state: Returns what else the meter knows: "temperature" (degrees Celsius), "power_cap" (W).
        clock: Returns the time in seconds; a simulated meter has its own time.
        sleep: Waits for a number of seconds of that time.
    """

    name: str
    read_joules: Callable[[], float]
    wraps_at: float | None = None
    state: Callable[[], Mapping[str, float]] = _nothing
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @staticmethod
    def of(given: Any) -> Counter:
        """Make a counter of a function, an object with ``read_joules`` or "package.module:function".

        An object may also have ``name``, ``wraps_at`` and ``state``. A `Counter` is returned unchanged.

        Raises:
            MissingDependencyError: ``given`` cannot be imported or is not callable.
        """
        if isinstance(given, Counter):
            return given
        name = given if isinstance(given, str) else None
        if isinstance(given, str):
            given = _imported(given)
        read = getattr(given, "read_joules", given)
        if not callable(read):
            raise MissingDependencyError(
                "`counter` must be a function that returns joules, or an object with read_joules(); "
                f"got {name or repr(given)} of type {type(given).__name__}."
            )
        where = f"{getattr(read, '__module__', '?')}:{getattr(read, '__qualname__', type(read).__name__)}"
        return Counter(
            str(getattr(given, "name", None) or name or where),
            read,
            getattr(given, "wraps_at", None),
            getattr(given, "state", _nothing),
        )


class Total:
    """Joules that a counter has counted since this object was made, across wraps; call `read` often."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last = self._value()
        self.joules = 0.0

    def read(self) -> bool:
        """Read the counter and return whether it has moved."""
        now, before = self._value(), self._last
        self._last = now
        if now == before:
            return False
        step = now - before
        if step < 0:
            limit = self._counter.wraps_at
            if limit is None:
                raise MeasurementError(
                    f"Counter {self._counter.name} went back from {before:.6g} J to {now:.6g} J. If it wraps around, "
                    "set wraps_at to the number of joules; if its driver was restarted, measure again."
                )
            step += limit
            if step < 0:
                raise MeasurementError(
                    f"Counter {self._counter.name} fell from {before:.6g} J to {now:.6g} J, by more than the "
                    f"{limit:.6g} J at which it should wrap around. Correct wraps_at."
                )
        self.joules += step
        return True

    def _value(self) -> float:
        try:
            value = self._counter.read_joules()
        except MeasurementError:
            raise
        except Exception as error:  # a meter may raise whatever its library raises
            reason = f"{type(error).__name__}: {one_line(error, 200)}"
            raise MeasurementError(f"Cannot read counter {self._counter.name} ({reason}). {_REMEDY}") from error
        if value is None or isinstance(value, bool) or not math.isfinite(float(value)):
            raise MeasurementError(f"Counter {self._counter.name} returned {value!r} instead of joules. {_REMEDY}")
        return float(value)


def find(device: str) -> Counter:
    """Return the counter of a device of this machine, through Zeus.

    Args:
        device: "cpu", "cuda", "cuda:1" or "mps".

    Raises:
        MissingDependencyError: The device has no counter, or it cannot be read.
    """
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda", "mps"):
        raise MissingDependencyError(f"Energy counters exist for cpu, cuda and mps; got {device!r}. {_OTHERWISE}")
    if (soc := _soc()) is not None:
        return soc
    if kind == "cuda":
        return _gpu(int(index or 0))
    if kind == "mps":
        raise MissingDependencyError(
            "The energy counter of device 'mps' needs Apple silicon and Zeus. Install it with pip install "
            f"'zeus[apple]'. {_OTHERWISE}"
        )
    return _rapl()


def _zeus(part: str) -> Any:
    try:
        return importlib.import_module(f"zeus.device.{part}")
    except ImportError as error:
        raise MissingDependencyError(
            f"Reading energy counters needs Zeus, which is not installed ({one_line(error)}). Install it with pip "
            f"install 'dsa-hw[energy]'. {_OTHERWISE}"
        ) from error


def _gpu(index: int) -> Counter:
    module = _zeus("gpu")
    try:
        gpus = module.get_gpus().gpus
        if index >= len(gpus):
            raise MissingDependencyError(f"The driver shows {len(gpus)} GPUs; there is no GPU {index}.")
        gpu = gpus[index]
        if not gpu.supports_get_total_energy_consumption():
            raise MissingDependencyError(
                f"{gpu.get_name()} has no reliable energy counter (NVIDIA: Volta and newer have one). {_OTHERWISE}"
            )
        name = str(gpu.get_name())
    except MissingDependencyError:
        raise
    except Exception as error:  # Zeus has a class for each way of failing
        raise MissingDependencyError(
            f"Cannot read a GPU energy counter: {one_line(error)}. Install the NVIDIA driver (nvidia-smi must work) or "
            f"ROCm 6.2, and leave CUDA_VISIBLE_DEVICES unset or a list of numbers. {_OTHERWISE}"
        ) from error
    _same_gpu(index, name)
    return Counter(
        f"GPU {index}, {name}",
        lambda: gpu.get_total_energy_consumption() / 1e3,
        state=lambda: _known(
            temperature=lambda: float(gpu.get_gpu_temperature()),
            power_cap=lambda: gpu.get_power_management_limit() / 1e3,
        ),
    )


def _same_gpu(index: int, name: str) -> None:
    """Refuse to read another GPU than the one in use: CUDA numbers GPUs by speed, the driver by slot."""
    import torch

    if not torch.cuda.is_available():
        return
    ours = torch.cuda.get_device_name(index)
    if ours != name:
        raise MissingDependencyError(
            f"CUDA and the driver number the GPUs differently: GPU {index} is {ours!r} for CUDA and {name!r} for the "
            "driver. Set CUDA_DEVICE_ORDER=PCI_BUS_ID and run again."
        )


def _rapl() -> Counter:
    if sys.platform == "linux" and not any(path.exists() for path in _POWERCAP):
        raise MissingDependencyError(
            f"This machine has no CPU energy counter: {_POWERCAP[0]} does not exist. Virtual machines rarely expose "
            f"it; on a physical machine load its driver (sudo modprobe intel_rapl_msr). {_OTHERWISE}"
        )
    module = _zeus("cpu")
    try:
        cpus = list(module.get_cpus().cpus)
    except Exception as error:
        raise MissingDependencyError(
            f"Cannot read the CPU energy counter: {one_line(error)}. Make it readable (sudo chmod -R a+r "
            f"/sys/class/powercap, after every boot), or run zeusd and set ZEUSD_SOCK_PATH. {_OTHERWISE}"
        ) from error
    zones = [zone for cpu in cpus for zone in _zones(cpu)]
    if not zones:
        raise MissingDependencyError(f"Zeus found no RAPL zone on this machine. {_OTHERWISE}")
    parts = [Total(zone) for zone in zones]

    def read() -> float:
        for part in parts:
            part.read()
        return sum(part.joules for part in parts)

    return Counter(f"RAPL, {' + '.join(zone.name for zone in zones)}", read)


def _zones(cpu: Any) -> list[Counter]:
    """Return the counters of a processor: its package, and its memory where that is counted too."""
    if not hasattr(cpu, "rapl_file"):  # through zeusd, which adds up wraps itself

        def from_daemon() -> float:
            found = cpu.get_total_energy_consumption()
            return float(found.cpu_mj + (found.dram_mj or 0.0)) / 1e3

        return [Counter(f"package {cpu.cpu_index} by zeusd", from_daemon)]
    files = [file for file in (cpu.rapl_file, cpu.dram) if file is not None]
    return [_zone(f"{file.name}", Path(file.energy_uj_path), float(file.max_energy_range_uj) / 1e6) for file in files]


def _zone(name: str, path: Path, wraps_at: float) -> Counter:
    return Counter(name, lambda: float(path.read_text()) / 1e6, wraps_at)


def _soc() -> Counter | None:
    """Return the counter of a whole Jetson board or Apple chip; None on other machines."""
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    jetson = Path("/etc/nv_tegra_release").exists() or Path("/usr/lib/aarch64-linux-gnu/tegra").exists()
    if not apple and not jetson:
        return None
    module = _zeus("soc")
    kind, wanted = (
        ("Apple silicon", (("cpu_total_mj", "gpu_mj", "gpu_sram_mj", "ane_mj", "dram_mj"),))
        if apple
        else ("Jetson", (("total_energy_mj",), ("cpu_energy_mj", "gpu_energy_mj")))
    )
    try:
        soc = module.get_soc()
        known = set(soc.get_available_metrics())
    except Exception as error:
        raise MissingDependencyError(
            f"Cannot read the energy counter of {kind}: {one_line(error)}. "
            f"{'Run pip install zeus[apple].' if apple else 'The INA3221 sensors must be readable.'} {_OTHERWISE}"
        ) from error
    fields: Sequence[str] = next((f for f in (tuple(n for n in names if n in known) for names in wanted) if f), ())
    if not fields:
        raise MissingDependencyError(f"{kind} shows none of its energy counters. {_OTHERWISE}")

    def read() -> float:
        found = soc.get_total_energy_consumption()
        return float(sum(getattr(found, field) for field in fields)) / 1e3

    return Counter(f"{kind}, {' + '.join(f.removesuffix('_mj') for f in fields)}", read)


def _known(**readers: Callable[[], float]) -> dict[str, float]:
    """Return what can be read; a board without a sensor is not an error."""
    found = {}
    for name, read in readers.items():
        try:
            found[name] = float(read())
        except Exception:  # whatever a driver raises
            continue
    return found


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: the user's own package in the current folder
    try:
        if not module or not attribute:
            raise ImportError("no colon")
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(
            f"`counter` must be an importable package.module:function; got {name!r} ({one_line(error)})."
        ) from error
