"""A type of board as a target, and the bench of its boards.

The profiling job is the same as on one device; only loading and measuring differ. Loading a network keeps its ONNX
file. Measuring divides the networks into batches, each of which is measured by one idle board.
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
from dsa_hw.utils.text import one_line
from profilers.fleet import on_worker, tasks
from profilers.fleet.members import BoardType, Fleet, FleetMember
from profilers.measuring.bench import Bench
from profilers.measuring.measurement import Measurement, Samples
from profilers.measuring.reference import Reference
from profilers.measuring.rules import MeasuringRules
from profilers.targets import Loaded, Target, resolve

__all__ = ["FleetBench", "FleetTarget", "SlowFleetTarget"]

_log = logging.getLogger(__name__)

_BATCH = 8  # networks that a board measures in turns; a lost board costs the time of one batch
_BATCH_BYTES = 2**28  # largest message
_PATIENCE = 60.0  # seconds to wait for a board when none is left
_LOSSES = 3  # lost boards after which a batch is given up


@dataclass(frozen=True, eq=False)
class _FleetNetwork(Loaded):
    artefact: bytes = b""
    inputs: list[tuple[str, list[int], bytes]] = field(default_factory=list)


def _nothing() -> None:
    raise MeasurementError("A network of a fleet runs on its boards, not on this computer.")


class _FleetDevice:
    """The state of the boards; they measure batches, never single visits."""

    def __init__(self, board_type: BoardType) -> None:
        self._board_type = board_type
        self.disturbed: str | None = None

    def sequence(self, steps: Sequence[tuple[Loaded, int]]) -> list[tuple[NDArray[np.float64], float]]:
        raise MeasurementError("A board of a fleet measures batches, not single steps.")

    def scan(self, control: Loaded, seconds: float, least: int) -> NDArray[np.float64]:
        raise MeasurementError("A board of a fleet scans its own control.")

    def busiest_process(self) -> str | None:
        """Return what disturbed a board last."""
        return self.disturbed

    def state(self) -> dict[str, float]:
        """Return the number of boards."""
        return {"time": time.time(), "boards": float(len(self._board_type.members))}


@dataclass(eq=False)
class _Batch:
    """Networks that one board measures together; ``seen`` are the boards that tried, ``errors`` their errors."""

    names: list[str]
    seen: set[str] = field(default_factory=set)
    losses: int = 0
    errors: list[str] = field(default_factory=list)


class FleetBench(Bench):
    """A bench that measures on all boards of a type.

    Its reference is their lowest control.
    """

    def __init__(self, target: FleetTarget, **options: Any) -> None:
        options = {
            **options,
            "environment": target.board_type.environment,
            "references": on_worker.InMemoryReferences(),
        }
        super().__init__(target, control=Loaded.exact(1.0), **options)
        self.fleet, self.board_type = target.fleet, target.board_type
        self._seed = int(options.get("seed", 0))
        self._batches = 0

    def calibrate(self, seconds: float = 0.5) -> Reference:
        """Return the lowest control of the boards.

        They ran it when they were described.
        """
        lowest = min(
            (float(b.about["control"]) for b in self.board_type.members.values()), default=self.board_type.control
        )
        return self._lower(lowest)

    def _lower(self, seconds: float) -> Reference:
        if self._reference is None or seconds < self._reference.seconds:
            self._reference = Reference(seconds, time.strftime("%Y-%m-%d"))
        return self._reference

    def warm_up(self, loaded: Loaded, limit: float = 2.0) -> float:
        """Do nothing: boards warm up their networks."""
        return 0.0

    def wait_until_quiet(
        self, networks: Mapping[str, Loaded], limit: float, rules: MeasuringRules | None = None
    ) -> bool:
        """Do not wait: other boards may be undisturbed."""
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
        """Measure as `Bench.measure_once`.

        ``on_visit`` gets all runs of a network that one board made.
        """
        rules = rules or self.rules
        parts = {name: [earlier[name]] if earlier and name in earlier else [] for name in networks}
        hidden = dict.fromkeys(networks, 0.0)

        def judged(name: str) -> Measurement:
            reference, samples = self.reference.seconds, Samples.joined(parts[name])
            title, about = self.target.title, self.environment
            return Measurement(name, title, samples, reference, rules, about, hidden[name])

        pending = [name for name in networks if not judged(name).finished]
        queue = deque(self._cut(networks, pending))
        running: dict[Any, tuple[FleetMember, _Batch]] = {}
        end, alone = time.monotonic() + limit, time.monotonic()
        try:
            while queue or running:
                if self.fleet.stop.is_set():
                    raise KeyboardInterrupt
                self.fleet.update()
                members = list(self.board_type.members.values())
                busy = {member for member, _ in running.values()}
                alone = time.monotonic() if members else alone
                if not members and time.monotonic() - alone > _PATIENCE:
                    raise MeasurementError(
                        f"No board of {self.board_type} is left, and none came back within {_PATIENCE:.0f} s. All "
                        "measurements so far are stored: start workers, and run the same command again."
                    )
                left = end - time.monotonic()
                if left <= 0:
                    queue.clear()
                for member in members:
                    if member not in busy and (batch := _next(queue, member, len(members))) is not None:
                        # Another board may have to repeat the batch if this one is disturbed.
                        rounds = max(math.ceil((len(queue) + 1) / len(members)), 2 if len(members) > 1 else 1)
                        given = {name: Samples.joined(parts[name]) for name in batch.names if parts[name]}
                        running[self._submit(member, batch, networks, rules, left / rounds, given)] = (member, batch)
                present = set(self.board_type.members.values())
                for future, (member, batch) in list(running.items()):
                    if future.done() and future.status == "finished":
                        del running[future]
                        found = future.result()
                        if "error" in found:
                            _failed(batch, member, found["error"], len(members))
                            queue.append(batch)
                            continue
                        self._lower(float(found["reference"]))
                        self._note(found["busiest"], member)
                        for name in batch.names:
                            hidden[name] = max(hidden[name], float(found["hidden"][name]))
                            new = on_worker.unpack_samples(found["samples"][name])
                            if len(new):
                                parts[name].append(new)
                                if on_visit is not None:
                                    on_visit(name, new, judged(name))
                        batch.seen.add(member.address)
                        batch.names = [name for name in batch.names if not judged(name).finished]
                        if batch.names:
                            queue.append(batch)
                    elif future.done() or member not in present:
                        del running[future]
                        self._lost(future, batch, member)
                        queue.appendleft(batch)
                time.sleep(0.02)
        finally:
            for future in running:
                future.cancel()
        return {name: judged(name) for name in networks}

    def _cut(self, networks: Mapping[str, Loaded], names: Sequence[str]) -> list[_Batch]:
        """Divide networks into equal batches, at least two for each board, to limit delays by slow ones."""
        members = max(len(self.board_type.members), 1)
        largest = max((len(self._kept(networks[name]).artefact) for name in names), default=1)
        size = min(max(math.ceil(len(names) / (2 * members)), 1), _BATCH, max(_BATCH_BYTES // max(largest, 1), 1))
        return [_Batch(list(names[i : i + size])) for i in range(0, len(names), size)]

    @staticmethod
    def _kept(loaded: Loaded) -> _FleetNetwork:
        assert isinstance(loaded, _FleetNetwork)
        return loaded

    def _submit(
        self,
        member: FleetMember,
        batch: _Batch,
        networks: Mapping[str, Loaded],
        rules: MeasuringRules,
        limit: float,
        earlier: Mapping[str, Samples],
    ) -> Any:
        self._batches += 1
        kept = {name: self._kept(networks[name]) for name in batch.names}
        _log.info("%s measures %d networks.", member, len(kept))
        return self.fleet.submit(
            member,
            tasks.measure_batch,
            member.resource,
            self.target.precision,
            self.target.threads,
            {name: (network.artefact, network.inputs) for name, network in kept.items()},
            asdict(rules),
            limit,
            self.reference.seconds,
            {name: on_worker.pack_samples(samples) for name, samples in earlier.items()},
            self._seed + self._batches,
        )

    def _note(self, disturbed: str | None, member: FleetMember) -> None:
        if disturbed and isinstance(self.target.remote_device, _FleetDevice):
            self.target.remote_device.disturbed = f"on {member.name} {disturbed}"

    @staticmethod
    def _lost(future: Any, batch: _Batch, member: FleetMember) -> None:
        """Count a lost board or a task that Dask gave up; any other failure is an error."""
        problem = future.exception() if future.status == "error" else None
        future.cancel()
        if problem is not None and type(problem).__name__ != "KilledWorker":
            raise MeasurementError(f"{member} failed: {type(problem).__name__}: {one_line(problem)}") from problem
        batch.losses += 1
        if batch.losses >= _LOSSES:
            raise MeasurementError(
                f"{batch.losses} boards were lost while they measured the same {len(batch.names)} networks. See the "
                f"log of {member}: the networks may need more memory than it has."
            )


class FleetTarget(Target):
    """All boards of one type."""

    artefact = "onnx"
    bench_class = FleetBench
    runtime = "fleet"

    def __init__(self, fleet: Fleet, board_type: BoardType) -> None:
        resource = next(iter(board_type.members.values())).resource
        super().__init__(resource.partition("/")[2], precision=fleet.precision, threads=fleet.threads)
        self.fleet, self.board_type, self.resource = fleet, board_type, resource
        self.estimated = board_type.about["estimated"]
        self.remote_device = _FleetDevice(board_type)

    def load(self, artefact: bytes, inputs: tuple[Any, ...]) -> Loaded:
        """Keep the ONNX file for a board.

        Outputs are computed on this computer, if ONNX Runtime is installed.
        """
        outputs = None
        if find_spec("onnxruntime"):
            here = resolve("onnxruntime/cpu", precision=self.precision)
            outputs = lambda: here.load(artefact, inputs).outputs()  # type: ignore[misc]  # noqa: E731
        return _FleetNetwork(_nothing, outputs=outputs, artefact=artefact, inputs=on_worker.pack_inputs(inputs))

    def known_grid(self) -> int | None:
        """Return the grid of the boards' target."""
        found = self.board_type.about["grid"]
        return None if found is None else int(found)

    @property
    def name(self) -> str:
        """The resource that the boards declare."""
        return self.resource

    @property
    def title(self) -> str:
        """The title of the boards' target."""
        return self.board_type.title


class SlowFleetTarget(FleetTarget):
    """Boards whose runtime compiles for seconds when it loads a network."""

    slow_to_load = True


def _next(queue: deque[_Batch], member: FleetMember, members: int) -> _Batch | None:
    """Return the next batch, preferably one that this board has not tried, since it may be disturbed."""
    for batch in queue:
        if member.address not in batch.seen or len(batch.seen) >= members:
            queue.remove(batch)
            return batch
    return None


def _failed(batch: _Batch, member: FleetMember, text: str, members: int) -> None:
    batch.errors.append(text)
    batch.seen.add(member.address)
    if len(batch.errors) >= min(2, members):
        raise MeasurementError(f"{member} cannot measure. {text}")
    _log.warning("%s cannot measure (%s); another board will try.", member, text)
