"""The agent that measures on a board, in one file.

The file is sent to the board over ssh and run there. It needs Python 3.8 or later and imports nothing else of dsa_hw.
Networks are run by ONNX Runtime within the process (which needs numpy and onnxruntime), or by a program of the board,
one process for each step: NVIDIA's ``trtexec`` or LiteRT's ``benchmark_model``. Nothing is installed. The agent reads
requests from standard input and answers on standard output. It ends when its input ends, when no request comes for a
while, or when a request exceeds its time limit (an alarm of the kernel, which also ends a runtime that hangs).

A frame is two lengths (header, payload; big-endian, 4 bytes each), a JSON object, and raw bytes. Nothing is pickled.
Artefacts are kept in a folder of the user under their SHA-256, from which alone file names are made. An artefact is
accepted only after its hash and size were announced, and used only if its content has that hash.
"""

from __future__ import annotations

import array
import contextlib
import errno
import gc
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from typing import Any, BinaryIO, Callable, Dict  # noqa: UP035  (for Python 3.8)

__all__ = ["BANNER", "DTYPES", "LENGTHS", "Agent", "RefusalError", "frame", "read_frame", "write_frame"]

VERSION = 4
BANNER = b"dsa-hw-agent %d\n" % VERSION
DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")

LENGTHS = struct.Struct(">II")
_HEADER_LIMIT = 2**20
_PAYLOAD_LIMIT = 2**28
_HASH = re.compile(r"[0-9a-f]{64}")
_MOST_RUNS = 100_000
_UNUSED = 30 * 86400  # seconds after which an artefact that nobody used is deleted
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CPU = "/sys/devices/system/cpu/"

Json = Dict[str, Any]  # noqa: UP006  (a JSON object; dict[str, Any] is not an expression in Python 3.8)


