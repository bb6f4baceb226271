"""A phone over adb, timed on the phone by LiteRT's ``benchmark_model``.

The address is ``adb:SERIAL?runtime=litert&binary=PATH``. Written after the documentation and tested with a fake adb
executable, never on a phone; the environment of every measurement says so. ``benchmark_model`` reports means, so that
one call of it gives one time, and every step of a round is a call of its own. A call is a new process, which runs the
network a few times before it is timed. Every command has a time limit, and its output a limited size.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote

import numpy as np

from dsa_hw.errors import MeasurementError, MissingDependencyError, ProfileError
from dsa_hw.utils.arrays import Floats
from dsa_hw.utils.processes import FloodError, Output, StalledError, run_bounded
from dsa_hw.utils.text import one_line
from profilers.litert.client import versions
from profilers.litert.convert import to_bytes
from profilers.networks.seconds import checked_seconds
from profilers.targets.base import Loaded, Target, register

__all__ = ["Adb"]

_FORM = "adb:SERIAL?runtime=litert&binary=/data/local/tmp/benchmark_model"
_FOLDER = "/data/local/tmp/dsa_hw"
_TESTED = "written after the documentation and tested with a fake adb executable, not on a phone"
_AVERAGE = re.compile(r"Inference \(avg\): ([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)(?=\s|$)")
_FILE = re.compile(r"([0-9]{1,12}) ([0-9]{1,15}) ([0-9a-f]{64}\.tflite)")
_ROOM = 2048  # megabytes of files on the phone
_UNUSED = 30 * 86400  # seconds after which a file that was not used is deleted
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
        self.serial, self.binary, self.room = _parse(device)
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
        if state.status or state.stdout.strip() != "device":
            raise MissingDependencyError(
                f"Phone {self.serial} is not ready ({one_line(state.stderr or state.stdout, 200)}). Connect it, enable "
                "USB debugging, allow this computer on its screen, and check: adb devices"
            )
        if self._shell(f"test -x {shlex.quote(self.binary)}", check=False).status:
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
        if self._hash(file) == name:
            self._shell(f"touch {file}", check=False)  # the least recently used is deleted first
        else:
            self._shell(f"mkdir -p {_FOLDER}")
            self._make_room(len(artefact))
            with tempfile.TemporaryDirectory() as folder:
                local = Path(folder) / f"{name}.tflite"
                local.write_bytes(artefact)
                self._adb("push", str(local), file, limit=60 + len(artefact) / 1e5)
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
        room = "" if self.room == _ROOM else f"&room={self.room}"
        return f"adb:{self.serial}?runtime=litert&binary={quote(self.binary)}{room}"

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
        if len(found) != len(calls) or not all(len(f) == 1 for f in found):
            bad = next((p for p, f in zip(parts, found, strict=True) if len(f) != 1), "")
            raise MeasurementError(
                f"benchmark_model on {self.serial} gave no time (output: {one_line(bad[-200:]) or 'none'}). Try the "
                f"command on the phone: {commands[0]}"
            )
        return [checked_seconds([1e-6 * float(f[0])], 1, f"benchmark_model on {self.serial}") for f in found]

    def _make_room(self, needed: int) -> None:
        """Delete the least recently used files until ``needed`` bytes fit, and all that were not used for 30 days."""
        listed = self._shell(f'cd {_FOLDER} && stat -c "%Y %s %n" *.tflite', check=False).stdout
        found = sorted((int(m[1]), int(m[2]), m[3]) for m in map(_FILE.fullmatch, listed.splitlines()) if m)
        keep = {Path(file).name for file in self._files.values()}
        total, delete = sum(size for _, size, _ in found) + needed, list[str]()
        for used, size, name in found:
            if name not in keep and (total > self.room * 10**6 or used < time.time() - _UNUSED):
                delete.append(name)
                total -= size
        for i in range(0, len(delete), _STEPS):
            self._shell(f"cd {_FOLDER} && rm -f {' '.join(delete[i : i + _STEPS])}")
        if total > self.room * 10**6:
            raise MeasurementError(
                f"The networks in use on {self.serial} need {total / 1e6:.0f} MB; {self.room} MB are allowed. Allow "
                f"more with &room={math.ceil(total / 1e6)} in the address."
            )

    def _hash(self, file: str) -> str | None:
        found = re.match(r"([0-9a-f]{64})\b", self._shell(f"sha256sum {shlex.quote(file)}", check=False).stdout)
        return found[1] if found else None

    def _shell(self, script: str, *, check: bool = True, limit: float = 60.0) -> Output:
        return self._adb("shell", script, check=check, limit=limit)

    def _adb(self, *words: str, check: bool = True, limit: float = 60.0) -> Output:
        try:
            done = run_bounded(["adb", "-s", self.serial, *words], limit=limit)
        except StalledError as error:
            raise MeasurementError(
                f"Phone {self.serial} did not answer for {limit:.0f} s. Check: adb devices"
            ) from error
        except FloodError as error:
            raise MeasurementError(f"Phone {self.serial} sent an invalid answer: {error}.") from error
        except OSError as error:
            raise MissingDependencyError(f"Cannot run adb: {one_line(error)}.") from error
        if check and done.status:
            raise MeasurementError(
                f"adb {words[0]} failed on {self.serial} ({one_line(done.stderr or done.stdout, 200)}). Check adb "
                "devices, and the free space of /data."
            )
        return done


def _parse(text: str) -> tuple[str, str, int]:
    """Return the serial, the path of the binary and the room for files in an address."""
    address, _, query = text.partition("?")
    serial = address.removeprefix("adb:")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]*", serial):
        raise ProfileError(f"The address of a phone must be {_FORM}, with a serial of `adb devices`; got {text!r}.")
    try:
        given = dict(parse_qsl(query, strict_parsing=bool(query)))
    except ValueError as error:
        raise ProfileError(f"The address of a phone must be {_FORM}; got {text!r}.") from error
    if unknown := set(given) - {"runtime", "binary", "room"}:
        raise ProfileError(f"The options of a phone are runtime, binary and room; got {', '.join(sorted(unknown))}.")
    if given.get("runtime", "litert") != "litert":
        raise ProfileError(f"A phone supports runtime=litert only; got {given['runtime']!r}.")
    room = given.get("room", str(_ROOM))
    if not re.fullmatch(r"[1-9][0-9]{0,8}", room):
        raise ProfileError(f"`room` must be a whole number of megabytes; got {room!r}.")
    return serial, given.get("binary", "/data/local/tmp/benchmark_model"), int(room)
