"""A board behind a connection that may break: networks are sent, loaded and run there, and again after it broke.

Every request can be repeated: what is not on the board is sent, what is not loaded is loaded, and a visit whose answer
was lost is made again. So a lost connection costs time and nothing else.
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa_hw.errors import DsaError, MeasurementError
from profilers.networks.loaded import Loaded
from profilers.remote.agent import DTYPES
from profilers.remote.channel import Channel, LostError, RefusedError, plain
from profilers.remote.failures import Failure, of_refusal

__all__ = ["AgentDevice"]

_log = logging.getLogger(__name__)

Floats = NDArray[np.float64]

_CHUNK = 2**18  # bytes of an artefact in one request: a lost connection loses at most this much of it
_IDLE = 300  # seconds after which an agent that nobody asks ends itself; the next request starts another
_START = 120.0  # seconds for Python and ONNX Runtime to start on a slow board
_LOAD = 600.0
_CRASHES = 3
# What a board may say about itself.
_MACHINE = ("board", "cpu", "cores", "governor", "boost", "smt", "kernel", "system")
_KEYS = (*_MACHINE, "python", "numpy", "onnxruntime", "agent")


@dataclass(frozen=True)
class _Network:
    """What is needed to load a network on the board, as often as it takes."""

    handle: int
    blobs: dict[str, bytes]
    request: dict[str, Any]


class AgentDevice:
    """One board. ``command`` starts an agent there; ``explain`` turns a connection that failed into an error.

    ``patience`` is how long a connection that was lost is tried again, in seconds; ``room`` limits the bytes of
    artefacts that are kept there.
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
    ) -> None:
        self.title, self.reconnections = title, 0
        self._command, self._explain, self._patience = list(command), explain, patience
        self._login, self._python = login, python
        self._hello = {"op": "hello", "session": secrets.token_hex(8), "idle": _IDLE, "folder": folder, "room": room}
        self._lock = threading.RLock()
        self._channel: Channel | None = None
        self._ready: set[int] = set()
        self._released: list[int] = []
        self._numbers = itertools.count(1)
        self._networks: weakref.WeakKeyDictionary[Loaded, _Network] = weakref.WeakKeyDictionary()
        self._about: tuple[dict[str, str], tuple[str, ...]] | None = None
        self._warned = False

    # What the board is ------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect now, if not connected; an error that says why it is not possible."""
        with self._lock:
            if self._channel is None:
                self._ask({"op": "state"})

    def close(self) -> None:
        """End the agent and the connection; the next request makes new ones."""
        with self._lock:
            self._drop()

    @property
    def environment(self) -> dict[str, str]:
        """What the board says about itself."""
        if self._about is None:
            self.connect()
        assert self._about is not None
        return dict(self._about[0])

    @property
    def providers(self) -> tuple[str, ...]:
        """Execution providers of its ONNX Runtime."""
        if self._about is None:
            self.connect()
        assert self._about is not None
        return self._about[1]

    def state(self) -> dict[str, float]:
        """Load averages and temperature of the board."""
        found = self._ask({"op": "state"})[0].get("state", {})
        names = ("time", "load1", "load5", "celsius")
        return {k: float(found[k]) for k in names if isinstance(found.get(k), (int, float))}

    def busiest_process(self) -> str | None:
        """The process there that disturbs most."""
        return plain(self._ask({"op": "state", "busiest": True})[0].get("busiest", "")) or None

    # Networks ---------------------------------------------------------------------------------------------------------

    def load(self, artefact: bytes, arrays: Sequence[NDArray[Any]], threads: int, device: str) -> Loaded:
        """Send a network and its inputs, unless they are there, and make it ready."""
        for array in arrays:
            if array.dtype.name not in DTYPES:
                raise MeasurementError(f"an input has type {array.dtype}; a board takes {', '.join(DTYPES)}")
        inputs = b"".join(np.ascontiguousarray(a).astype(a.dtype.newbyteorder("<")).tobytes() for a in arrays)
        names = [hashlib.sha256(x).hexdigest() for x in (artefact, inputs)]
        handle = next(self._numbers)
        request = {
            "op": "load",
            "handle": handle,
            "network": names[0],
            "inputs": names[1],
            "specs": [[a.dtype.name, list(a.shape)] for a in arrays],
            "threads": threads,
            "device": device,
        }
        network = _Network(handle, {names[0]: artefact, names[1]: inputs}, request)
        self._ask(None, needs=(network,))

        def clock(n: int) -> Floats:
            return self._sequence([(network, n)])[0][0]

        loaded = Loaded(lambda: clock(1), clock=clock, outputs=lambda: self._outputs(network))
        self._networks[loaded] = network
        weakref.finalize(loaded, self._released.append, handle).atexit = False
        return loaded

    def sequence(self, steps: Sequence[tuple[Loaded, int]]) -> list[tuple[Floats, float]]:
        """Do (network, runs) back to back on the board: seconds of the runs, and the processor wait, of each step."""
        return self._sequence([(self._networks[loaded], runs) for loaded, runs in steps])

    def scan(self, control: Loaded, seconds: float, least: int) -> Floats:
        """The control back to back; (n, 3) with start, wait and length of each run in seconds."""
        network = self._networks[control]
        header = {"op": "scan", "network": network.handle, "seconds": seconds, "least": least}
        _, data = self._ask(header, needs=(network,), limit=_LOAD)
        rows = self._floats(data, None)
        if len(rows) % 3 or len(rows) < 3 * least:
            raise self._nonsense(f"{len(rows)} numbers for {least} runs")
        return rows.reshape(-1, 3)

    def _sequence(self, steps: Sequence[tuple[_Network, int]]) -> list[tuple[Floats, float]]:
        header = {"op": "sequence", "steps": [[network.handle, runs] for network, runs in steps]}
        reply, data = self._ask(header, needs=[network for network, _ in steps], limit=_LOAD)
        seconds = self._floats(data, sum(runs for _, runs in steps))
        if not np.all(np.isfinite(seconds)) or np.any(seconds <= 0):
            raise self._nonsense("times that are not positive: its clock is broken")
        waits = reply.get("waits")
        if not isinstance(waits, list) or len(waits) != len(steps):
            raise self._nonsense("a wait is missing")
        parts = np.split(seconds, np.cumsum([runs for _, runs in steps])[:-1])
        return [(part, math.nan if wait is None else float(wait)) for part, wait in zip(parts, waits, strict=True)]

    def _outputs(self, network: _Network) -> list[NDArray[Any]]:
        reply, data = self._ask({"op": "outputs", "network": network.handle}, needs=(network,), limit=_LOAD)
        found, offset = [], 0
        for dtype, shape in reply.get("specs", ()):
            if dtype not in DTYPES or not all(type(n) is int and n >= 0 for n in shape):
                raise self._nonsense("an output of unknown type or shape")
            kind, count = np.dtype(dtype).newbyteorder("<"), math.prod(shape)
            if offset + count * kind.itemsize > len(data):
                raise self._nonsense("an output that is too short")
            found.append(np.frombuffer(data, kind, count, offset).reshape(shape).astype(dtype))
            offset += count * kind.itemsize
        return found

    def _floats(self, data: bytes, count: int | None) -> Floats:
        if len(data) % 8 or (count is not None and len(data) != 8 * count):
            raise self._nonsense(f"{len(data)} bytes for {count} runs")
        return np.frombuffer(data, "<f8").astype(np.float64)

    def _nonsense(self, what: str) -> MeasurementError:
        return MeasurementError(f"the agent on {self.title} answered with {what}; please report this")

    # The connection ---------------------------------------------------------------------------------------------------

    def _ask(
        self, header: dict[str, Any] | None, *, needs: Sequence[_Network] = (), limit: float = 60.0
    ) -> tuple[dict[str, Any], bytes]:
        """One request (None: only load what it ``needs``), repeated over new connections until it is answered."""
        with self._lock, self._whole():
            crashes, reloads = 0, 0
            while True:
                channel = self._channel or self._open(again=crashes > 0)
                try:
                    for network in needs:
                        if network.handle not in self._ready:
                            self._load(channel, network)
                    if header is None:
                        return {}, b""
                    released, self._released[:] = self._released[:], []
                    self._ready.difference_update(released)
                    return channel.exchange({**header, "release": released}, limit=limit)
                except RefusedError as refused:
                    if refused.kind == "not loaded" and reloads < 2 * len(needs):
                        reloads += 1  # the board had no memory for all of them
                        self._ready.difference_update(n.handle for n in needs)
                        continue
                    raise of_refusal(refused, self.title, self._login, self._python) from refused
                except LostError as lost:
                    crashes += 1
                    self._drop()
                    if crashes >= _CRASHES:
                        raise MeasurementError(
                            f"{self.title} broke off {crashes} times at the same request ({plain(lost)}); it may be "
                            "out of memory: look at its kernel log, or use a smaller network"
                        ) from lost
                    _log.warning("the connection to %s broke (%s); connecting again", self.title, plain(lost, 120))

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """A conversation that was left in the middle (Ctrl-C) cannot be continued: the next request starts another."""
        try:
            yield
        except DsaError:
            raise
        except BaseException:
            self._drop()
            raise

    def _open(self, again: bool) -> Channel:
        """A new connection; where one was there before, for ``patience`` seconds, more and more slowly."""
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
                    raise of_refusal(error, self.title, self._login, self._python) from error
                if not isinstance(error, LostError):
                    raise
                failure = self._explain(error)
                # Broken off in the middle of the greeting is no different from broken off later.
                if not (again and (failure.passing or channel is not None)):
                    raise failure.error from error
                if time.monotonic() + pause > end:
                    raise MeasurementError(
                        f"the connection to {self.title} broke and did not come back for {self._patience:.0f} s: "
                        f"{failure.error}. What was measured is in the store: run the same command again"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, 10.0)
        self._channel, self._ready = channel, set()
        self.reconnections += again
        return channel

    def _greet(self, channel: Channel) -> None:
        reply, _ = channel.exchange(self._hello, limit=_START)
        said = reply.get("environment", {})
        about = (
            {k: plain(said.get(k, "not told"), 200) for k in _KEYS},
            tuple(plain(p, 60) for p in reply.get("providers", ())),
        )
        if self._about is not None and about != self._about:
            changed = [k for k in _KEYS if about[0][k] != self._about[0][k]] or ["providers"]
            raise MeasurementError(
                f"{self.title} is not what it was before the connection broke ({', '.join(changed)} changed); "
                "measurements of both are not mixed: run the same command again"
            )
        self._about = about

    def _drop(self) -> None:
        channel, self._channel = self._channel, None
        self._ready = set()
        if channel is not None:
            channel.close()

    def _load(self, channel: Channel, network: _Network) -> None:
        for attempt in range(2):  # a damaged file on the board is deleted there, and sent once more
            try:
                self._send(channel, network.blobs)
                reply, _ = channel.exchange(network.request, limit=_LOAD)
                break
            except RefusedError as refused:
                if refused.kind not in ("hash", "missing") or attempt:
                    raise
        if reply.get("evicted") and not self._warned:
            self._warned = True
            _log.warning("%s has no memory for all networks at once; some are loaded again and again", self.title)
        self._ready.add(network.handle)

    def _send(self, channel: Channel, blobs: dict[str, bytes]) -> None:
        """Send what is not there, from where the last attempt was cut off."""
        from tqdm import tqdm

        have, _ = channel.exchange({"op": "announce", "artefacts": {k: len(v) for k, v in blobs.items()}})
        there = {k: int(have.get("have", {}).get(k, 0)) for k in blobs}
        missing = sum(len(v) - there[k] for k, v in blobs.items())
        with tqdm(total=missing, unit="B", unit_scale=True, desc="sending", delay=2, leave=False, disable=None) as bar:
            for name, data in blobs.items():
                for start in range(there[name], len(data), _CHUNK):
                    part = data[start : start + _CHUNK]
                    channel.exchange({"op": "put", "artefact": name, "offset": start}, part)
                    bar.update(len(part))