class RefusalError(Exception):
    """A request that is answered with an error: a kind for the program, and a text for the user."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


# Frames ---------------------------------------------------------------------------------------------------------------


def frame(header: Json, payload: bytes = b"") -> bytes:
    """Return one frame; `ValueError` if it is too large."""
    text = json.dumps(header, allow_nan=False).encode()
    if len(text) > _HEADER_LIMIT or len(payload) > _PAYLOAD_LIMIT:
        raise ValueError(f"A frame of {len(text)} + {len(payload)} bytes exceeds the limit of the protocol.")
    return LENGTHS.pack(len(text), len(payload)) + text + payload


def write_frame(stream: BinaryIO, header: Json, payload: bytes = b"") -> None:
    """Write one frame and flush it."""
    stream.write(frame(header, payload))
    stream.flush()


def read_frame(stream: BinaryIO) -> tuple[Json, bytes] | None:
    """Read one frame; None where the stream ends, even within a frame; `ValueError` for an invalid frame."""
    lengths = _exactly(stream, LENGTHS.size)
    if lengths is None:
        return None
    size, extra = LENGTHS.unpack(lengths)
    if size > _HEADER_LIMIT or extra > _PAYLOAD_LIMIT:
        raise ValueError(f"A frame of {size} + {extra} bytes exceeds the limit of the protocol.")
    text, payload = _exactly(stream, size), _exactly(stream, extra)
    if text is None or payload is None:
        return None
    try:
        header = json.loads(text.decode())
    except RecursionError:
        raise ValueError("The header of a frame is nested too deeply.") from None
    if not isinstance(header, dict):
        raise ValueError("The header of a frame must be a JSON object.")
    return header, payload


def _exactly(stream: BinaryIO, size: int) -> bytes | None:
    parts = []
    while size:
        part = stream.read(min(size, 2**20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


# Artefacts ------------------------------------------------------------------------------------------------------------


class Artefacts:
    """Files by content hash in a folder that only this user can write.

    They take at most ``room`` bytes. The least recently used are deleted first, and those that nobody used for 30 days.
    """

    def __init__(self, folder: str, room: int) -> None:
        self.folder = folder
        self.room = room
        self.announced: dict[str, int] = {}
        with _disk("create the folder for artefacts"):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        about = os.stat(folder)
        if about.st_uid != os.geteuid() or about.st_mode & 0o022:
            raise RefusalError("folder", f"{folder} belongs to another user or can be written by others")
        for used, _, name in self._files():
            if used < time.time() - _UNUSED:
                os.unlink(os.path.join(folder, name))

    def announce(self, wanted: Json) -> dict[str, int]:
        """Accept ``{hash: size}`` from now on; return how many bytes of each are stored already."""
        for name, size in wanted.items():
            if not _HASH.fullmatch(name) or type(size) is not int or size < 1:
                raise RefusalError("protocol", "an artefact must be announced with its SHA-256 and its size")
        self.announced.update(wanted)
        have = {}
        for name, size in wanted.items():
            have[name] = self._size(name)
            if have[name] != size:
                have[name] = min(self._size(name, ".part"), size)
        missing = sum(wanted[name] - have[name] for name in wanted)
        if missing:
            self._make_room(missing, set(wanted))
        return have

    def put(self, name: str, offset: int, data: bytes) -> int:
        """Append ``data`` at ``offset`` to an announced artefact; return its size now. Verified when complete."""
        size = self._announced(name)
        part = self._path(name, ".part")
        if offset != self._size(name, ".part") or offset + len(data) > size:
            raise RefusalError(
                "protocol", f"bytes {offset} to {offset + len(data)} of {size} do not continue the stored part"
            )
        try:
            with _disk("write an artefact"):
                file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
                try:
                    view = memoryview(data)
                    while view:
                        view = view[os.write(file, view) :]
                finally:
                    os.close(file)
        except RefusalError:
            self._remove(name, ".part")  # leave no incomplete file
            raise
        if offset + len(data) == size:
            if hashlib.sha256(self._bytes(name, ".part")).hexdigest() != name:
                self._remove(name, ".part")
                raise RefusalError("hash", f"artefact {name[:12]} arrived with another hash and was deleted")
            os.replace(part, self._path(name))
        return offset + len(data)

    def get(self, name: str) -> bytes:
        """Return the verified content of an announced artefact."""
        self._announced(name)
        try:
            data = self._bytes(name)
        except FileNotFoundError:
            raise RefusalError("missing", f"artefact {name[:12]} is not stored") from None
        if hashlib.sha256(data).hexdigest() != name:
            self._remove(name)
            raise RefusalError("missing", f"artefact {name[:12]} was damaged on disk and was deleted")
        os.utime(self._path(name))  # the least recently used is deleted first
        return data

    def path(self, name: str) -> str:
        """Return the path of an announced artefact whose content was verified now."""
        self.get(name)
        return self._path(name)

    def _announced(self, name: Any) -> int:
        if not isinstance(name, str) or not _HASH.fullmatch(name) or name not in self.announced:
            raise RefusalError("unannounced", "this artefact was not announced")
        return self.announced[name]

    def _path(self, name: str, suffix: str = "") -> str:
        assert _HASH.fullmatch(name)
        return os.path.join(self.folder, name + suffix)

    def _size(self, name: str, suffix: str = "") -> int:
        try:
            return os.stat(self._path(name, suffix)).st_size
        except OSError:
            return 0

    def _bytes(self, name: str, suffix: str = "") -> bytes:
        with os.fdopen(os.open(self._path(name, suffix), os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            return file.read()

    def _remove(self, name: str, suffix: str = "") -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path(name, suffix))

    def _files(self) -> list[tuple[float, int, str]]:
        """Return when each file was used last, its size and its name; the least recently used first."""
        files = []
        for entry in os.scandir(self.folder):
            about = entry.stat(follow_symlinks=False)
            if _HASH.fullmatch(entry.name[:64]) and entry.name[64:] in ("", ".part", ".engine"):
                files.append((about.st_mtime, about.st_size, entry.name))
        return sorted(files)

    def _make_room(self, needed: int, keep: set[str]) -> None:
        files = self._files()
        total = sum(size for _, size, _ in files)
        for _, size, name in files:
            if total + needed <= self.room:
                break
            if name[:64] not in keep:
                os.unlink(os.path.join(self.folder, name))
                total -= size
        if total + needed > self.room:
            raise RefusalError("disk", f"{total + needed} bytes are needed in {self.folder}, {self.room} are allowed")
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        if free < needed:
            raise RefusalError("disk", f"{needed} bytes are needed in {self.folder}, {free} are free")


@contextlib.contextmanager
def _disk(action: str) -> Any:
    try:
        yield
    except OSError as error:
        kind = "disk" if error.errno in _FULL else "folder"
        raise RefusalError(kind, f"cannot {action}: {error.strerror}") from error


# Networks -------------------------------------------------------------------------------------------------------------


def _runtime() -> Any:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # official wheels from 1.29 on run a thread for it
    try:
        import onnxruntime
    except ImportError as error:
        raise RefusalError("runtime", f"{sys.executable} cannot import onnxruntime ({error})") from error
    return onnxruntime


class Network:
    """A session of ONNX Runtime with its inputs; ``once`` does one complete run."""

    def __init__(self, artefact: bytes, arrays: list[Any], threads: int, device: str) -> None:
        self.size = 3 * len(artefact)
        self._session = _session(artefact, threads, device)
        names = [x.name for x in self._session.get_inputs()]
        if len(names) != len(arrays):
            raise RefusalError("network", f"the ONNX graph takes the inputs {names}; got {len(arrays)} inputs")
        feed = {name: arrays[i] for i, name in enumerate(names)}
        self.once: Callable[[], object]
        self.outputs: Callable[[], list[Any]]
        if device == "cpu":
            run = self._session.run
            self.once = self.outputs = lambda: run(None, feed)
        else:
            self._bind(feed)
        try:
            self.once()  # refuse a network that cannot run
        except Exception as error:
            raise RefusalError("network", f"it does not run: {_one_line(error)}") from error

    def times(self, runs: int) -> list[float]:
        """Return the seconds of each run."""
        once, clock = self.once, time.perf_counter
        stamps = [clock()]
        for _ in range(runs):
            once()
            stamps.append(clock())
        return [stamps[i + 1] - stamps[i] for i in range(runs)]

    def _bind(self, feed: dict[str, Any]) -> None:
        """Keep inputs and outputs on the device; a run ends with its stream."""
        ort, session = _runtime(), self._session
        binding = session.io_binding()
        for name, value in feed.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(value, "cuda", 0))
        for output in session.get_outputs():
            binding.bind_output(output.name, "cuda", 0)

        def once() -> None:
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()

        def outputs() -> list[Any]:
            once()
            return list(binding.copy_outputs_to_cpu())

        self.once, self.outputs = once, outputs


def _session(artefact: bytes, threads: int, device: str) -> Any:
    """Create a session with the options of profilers/targets/onnxruntime.py."""
    ort = _runtime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.log_severity_level = 3
    provider = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[device]
    try:
        session = ort.InferenceSession(artefact, options, providers=[provider])
    except Exception as error:  # ONNX Runtime has a dozen unrelated exception classes
        raise RefusalError("network", _one_line(error)) from error
    if session.get_providers()[0] != provider:
        raise RefusalError("runtime", f"ONNX Runtime fell back from {provider} to {session.get_providers()[0]}")
    return session


# Programs of the board ------------------------------------------------------------------------------------------------

_PROGRAMS = {
    "tensorrt": ("trtexec", "/usr/src/tensorrt/bin/trtexec"),  # JetPack and the packages of NVIDIA install it there
    "litert": ("benchmark_model", "~/benchmark_model"),
}
_REPORT = 2**26  # most bytes of a file that a program writes
_WARM_MS = 200  # milliseconds of runs before those that count: a new process begins with low clocks
_WARM_RUNS = 3


class Trtexec:
    """NVIDIA's ``trtexec``: builds engines and times them, in a process of its own for each step.

    The precision is that of the ONNX file. Its flag depends on the version, and is found in the program's own help:
    ``--stronglyTyped`` where there is one (TensorRT 10), else ``--fp16`` or ``--int8`` (8.5 to 9), else nothing (11,
    where every network is strongly typed).
    """

    def __init__(self, binary: str, folder: str) -> None:
        self.binary, self.folder = binary, folder
        text = _run([binary, "--help"], 60.0)
        found = re.search(r"\[TensorRT v(\d{4,6})\]", text)
        if not found or "--exportTimes" not in text:
            raise RefusalError("runtime", f"{binary} --help does not look like that of trtexec")
        self.version = _tensorrt_version(int(found.group(1)))
        self._flags = {flag for flag in ("--stronglyTyped", "--fp16", "--int8") if flag in text}

    def flags(self, precision: str) -> list[str]:
        """Return the flags that build an engine of a precision."""
        if "--stronglyTyped" in self._flags:
            return ["--stronglyTyped"]
        wanted = {"fp16": ["--fp16"], "int8": ["--int8"]}.get(precision, [])
        if wanted and self._flags and not self._flags.issuperset(wanted):
            raise RefusalError("runtime", f"this trtexec has no {wanted[0]}")
        return wanted if self._flags else []

    def load(self, name: str, path: str, precision: str) -> Engine:
        """Build the engine of an ONNX file, unless it is stored."""
        flags = self.flags(precision)
        key = hashlib.sha256(" ".join([name, self.version, *flags]).encode()).hexdigest()
        engine = os.path.join(self.folder, key + ".engine")
        if not os.path.exists(engine):
            made = os.path.join(self.folder, key + ".part")
            cache = os.path.join(self.folder, f"timing-{self.version}.cache")
            # One run: the flag that skips it has another name in each version.
            once = ["--iterations=1", "--duration=0", "--warmUp=0"]
            _run([self.binary, f"--onnx={path}", f"--saveEngine={made}", f"--timingCacheFile={cache}", *flags, *once])
            os.replace(made, engine)
        os.utime(engine)  # the least recently used is deleted first
        return Engine(self.binary, engine)


class Engine:
    """A TensorRT engine in a file."""

    size = 0

    def __init__(self, binary: str, path: str) -> None:
        self._binary, self._path = binary, path

    def times(self, runs: int) -> list[float]:
        """Return the seconds that the GPU computes in each run, in one process, without data transfers."""
        with tempfile.NamedTemporaryFile(suffix=".json") as report:
            command = [self._binary, f"--loadEngine={self._path}", f"--exportTimes={report.name}"]
            command += [f"--iterations={runs}", "--duration=0", f"--warmUp={_WARM_MS}"]
            _run([*command, "--noDataTransfers", "--useSpinWait"])
            text = report.read(_REPORT)
        try:
            # TensorRT 8.4 and earlier list the runs that warm up as well.
            found = [float(run["computeMs"]) for run in json.loads(text) if float(run["startComputeMs"]) >= _WARM_MS]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RefusalError("runtime", "the file of trtexec --exportTimes has an unknown format") from None
        if len(found) < runs:
            raise RefusalError("runtime", f"trtexec reported {len(found)} runs; {runs} were asked for")
        return [milliseconds / 1e3 for milliseconds in found[len(found) - runs :]]


class BenchmarkModel:
    """LiteRT's ``benchmark_model``, which prints the mean of its runs: one time for each step."""

    def __init__(self, binary: str) -> None:
        self.binary = binary
        with open(binary, "rb") as file:  # it prints no version
            self.version = f"sha256 {hashlib.sha256(file.read()).hexdigest()[:16]}"

    def load(self, path: str, threads: int) -> LiteRTFile:
        """Check that a .tflite file runs."""
        options = [f"--num_threads={threads}", "--use_xnnpack=true", f"--warmup_runs={_WARM_RUNS}"]
        network = LiteRTFile([self.binary, f"--graph={path}", *options, "--warmup_min_secs=0", "--min_secs=0"])
        network.times(1)
        return network


