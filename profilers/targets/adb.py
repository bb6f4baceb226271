"""A phone over adb, timed on the phone by LiteRT's ``benchmark_model``.

The address is ``adb:SERIAL?runtime=litert&binary=PATH``. Written after the documentation and tested with a fake adb
executable, never on a phone; the environment of every measurement says so. ``benchmark_model`` reports means, so that
one call of it gives one time, and every step of a round is a call of its own. A call is a new process, which runs the
network a few times before it is timed.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from dsa_hw.errors import MeasurementError, MissingDependencyError, ProfileError
from dsa_hw.utils.arrays import Floats
from dsa_hw.utils.text import one_line
from profilers.litert.client import versions
from profilers.litert.convert import to_bytes
from profilers.targets.base import Loaded, Target, register

__all__ = ["Adb"]

_FORM = "adb:SERIAL?runtime=litert&binary=/data/local/tmp/benchmark_model"
_FOLDER = "/data/local/tmp/dsa_hw"
_TESTED = "written after the documentation and tested with a fake adb executable, not on a phone"
_AVERAGE = re.compile(r"Inference \(avg\): ([0-9.]+(?:e[+-]?[0-9]+)?)")
_WARM = 3  # runs of a new process that are not timed
_STEPS = 16  # calls of one shell: Android limits the length of a command
_MARK = "dsa-hw-done"
_PROPERTIES = {
    "board": "getprop ro.product.model",
    "cpu": "getprop ro.soc.model",
    "cores": "nproc",
    "governor": "cat /sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "kernel": "uname -r",
    "system": "getprop ro.build.fingerprint",
}


@register("adb")
class Adb(Target):
    """LiteRT with XNNPACK on an Android device.

    Args:
        device: The address of the phone, see above.
        precision: Only "fp32".
        threads: CPU threads of one run.
        convert: Takes (module, inputs) and returns the bytes of a .tflite file; `profilers.litert.convert.to_bytes` by
            default.
    """

    slow_to_load = True
    cache = 2**22

    def __init__(
        self,
        device: str,
        *,
        precision: str = "fp32",
        threads: int = 1,
        convert: Callable[[Any, tuple[Any, ...]], bytes] | None = None,
    ) -> None:
        super().__init__("cpu", precision=precision, threads=threads)
        self.serial, self.binary = _parse(device)
        self.convert = convert
        self.remote_device = self
        self._files: weakref.WeakKeyDictionary[Loaded, str] = weakref.WeakKeyDictionary()
        self._about: dict[str, str] | None = None
        if precision != "fp32":
            raise ProfileError(f"Device {device} supports --precision fp32 only; got {precision!r}.")

    def check(self) -> None:
        """Check adb, the connection to the phone, the binary on it, and the converter."""
        if shutil.which("adb") is None:
            raise MissingDependencyError("A phone needs adb. Install Android's platform-tools and put adb on the PATH.")
        state = self._adb("get-state", check=False)
        if state.stdout.strip() != "device":
            raise MissingDependencyError(
                f"Phone {self.serial} is not ready ({one_line(state.stderr or state.stdout, 200)}). Connect it, enable "
                "USB debugging, allow this computer on its screen, and check: adb devices"
            )
        if self._shell(f"test -x {shlex.quote(self.binary)}", check=False).returncode:
            raise MissingDependencyError(
                f"{self.binary} is missing on {self.serial}, or not executable. Push LiteRT's benchmark_model: "
                f"adb -s {self.serial} push benchmark_model {self.binary} and adb shell chmod +x {self.binary}"
            )
        if self.convert is None:
            versions()  # raises an error if the environment of the converter does not exist

    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        """Push a network under its hash, unless the phone has it.

        The network is a module or the bytes of a .tflite file.
        """
        if not isinstance(artefact, bytes):
            artefact = to_bytes(artefact, inputs) if self.convert is None else self.convert(artefact, inputs)
        name = hashlib.sha256(artefact).hexdigest()
        file = f"{_FOLDER}/{name}.tflite"
        if self._hash(file) != name:
            self._shell(f"mkdir -p {_FOLDER}")
            with tempfile.TemporaryDirectory() as folder:
                local = Path(folder) / f"{name}.tflite"
                local.write_bytes(artefact)
                self._adb("push", str(local), file)
            if self._hash(file) != name:
                raise MeasurementError(f"{file} is incomplete on {self.serial}. Check the free space of /data there.")

        def clock(n: int) -> Floats:
            return np.concatenate(self._benchmark([(file, 1)] * n))

        loaded = Loaded(lambda: clock(1), clock=clock)
        self._files[loaded] = file
        return loaded

    def sequence(self, steps: Sequence[tuple[Loaded, int]]) -> list[Floats]:
        """Return the mean of the runs of each step, shape (1,)."""
        return self._benchmark([(self._files[loaded], runs) for loaded, runs in steps])

    def busiest_process(self) -> str | None:
        """Return None: processes of a phone are not read."""
        return None

    def state(self) -> dict[str, float]:
        """Return the time only."""
        return {"time": time.time()}

    def describe(self) -> dict[str, str]:
        """Return the phone, the binary, and how this target was tested."""
        if self._about is None:
            told = {k: one_line(self._shell(v, check=False).stdout, 200) for k, v in _PROPERTIES.items()}
            self._about = {k: v or "not visible" for k, v in told.items()}
            self._about["benchmark_model"] = f"sha256 {(self._hash(self.binary) or 'not visible')[:16]}"
        hidden = dict.fromkeys(("boost", "smt", "python", "numpy"), "not visible")
        return {**hidden, **self._about, "options": " ".join(self._options(1)[1:]), "adb": _TESTED}

    @property
    def name(self) -> str:
        """The address, as `resolve` takes it."""
        return f"adb:{self.serial}?runtime=litert&binary={self.binary}"

    @property
    def title(self) -> str:
        """Runtime, phone, precision and threads."""
        return f"litert/adb:{self.serial} {self.precision} x{self.threads}"

    def _options(self, runs: int) -> list[str]:
        return [
            self.binary,
            f"--num_threads={self.threads}",
            "--use_xnnpack=true",
            "--min_secs=0",
            "--warmup_min_secs=0",
            f"--warmup_runs={_WARM}",
            f"--num_runs={runs}",
        ]

    def _benchmark(self, calls: Sequence[tuple[str, int]]) -> list[Floats]:
        """Run (file, runs) in order on the phone; return the mean seconds of each, shape (1,)."""
        parts = [self._one_shell(calls[i : i + _STEPS]) for i in range(0, len(calls), _STEPS)]
        return [seconds for part in parts for seconds in part]

    def _one_shell(self, calls: Sequence[tuple[str, int]]) -> list[Floats]:
        commands = [shlex.join([*self._options(runs), f"--graph={file}"]) for file, runs in calls]
        script = "; ".join(f"{command} 2>&1; echo {_MARK}" for command in commands)
        parts = self._shell(script, limit=60 + 10 * len(calls)).stdout.split(_MARK)[:-1]
        found = [re.findall(_AVERAGE, part) for part in parts]
        if len(found) != len(calls) or not all(len(f) == 1 and float(f[0]) > 0 for f in found):
            bad = next((p for p, f in zip(parts, found, strict=True) if len(f) != 1), "")
            raise MeasurementError(
                f"benchmark_model on {self.serial} gave no time (output: {one_line(bad[-200:]) or 'none'}). Try the "
                f"command on the phone: {commands[0]}"
            )
        return [np.asarray([float(f[0]) * 1e-6]) for f in found]

    def _hash(self, file: str) -> str | None:
        found = re.match(r"([0-9a-f]{64})\b", self._shell(f"sha256sum {shlex.quote(file)}", check=False).stdout)
        return found[1] if found else None

    def _shell(self, script: str, *, check: bool = True, limit: float = 60.0) -> subprocess.CompletedProcess[str]:
        return self._adb("shell", script, check=check, limit=limit)

    def _adb(self, *words: str, check: bool = True, limit: float = 60.0) -> subprocess.CompletedProcess[str]:
        command = ["adb", "-s", self.serial, *words]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=limit, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired as error:
            raise MeasurementError(
                f"Phone {self.serial} did not answer for {limit:.0f} s. Check: adb devices"
            ) from error
        if check and done.returncode:
            raise MeasurementError(
                f"adb {words[0]} failed on {self.serial} ({one_line(done.stderr or done.stdout, 200)}). Check adb "
                "devices, and the free space of /data."
            )
        return done


def _parse(text: str) -> tuple[str, str]:
    """Return the serial and the path of the binary in an address."""
    address, _, query = text.partition("?")
    serial = address.removeprefix("adb:")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]*", serial):
        raise ProfileError(f"The address of a phone must be {_FORM}, with a serial of `adb devices`; got {text!r}.")
    try:
        given = dict(parse_qsl(query, strict_parsing=bool(query)))
    except ValueError as error:
        raise ProfileError(f"The address of a phone must be {_FORM}; got {text!r}.") from error
    if unknown := set(given) - {"runtime", "binary"}:
        raise ProfileError(f"The options of a phone are runtime and binary; got {', '.join(sorted(unknown))}.")
    if given.get("runtime", "litert") != "litert":
        raise ProfileError(f"A phone supports runtime=litert only; got {given['runtime']!r}.")
    return serial, given.get("binary", "/data/local/tmp/benchmark_model")
