"""A kind of board as a target, and the bench that shares the work among its boards.

The job of profiling is the same as on one device (`profilers.profiling.api`): only loading and measuring differ. A
network
is loaded by keeping its ONNX file; measuring cuts the networks into waves, each measured by one board that is free.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa_hw.errors import MeasurementError
from profilers.fleet import on_worker as on_board
from profilers.fleet import tasks
from profilers.fleet.members import Board, Fleet, Kind
from profilers.measuring.bench import Bench
from profilers.measuring.measurement import Measurement, Samples
from profilers.measuring.reference import Reference
from profilers.measuring.rules import MeasuringRules
from profilers.targets import Loaded, Target, resolve

__all__ = ["FleetBench", "OnFleet"]

_log = logging.getLogger(__name__)

_WAVE = 8  # networks that a board measures in turns; a board that dies costs the time of one wave
_WAVE_BYTES = 2**28  # what one message may carry
_PATIENCE = 60.0  # seconds without any board
_DEATHS = 3  # boards that one wave may outlive


class OnFleet(Target):
    """The boards of one kind."""

    artefact = "onnx"
    runtime = "fleet"

    def __init__(self, fleet: Fleet, kind: Kind) -> None:
        resource = next(iter(kind.boards.values())).resource
        super().__init__(resource.partition("/")[2], precision=fleet.precision, threads=fleet.threads)
        self.fleet, self.kind, self.resource = fleet, kind, resource
        self.estimated = kind.about["estimated"]
        self.remote_device = _Away(kind)

    def load(self, artefact: bytes, inputs: tuple[Any, ...]) -> Loaded:
        """Keep the file: a board loads it. Outputs are computed here, where ONNX Runtime is installed."""
        outputs = None
        if find_spec("onnxruntime"):
            here = resolve("onnxruntime/cpu", precision=self.precision)
            outputs = lambda: here.load(artefact, inputs).outputs()  # type: ignore[misc]  # noqa: E731
        return _Kept(_nothing, outputs=outputs, artefact=artefact, inputs=on_board.packed_inputs(inputs))

    def known_grid(self) -> int | None:
        """What the boards say."""
        found = self.kind.about["grid"]
        return None if found is None else int(found)

    @property
    def name(self) -> str:
        """The resource that the boards declare."""
        return self.resource

    @property
    def title(self) -> str:
        """As the boards call their target."""
        return self.kind.title


class SlowOnFleet(OnFleet):
    """Boards whose runtime compiles for seconds."""

    slow_to_load = True


@dataclass(frozen=True, eq=False)
class _Kept(Loaded):
    artefact: bytes = b""
    inputs: list[tuple[str, list[int], bytes]] = field(default_factory=list)


def _nothing() -> None:
    raise MeasurementError("a network of a fleet runs on its boards, not here")


class _Away:
    """How the boards are; they are never asked for less than a wave."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.disturbed: str | None = None

    def sequence(self, steps: Sequence[tuple[Loaded, int]]) -> list[tuple[NDArray[np.float64], float]]:
        raise MeasurementError("a board of a fleet measures waves, not steps")

    def scan(self, control: Loaded, seconds: float, least: int) -> NDArray[np.float64]:
        raise MeasurementError("a board of a fleet scans its control itself")

    def busiest_process(self) -> str | None:
        """What disturbed a board last."""
        return self.disturbed

    def state(self) -> dict[str, float]:
        """Number of boards."""
        return {"time": time.time(), "boards": float(len(self._kind.boards))}


@dataclass(eq=False)
class _Wave:
    """Networks that one board measures together; ``seen`` are boards that have tried, ``errors`` what they said."""

    names: list[str]
    seen: set[str] = field(default_factory=set)
    deaths: int = 0
    errors: list[str] = field(default_factory=list)