class LiteRTFile:
    """A .tflite file."""

    size = 0

    def __init__(self, command: list[str]) -> None:
        self._command = command

    def times(self, runs: int) -> list[float]:
        """Return one value: the mean seconds of the runs."""
        text = _run([*self._command, f"--num_runs={runs}"])
        found = re.findall(r"Inference \(avg\): ([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)(?=\s|$)", text)
        if len(found) != 1:
            raise RefusalError("runtime", "benchmark_model printed no mean time of inference")
        return [float(found[0]) * 1e-6]


def _program(runtime: str, given: str) -> str:
    """Return the path of the program that runs networks: the given one, or where it usually is."""
    for place in [given] if given else _PROGRAMS[runtime]:
        found = shutil.which(os.path.expanduser(place))
        if found:
            return found
    raise RefusalError("program", f"{given or _PROGRAMS[runtime][0]} is not there, or not executable")


def _run(command: list[str], limit: float = 3600.0) -> str:
    """Run a program of the board; return what it printed. It ends with the agent."""
    with tempfile.TemporaryFile() as output:
        try:
            status = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, timeout=limit,
                preexec_fn=_end_with_parent, check=False,
            ).returncode  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RefusalError("runtime", f"cannot run {os.path.basename(command[0])}: {_one_line(error)}") from error
        size = output.tell()
        output.seek(max(size - 2**20, 0))
        text = output.read().decode(errors="replace")
    if status:
        lines = [line for line in text.splitlines() if line.strip()]
        wrong = [line for line in lines if "[E]" in line or "ERROR" in line] or lines[-3:]
        said = " ".join(" ".join(wrong[:3]).split())[:300]
        raise RefusalError("network", f"{os.path.basename(command[0])} ended with status {status}: {said}")
    return text


