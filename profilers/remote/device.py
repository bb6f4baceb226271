"""A board on which an agent runs networks, over a connection that may break.

Every request can be repeated: what the board lacks is sent, what is not loaded is loaded, and runs whose answer was
lost are made again. A lost connection costs time and nothing else.

What a board answers is checked: types, ranges, and that it belongs to the request. A board that answers late or with
something else is an error at once; only a connection that ends is tried again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsa_hw.errors import DsaError, MeasurementError
from dsa_hw.utils.arrays import Floats
from dsa_hw.utils.progress import Bar
from dsa_hw.utils.text import one_line
from profilers.networks.loaded import Loaded
from profilers.networks.seconds import checked_seconds
from profilers.remote.agent import DTYPES
from profilers.remote.channel import Channel, LostError, RefusedError
from profilers.remote.failures import Failure, of_refusal

__all__ = ["AgentDevice"]

_log = logging.getLogger(__name__)

_CHUNK = 2**18  # bytes of an artefact in one request; a lost connection loses at most these
_IDLE = 300  # seconds without a request after which the agent ends; the next request starts another
_START = 120.0  # seconds for Python and ONNX Runtime to start on a slow board
_LOAD = 600.0  # seconds to load a network, and to run `_STEPS` steps
_BUILD = 3600.0  # seconds to build an engine
_STEPS = 16  # steps of one request; a network may take half a minute for a run
_OUTPUTS = 2**28  # most bytes of the outputs of a network
_DIMENSIONS = 16
_PROVIDERS = 64
_CRASHES = 3
# What the environment of a board contains.
_MACHINE = ("board", "cpu", "cores", "governor", "boost", "smt", "kernel", "system")
_VERSIONS = {"onnxruntime": ("numpy", "onnxruntime"), "tensorrt": ("tensorrt",), "litert": ("benchmark_model",)}
# Runs of a network in one visit. A program of the board is a new process for each visit, which takes longer than these.
_VISIT = {"onnxruntime": 1, "tensorrt": 20, "litert": 5}


_T = TypeVar("_T")


class _CrowdedError(Exception):
    """The board cannot hold all networks of a request at once."""


@dataclass(frozen=True)
class _Network:
    """What is needed to load a network on the board, repeatedly if necessary."""

    handle: int
    blobs: dict[str, bytes]
    request: dict[str, Any]


class AgentDevice:
    """A `RemoteDevice` that is reached through an agent.

    Args:
        title: Name of the board in messages.
        command: Starts the agent and connects to it.
        explain: Turns a failed connection into an error.
        login: Arguments of ssh with which a user would connect, for messages.
        python: Python on the board, for messages.
        folder: Where artefacts are kept on the board; None for the agent's default.
        patience: Seconds during which a lost connection is tried again.
        room: Bytes of artefacts to keep on the board at most.
        runtime: What runs networks there: "onnxruntime", "tensorrt" (by ``trtexec``) or "litert" (by
            ``benchmark_model``, which gives one mean for all runs of a visit).
        binary: Path of that program on the board; empty for where it usually is.
    """

    def __init__(
        self,
        title: str,
        command: Sequence[str],
        explain: Callable[[LostError], Failure],
        *,
        login: str,
        python: str,
        folder: str | None = None,
        patience: float = 60.0,
        room: int = 2**31,
        runtime: str = "onnxruntime",
        binary: str = "",
    ) -> None:
        self.title, self.reconnections, self.runtime = title, 0, runtime
        self._command, self._explain, self._patience = list(command), explain, patience
        self._login, self._python = login, python
        self._hello = {"op": "hello", "session": secrets.token_hex(8), "idle": _IDLE, "folder": folder, "room": room}
        self._hello |= {"runtime": runtime, "binary": binary}
        self._keys = (*_MACHINE, "python", *_VERSIONS[runtime], "agent")
        self._lock = threading.RLock()
        self._channel: Channel | None = None
        self._ready: set[int] = set()
        self._released: list[int] = []
        self._numbers = itertools.count(1)
        self._networks: weakref.WeakKeyDictionary[Loaded, _Network] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[Loaded] | None = None  # what `sequence` ran last
        self._steps = _STEPS
        self._about: tuple[dict[str, str], tuple[str, ...]] | None = None
        self._warned = False

    # The board ------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect, if not connected."""
        with self._lock:
            if self._channel is None:
                self._ask({"op": "state"})

    def close(self) -> None:
        """End the agent and the connection; the next request starts new ones."""
        with self._lock:
            self._drop()

    @property
    def environment(self) -> dict[str, str]:
        """Hardware, system and versions of the board."""
        if self._about is None:
            self.connect()
        assert self._about is not None
        return dict(self._about[0])

    @property
    def providers(self) -> tuple[str, ...]:
        """Execution providers of the board's ONNX Runtime."""
        if self._about is None:
            self.connect()
        assert self._about is not None
        return self._about[1]

    def state(self) -> dict[str, float]:
        """Return load averages and temperature of the board."""
        found = self._field(self._ask({"op": "state"})[0], "state", dict)
        names = [name for name in ("time", "load1", "load5", "celsius") if name in found]
        if not all(type(found[name]) in (int, float) for name in names):
            raise self._invalid("a load or temperature that is not a number")
        return {name: float(found[name]) for name in names}

    def busiest_process(self) -> str | None:
        """Describe the busiest process of the board; None if there is none."""
        return one_line(self._field(self._ask({"op": "state", "busiest": True})[0], "busiest", str)) or None

    # Networks ---------------------------------------------------------------------------------------------------------

    def load(
        self, artefact: bytes, arrays: Sequence[NDArray[Any]], threads: int, device: str, precision: str = "fp32"
    ) -> Loaded:
        """Send a network and its inputs, unless the board has them, and load it.

        Args:
            artefact: The bytes of an ONNX or LiteRT file.
            arrays: Its inputs, which ONNX Runtime is given; the programs of a board make their own.
            threads: CPU threads of one run.
            device: "cpu" or "cuda".
            precision: "fp32", "fp16" or "int8", as in the file.

        Returns:
            The network, ready to run.
        """
        for array in arrays:
            if array.dtype.name not in DTYPES:
                raise MeasurementError(
                    f"Inputs on a board must have one of the types {', '.join(DTYPES)}; got {array.dtype}."
                )
        handle, name = next(self._numbers), hashlib.sha256(artefact).hexdigest()
        request = {"op": "load", "handle": handle, "network": name, "threads": threads, "device": device}
        blobs = {name: artefact}
        if self.runtime == "onnxruntime":
            inputs = b"".join(np.ascontiguousarray(a).astype(a.dtype.newbyteorder("<")).tobytes() for a in arrays)
            blobs[hashlib.sha256(inputs).hexdigest()] = inputs
            request |= {"inputs": [*blobs][-1], "specs": [[a.dtype.name, list(a.shape)] for a in arrays]}
        else:
            request |= {"precision": precision}
        network = _Network(handle, blobs, request)
        self._ask(None, needs=(network,))

        def clock(n: int) -> Floats:
            if self.runtime == "litert":  # a mean for each
                return np.concatenate(self._sequence([(network, 1)] * n))
            return self._sequence([(network, n)])[0]

        outputs = (lambda: self._outputs(network)) if self.runtime == "onnxruntime" else None
        loaded = Loaded(lambda: clock(1), clock=clock, outputs=outputs)
        self._networks[loaded] = network
        weakref.finalize(loaded, self._released.append, handle).atexit = False
        return loaded

    def sequence(self, steps: Sequence[tuple[Loaded, int]]) -> list[Floats]:
        """Run (network, runs) back to back on the board, in requests of at most `_STEPS` steps.

        The board is idle between two requests, and its clock may fall. Every request therefore begins with one more
        run of the network that was run last, which is not counted. A program of the board warms up by itself; there,
        a run stands for some, all of whose times are returned, or their mean.
        """
        found: list[Floats] = []
        each = _VISIT[self.runtime]
        while len(found) < len(steps):
            part = [(self._networks[loaded], each * runs) for loaded, runs in steps[len(found) :][: self._steps]]
            last = self._last() if self._last is not None and each == 1 else None
            again = [(self._networks[last], 1)] if last is not None and self._steps > 1 else []
            try:
                found += self._sequence([*again, *part])[len(again) :]
            except _CrowdedError:
                self._steps //= 2  # a request of one step needs one network only
                continue
            self._last = weakref.ref(steps[len(found) - 1][0])
        return found

    def _sequence(self, steps: Sequence[tuple[_Network, int]]) -> list[Floats]:
        header = {"op": "sequence", "steps": [[network.handle, runs] for network, runs in steps]}
        counts = [1 if self.runtime == "litert" else runs for _, runs in steps]
        count = sum(counts)
        _, data = self._ask(header, needs=[network for network, _ in steps], limit=_LOAD, most=8 * count)
        if len(data) != 8 * count:
            raise self._invalid(f"{len(data)} bytes for {count} runs")
        seconds = checked_seconds(np.frombuffer(data, "<f8").astype(np.float64), count, f"The agent on {self.title}")
        return np.split(seconds, np.cumsum(counts)[:-1])

    def _outputs(self, network: _Network) -> list[NDArray[Any]]:
        request = {"op": "outputs", "network": network.handle}
        reply, data = self._ask(request, needs=(network,), limit=_LOAD, most=_OUTPUTS)
        found, offset = [], 0
        for spec in self._field(reply, "specs", list):
            if not _is_spec(spec):
                raise self._invalid("an output of unknown type or shape")
            kind, count = np.dtype(spec[0]).newbyteorder("<"), math.prod(spec[1])
            if offset + count * kind.itemsize > len(data):
                raise self._invalid("an output that is too short")
            part = data[offset : offset + count * kind.itemsize]
            found.append(np.frombuffer(part, kind).reshape(spec[1]).astype(spec[0]))
            offset += len(part)
        if offset != len(data):
            raise self._invalid("more bytes than its outputs have")
        return found

    def _field(self, reply: dict[str, Any], name: str, kind: type[_T]) -> _T:
        """Return a field of an answer, of the given type."""
        found = reply.get(name)
        if type(found) is not kind:
            raise self._invalid(f"{name} must be of type {kind.__name__}; got {one_line(repr(found), 60)}")
        return found

    def _invalid(self, what: str) -> MeasurementError:
        return MeasurementError(f"The agent on {self.title} sent an invalid answer ({what}). Please report this.")

    # The connection ---------------------------------------------------------------------------------------------------

    def _ask(
        self, header: dict[str, Any] | None, *, needs: Sequence[_Network] = (), limit: float = 60.0, most: int = 0
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request (None: only load what it ``needs``), over new connections until it is answered.

        ``limit`` and ``most`` are those of `Channel.exchange`.
        """
        with self._lock, self._whole():
            crashes, reloads = 0, 0
            while True:
                channel = self._channel or self._open(again=crashes > 0)
                try:
                    for network in needs:
                        if network.handle not in self._ready:
                            self._load(channel, network, needs)
                    if not self._ready.issuperset(network.handle for network in needs):
                        raise _CrowdedError
                    if header is None:
                        return {}, b""
                    return channel.exchange({**header, "release": self._release()}, limit=limit, most=most)
                except RefusedError as refused:
                    if refused.kind == "not loaded" and reloads < 2:
                        reloads += 1
                        self._ready.difference_update(n.handle for n in needs)
                        continue
                    raise of_refusal(refused, self.title, self._login, self._python, self.runtime) from refused
                except LostError as lost:
                    crashes += 1
                    self._drop()
                    if lost.late or lost.status is None:
                        raise MeasurementError(
                            f"{self.title} did not answer a request properly ({one_line(lost)}). All measurements so "
                            "far are stored: restart the board, and run the same command again."
                        ) from lost
                    if crashes >= _CRASHES:
                        raise MeasurementError(
                            f"The connection to {self.title} broke {crashes} times at the same request "
                            f"({one_line(lost)}). The board may be out of memory: see its kernel log, or use a smaller "
                            "network."
                        ) from lost
                    _log.warning("The connection to %s broke (%s); connecting again.", self.title, one_line(lost, 120))

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Drop the connection where a request is interrupted (Ctrl-C): it cannot be continued."""
        try:
            yield
        except (DsaError, _CrowdedError):
            raise
        except BaseException:
            self._drop()
            raise

    def _open(self, again: bool) -> Channel:
        """Connect; after a lost connection, try for ``patience`` seconds with growing pauses."""
        end, pause = time.monotonic() + self._patience, 0.2
        while True:
            channel = None
            try:
                channel = Channel(self._command, _START)
                self._greet(channel)
                break
            except BaseException as error:
                if channel is not None:
                    channel.close()
                if isinstance(error, RefusedError):
                    raise of_refusal(error, self.title, self._login, self._python, self.runtime) from error
                if not isinstance(error, LostError):
                    raise
                failure = self._explain(error)
                # A connection that breaks during the greeting is treated like one that breaks later.
                if not (again and (failure.passing or channel is not None)):
                    raise failure.error from error
                if time.monotonic() + pause > end:
                    raise MeasurementError(
                        f"The connection to {self.title} broke and could not be restored within {self._patience:.0f} "
                        f"s. {failure.error} All measurements so far are stored: run the same command again."
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, 10.0)
        self._channel, self._ready = channel, set()
        self.reconnections += again
        return channel

    def _greet(self, channel: Channel) -> None:
        reply, _ = channel.exchange(self._hello, limit=_START)
        said, providers = self._field(reply, "environment", dict), self._field(reply, "providers", list)
        if not all(isinstance(said.get(k, ""), str) for k in self._keys):
            raise self._invalid("an environment that is not text")
        if len(providers) > _PROVIDERS or not all(isinstance(p, str) for p in providers):
            raise self._invalid("execution providers that are not names")
        about = (
            {k: one_line(said.get(k, "not told"), 200) for k in self._keys},
            tuple(one_line(p, 60) for p in providers),
        )
        if self._about is not None and about != self._about:
            changed = [k for k in self._keys if about[0][k] != self._about[0][k]] or ["providers"]
            raise MeasurementError(
                f"{self.title} changed while the connection was lost ({', '.join(changed)}). Measurements of different "
                "boards are not mixed: run the same command again."
            )
        self._about = about

    def _drop(self) -> None:
        channel, self._channel = self._channel, None
        self._ready = set()
        if channel is not None:
            channel.close()

    def _release(self) -> list[int]:
        """Return the networks that are no longer used, once."""
        released, self._released[:] = self._released[:], []
        self._ready.difference_update(released)
        return released

    def _load(self, channel: Channel, network: _Network, needs: Sequence[_Network]) -> None:
        """Load a network; where memory is short, the board unloads others first and those of ``needs`` last."""
        keep = [needed.handle for needed in needs]
        for attempt in range(2):  # the board deletes a damaged file, which is then sent again
            try:
                self._send(channel, network.blobs)
                request = {**network.request, "keep": keep, "release": self._release()}
                reply, _ = channel.exchange(request, limit=_BUILD if self.runtime == "tensorrt" else _LOAD)
                break
            except RefusedError as refused:
                if refused.kind not in ("hash", "missing") or attempt:
                    raise
        evicted = self._field(reply, "evicted", list)
        if not all(type(handle) is int for handle in evicted):
            raise self._invalid("unloaded networks that are not numbers")
        if evicted and not self._warned:
            self._warned = True
            _log.warning("%s lacks memory for all networks at once; some are loaded repeatedly.", self.title)
        self._ready.difference_update(evicted)
        self._ready.add(network.handle)

    def _send(self, channel: Channel, blobs: dict[str, bytes]) -> None:
        """Send what the board lacks, from where the last attempt ended."""
        reply, _ = channel.exchange({"op": "announce", "artefacts": {k: len(v) for k, v in blobs.items()}})
        have = self._field(reply, "have", dict)
        there = {k: self._field(have, k, int) for k in blobs}
        if not all(0 <= there[k] <= len(v) for k, v in blobs.items()):
            raise self._invalid("a size that a file cannot have")
        missing = sum(len(v) - there[k] for k, v in blobs.items())
        sent = 0
        with Bar(shown=missing > _CHUNK) as bar:
            for name, data in blobs.items():
                for start in range(there[name], len(data), _CHUNK):
                    part = data[start : start + _CHUNK]
                    reply, _ = channel.exchange({"op": "put", "artefact": name, "offset": start}, part)
                    if self._field(reply, "have", int) != start + len(part):
                        raise self._invalid("a size that does not match what was sent")
                    sent += len(part)
                    bar.say("sending", sent / missing, f"{missing / 1e6:.0f} MB")


def _is_spec(spec: object) -> bool:
    """Return whether this is the type and the shape of an array."""
    if not (isinstance(spec, list) and len(spec) == 2 and spec[0] in DTYPES and isinstance(spec[1], list)):
        return False
    return len(spec[1]) <= _DIMENSIONS and all(type(n) is int and 0 <= n <= _OUTPUTS for n in spec[1])