class FleetBench(Bench):
    """A bench whose networks are measured by many boards; its reference is the lowest control of any of them."""

    def __init__(self, target: OnFleet, **options: Any) -> None:
        options = {**options, "environment": target.kind.environment, "references": on_board.Memory()}
        super().__init__(target, control=Loaded.exact(1.0), **options)
        self.fleet, self.kind = target.fleet, target.kind
        self._seed = int(options.get("seed", 0))
        self._waves = 0

    def calibrate(self, seconds: float = 0.5) -> Reference:
        """The boards have run their controls when they introduced themselves."""
        lowest = min((float(b.about["control"]) for b in self.kind.boards.values()), default=self.kind.control)
        return self._lower(lowest)

    def _lower(self, seconds: float) -> Reference:
        if self._reference is None or seconds < self._reference.seconds:
            self._reference = Reference(seconds, time.strftime("%Y-%m-%d"))
        return self._reference

    def warm_up(self, loaded: Loaded, limit: float = 2.0) -> float:
        """The board does it."""
        return 0.0

    def wait_until_quiet(
        self, networks: Mapping[str, Loaded], limit: float, rules: MeasuringRules | None = None
    ) -> bool:
        """Other boards may be quiet: there is nothing to wait for."""
        return True

    def measure_once(
        self,
        networks: Mapping[str, Loaded],
        *,
        limit: float = 60.0,
        earlier: Mapping[str, Samples] | None = None,
        on_visit: Callable[[str, Samples, Measurement], None] | None = None,
        rules: MeasuringRules | None = None,
    ) -> dict[str, Measurement]:
        """As `Bench.measure_once`; ``on_visit`` gets all runs of a network that a board made, when they arrive."""
        rules = rules or self.rules
        parts = {name: [earlier[name]] if earlier and name in earlier else [] for name in networks}
        hidden = dict.fromkeys(networks, 0.0)

        def judged(name: str) -> Measurement:
            reference, samples = self.reference.seconds, Samples.joined(parts[name])
            title, about = self.target.title, self.environment
            return Measurement(name, title, samples, reference, rules, about, hidden[name])

        pending = [name for name in networks if not judged(name).finished]
        queue = deque(self._cut(networks, pending))
        running: dict[Any, tuple[Board, _Wave]] = {}
        end, alone = time.monotonic() + limit, time.monotonic()
        try:
            while queue or running:
                if self.fleet.stop.is_set():
                    raise KeyboardInterrupt
                self.fleet.look()
                boards = list(self.kind.boards.values())
                busy = {board for board, _ in running.values()}
                alone = time.monotonic() if boards else alone
                if not boards and time.monotonic() - alone > _PATIENCE:
                    raise MeasurementError(
                        f"no board of {self.kind} is left, and none came back within {_PATIENCE:.0f} s; what was "
                        "measured is stored: start workers, and run the same command again"
                    )
                left = end - time.monotonic()
                if left <= 0:
                    queue.clear()
                for board in boards:
                    if board not in busy and (wave := _next(queue, board, len(boards))) is not None:
                        # Others may have to do it again where this board turns out to be disturbed.
                        rounds = max(math.ceil((len(queue) + 1) / len(boards)), 2 if len(boards) > 1 else 1)
                        given = {name: Samples.joined(parts[name]) for name in wave.names if parts[name]}
                        running[self._submit(board, wave, networks, rules, left / rounds, given)] = (board, wave)
                present = set(self.kind.boards.values())
                for future, (board, wave) in list(running.items()):
                    if future.done() and future.status == "finished":
                        del running[future]
                        found = future.result()
                        if "error" in found:
                            _failed(wave, board, found["error"], len(boards))
                            queue.append(wave)
                            continue
                        self._lower(float(found["reference"]))
                        self._note(found["busiest"], board)
                        for name in wave.names:
                            hidden[name] = max(hidden[name], float(found["hidden"][name]))
                            new = on_board.unpacked(found["samples"][name])
                            if len(new):
                                parts[name].append(new)
                                if on_visit is not None:
                                    on_visit(name, new, judged(name))
                        wave.seen.add(board.address)
                        wave.names = [name for name in wave.names if not judged(name).finished]
                        if wave.names:
                            queue.append(wave)
                    elif future.done() or board not in present:
                        del running[future]
                        self._lost(future, wave, board)
                        queue.appendleft(wave)
                time.sleep(0.02)
        finally:
            for future in running:
                future.cancel()
        return {name: judged(name) for name in networks}

    def _cut(self, networks: Mapping[str, Loaded], names: Sequence[str]) -> list[_Wave]:
        """Waves of equal size: at least two for each board, so that a slow one does not hold up the rest."""
        boards = max(len(self.kind.boards), 1)
        largest = max((len(self._kept(networks[name]).artefact) for name in names), default=1)
        size = min(max(math.ceil(len(names) / (2 * boards)), 1), _WAVE, max(_WAVE_BYTES // max(largest, 1), 1))
        return [_Wave(list(names[i : i + size])) for i in range(0, len(names), size)]

    @staticmethod
    def _kept(loaded: Loaded) -> _Kept:
        assert isinstance(loaded, _Kept)
        return loaded

    def _submit(
        self,
        board: Board,
        wave: _Wave,
        networks: Mapping[str, Loaded],
        rules: MeasuringRules,
        limit: float,
        earlier: Mapping[str, Samples],
    ) -> Any:
        self._waves += 1
        kept = {name: self._kept(networks[name]) for name in wave.names}
        _log.info("%s measures %d networks", board, len(kept))
        return self.fleet.submit(
            board,
            tasks.wave,
            board.resource,
            self.target.precision,
            self.target.threads,
            {name: (network.artefact, network.inputs) for name, network in kept.items()},
            asdict(rules),
            limit,
            self.reference.seconds,
            {name: on_board.packed(samples) for name, samples in earlier.items()},
            self._seed + self._waves,
        )

    def _note(self, disturbed: str | None, board: Board) -> None:
        if disturbed and isinstance(self.target.remote_device, _Away):
            self.target.remote_device.disturbed = f"on {board.name} {disturbed}"

    @staticmethod
    def _lost(future: Any, wave: _Wave, board: Board) -> None:
        """A board that is gone, or a task that Dask gave up; anything else that went wrong there is an error."""
        problem = future.exception() if future.status == "error" else None
        future.cancel()
        if problem is not None and type(problem).__name__ != "KilledWorker":
            raise MeasurementError(f"{board} failed: {type(problem).__name__}: {problem}") from problem
        wave.deaths += 1
        if wave.deaths >= _DEATHS:
            raise MeasurementError(
                f"{wave.deaths} boards were lost while they measured the same {len(wave.names)} networks; see the log "
                f"of {board}: the networks may need more memory than it has"
            )


OnFleet.bench_class = FleetBench


def _next(queue: deque[_Wave], board: Board, boards: int) -> _Wave | None:
    """The next wave, if possible one that this board has not tried: the board may be disturbed."""
    for wave in queue:
        if board.address not in wave.seen or len(wave.seen) >= boards:
            queue.remove(wave)
            return wave
    return None


def _failed(wave: _Wave, board: Board, text: str, boards: int) -> None:
    wave.errors.append(text)
    wave.seen.add(board.address)
    if len(wave.errors) >= min(2, boards):
        raise MeasurementError(f"{board} cannot measure: {text}")
    _log.warning("%s cannot measure (%s); another board tries", board, text)