def _end_with_parent() -> None:
    """Let the kernel end this process when the agent ends; an alarm ends the agent without cleaning up."""
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _tensorrt_version(number: int) -> str:
    """Return "8.5.2" for 8502 and "10.3.0" for 100300, as trtexec writes it before and since version 10."""
    step = 1000 if number < 10000 else 10000
    return f"{number // step}.{number % step // 100}.{number % 100}"


def _arrays(data: bytes, specs: Any) -> list[Any]:
    """Split raw bytes into arrays, described by ``[[dtype, shape], ...]``."""
    import numpy

    found, offset = [], 0
    for dtype, shape in specs:
        if dtype not in DTYPES or not all(type(n) is int and n >= 0 for n in shape):
            raise RefusalError("protocol", "an input has an invalid type or shape")
        kind = numpy.dtype(dtype).newbyteorder("<")
        count = 1
        for n in shape:
            count *= n
        if offset + count * kind.itemsize > len(data):
            raise RefusalError("protocol", "the inputs have fewer bytes than their shapes need")
        found.append(numpy.frombuffer(data, kind, count, offset).reshape(shape).astype(dtype))
        offset += count * kind.itemsize
    if offset != len(data):
        raise RefusalError("protocol", "the inputs have more bytes than their shapes need")
    return found


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


# The machine ----------------------------------------------------------------------------------------------------------


def _read(path: str) -> str | None:
    try:
        with open(path, errors="replace") as file:
            return file.read().strip("\0 \n")
    except OSError:
        return None


def environment(versions: dict[str, str]) -> dict[str, str]:
    """Return what a measurement here depends on: the keys of profilers/measuring/environment.py, and the board."""
    model = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo") or "", re.M)
    hidden = "not visible"
    return {
        "board": _read("/proc/device-tree/model") or hidden,
        "cpu": model.group(1) if model else platform.processor() or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "governor": _read(_CPU + "cpu0/cpufreq/scaling_governor") or hidden,
        "boost": _read(_CPU + "cpufreq/boost") or hidden,
        "smt": _read(_CPU + "smt/control") or hidden,
        "kernel": platform.release(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **versions,
        "agent": str(VERSION),
    }


def state() -> dict[str, float]:
    """Return load averages and temperature of the board."""
    found = {"time": time.time()}
    with contextlib.suppress(OSError):
        found["load1"], found["load5"] = (round(x, 2) for x in os.getloadavg()[:2])
    with contextlib.suppress(ValueError):
        found["celsius"] = int(_read("/sys/class/thermal/thermal_zone0/temp") or "") / 1000
    return found


def busiest(seconds: float = 0.2) -> str:
    """Describe the other process that uses most processor time now; empty if it uses less than 10% of a core."""

    def times() -> dict[str, tuple[str, int]]:
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
            text = _read(f"/proc/{pid}/stat")
            if text and ")" in text:
                rest = text[text.rindex(")") + 2 :].split()
                found[pid] = (text[text.index("(") + 1 : text.rindex(")")], int(rest[11]) + int(rest[12]))
        return found

    before = times()
    time.sleep(seconds)
    tick, worst = os.sysconf("SC_CLK_TCK"), (0.1, "")
    for pid, (name, ticks) in times().items():
        if pid in before and int(pid) != os.getpid():
            share = (ticks - before[pid][1]) / tick / seconds
            worst = max(worst, (share, f"on the board {name} (pid {pid}) uses {100 * share:.0f}% of a core"))
    return worst[1]


def _memory() -> int:
    """Return the bytes that loaded networks may take: half of the memory that is free now."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _read("/proc/meminfo") or "", re.M)
    return int(found.group(1)) * 512 if found else 2**28


# The agent ------------------------------------------------------------------------------------------------------------


class Agent:
    """The agent: answers requests until the input ends."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self.source, self.sink = source, sink
        self.idle = 300
        self.artefacts: Artefacts | None = None
        self.networks: OrderedDict[int, Network | Engine | LiteRTFile] = OrderedDict()  # least recently used first
        self.memory = _memory()
        self.program: Trtexec | BenchmarkModel | None = None  # None: ONNX Runtime
        self._lock: Any = None

    def serve(self) -> None:
        """Answer until the input ends."""
        self.sink.write(BANNER)
        self.sink.flush()
        while True:
            _alarm(self.idle)
            frame = read_frame(self.source)
            if frame is None:
                return
            header, payload = frame
            limit = header.get("limit")
            _alarm(int(limit) if isinstance(limit, (int, float)) and 1 <= limit <= 3600 else 60)
            data = b""
            try:
                reply, data = self.answer(header, payload)
            except RefusalError as refusal:
                reply = {"refused": refusal.kind, "text": str(refusal)}
            except MemoryError:
                reply = {"refused": "memory", "text": "out of memory"}
            except (KeyError, TypeError, ValueError) as error:
                reply = {"refused": "protocol", "text": f"{type(error).__name__}: {_one_line(error)}"}
            reply["id"] = header.get("id")  # tells the host that this is not a late answer to an earlier request
            if len(data) > _PAYLOAD_LIMIT:
                reply, data = {**reply, "refused": "network", "text": "its outputs are too large to send"}, b""
            write_frame(self.sink, reply, data)

    def answer(self, header: Json, payload: bytes) -> tuple[Json, bytes]:
        """Return the reply to one request."""
        operation = header.get("op")
        for handle in header.get("release", ()):
            self.networks.pop(handle, None)
        if operation == "hello":
            return self.hello(header), b""
        if self.artefacts is None:
            raise RefusalError("protocol", "the first request must be hello")
        if operation == "announce":
            return {"have": self.artefacts.announce(header["artefacts"])}, b""
        if operation == "put":
            return {"have": self.artefacts.put(header["artefact"], header["offset"], payload)}, b""
        if operation == "load":
            return self.load(header), b""
        if operation == "sequence":
            return self.sequence(header)
        if operation == "outputs":
            return self.outputs(header)
        if operation == "state":
            return {"state": state(), "busiest": busiest() if header.get("busiest") else ""}, b""
        raise RefusalError("protocol", f"unknown operation {operation!r:.40}")

    def hello(self, header: Json) -> Json:
        """Lock the board for one session and return its environment."""
        self.idle = max(1, min(int(header["idle"]), 3600))
        folder = os.path.expanduser(
            header.get("folder") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "dsa_hw", "artefacts")
        )
        if folder.startswith("~"):  # it would be a folder of that name
            raise RefusalError("folder", "the user who logs in has no home folder")
        runtime, providers = header.get("runtime", "onnxruntime"), []
        binary = _program(runtime, header.get("binary") or "") if runtime in _PROGRAMS else ""
        if not binary:
            ort = _runtime()  # first, so that a missing runtime is reported before a missing numpy

            import numpy

            versions = {"numpy": numpy.__version__, "onnxruntime": ort.__version__}
            providers = ort.get_available_providers()
        self.artefacts = Artefacts(folder, int(header["room"]))
        self._take(self.artefacts.folder, str(header["session"]))
        if runtime == "tensorrt":
            self.program = Trtexec(binary, self.artefacts.folder)
            versions = {"tensorrt": self.program.version}
        elif runtime == "litert":
            self.program = BenchmarkModel(binary)
            versions = {"benchmark_model": self.program.version}
        return {"environment": environment(versions), "providers": providers}

    def _take(self, folder: str, session: str, patience: float = 5.0) -> None:
        """Lock the board against other sessions; an agent of the same session, from a lost connection, is ended."""
        import fcntl

        with _disk("lock the board"):
            lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            self._lock = os.fdopen(lock, "r+", errors="replace")
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                self._lock.seek(0)
                pid, _, owner = self._lock.read(100).partition(" ")
                if owner == session and pid.isdigit() and int(pid) > 1:
                    with contextlib.suppress(OSError):
                        os.kill(int(pid), signal.SIGTERM)
                if time.monotonic() > end:
                    raise RefusalError(
                        "busy", f"process {pid[:10]} of another session measures on this board"
                    ) from None
                time.sleep(0.1)
        with _disk("lock the board"):
            self._lock.seek(0)
            self._lock.truncate()
            self._lock.write(f"{os.getpid()} {session}")
            self._lock.flush()

    def load(self, header: Json) -> Json:
        """Load a network under the number that the request gives; return those that were unloaded for it."""
        assert self.artefacts is not None
        handle, threads, device = header["handle"], header["threads"], header["device"]
        if type(handle) is not int or type(threads) is not int or device not in ("cpu", "cuda"):
            raise RefusalError("protocol", "a network needs a number, a thread count and a device")
        if self.program is not None:
            path = self.artefacts.path(header["network"])
            if isinstance(self.program, Trtexec):
                self.networks[handle] = self.program.load(header["network"], path, str(header["precision"]))
            else:
                self.networks[handle] = self.program.load(path, threads)
            return {"evicted": []}
        artefact = self.artefacts.get(header["network"])
        arrays = _arrays(self.artefacts.get(header["inputs"]), header["specs"])
        for needed in header["keep"]:
            if needed in self.networks:
                self.networks.move_to_end(needed)
        evicted = []
        while self.networks and sum(n.size for n in self.networks.values()) + 3 * len(artefact) > self.memory:
            evicted.append(self.networks.popitem(last=False)[0])
        self.networks[handle] = Network(artefact, arrays, threads, device)
        return {"evicted": evicted}

    def network(self, handle: Any) -> Network | Engine | LiteRTFile:
        """Return a loaded network."""
        if handle not in self.networks:
            raise RefusalError("not loaded", str(handle))
        self.networks.move_to_end(handle)
        return self.networks[handle]

    def sequence(self, header: Json) -> tuple[Json, bytes]:
        """Run ``steps`` of (network, runs) back to back; return the seconds of every run."""
        steps = [(self.network(handle), _count(runs)) for handle, runs in header["steps"]]
        seconds = array.array("d")
        gc.disable()  # a garbage collection during a run would disturb the measurement
        try:
            for network, runs in steps:
                seconds.extend(network.times(runs))
        finally:
            gc.enable()
        return {}, _little(seconds)

    def outputs(self, header: Json) -> tuple[Json, bytes]:
        """Return the outputs of one run."""
        import numpy

        network = self.network(header["network"])
        if not isinstance(network, Network):
            raise RefusalError("protocol", "this runtime gives no outputs")
        found = [numpy.ascontiguousarray(x) for x in network.outputs()]
        if any(x.dtype.name not in DTYPES for x in found):
            raise RefusalError("network", "an output has an unsupported type")
        data = b"".join(x.astype(x.dtype.newbyteorder("<")).tobytes() for x in found)
        return {"specs": [[x.dtype.name, list(x.shape)] for x in found]}, data


def _alarm(seconds: int) -> None:
    signal.alarm(seconds)  # its default action ends the process, even within a call


def _count(runs: Any) -> int:
    if type(runs) is not int or not 0 <= runs <= _MOST_RUNS:
        raise RefusalError("protocol", f"invalid number of runs: {runs!r:.40}")
    return runs


def _little(values: Any) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return bytes(values.tobytes())


def main() -> None:
    """Serve standard input and output; output of libraries goes to standard error."""
    sys.path[:] = [p for p in sys.path if p]  # do not import files from the folder in which ssh starts
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # A closed connection is not an error of the agent.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        Agent(sys.stdin.buffer, sink).serve()
    os._exit(0)  # threads of the runtime must not keep the process alive


if __name__ == "__main__":
    main()
