"""A type of board as a target, and the bench of its boards.

The profiling job is the same as on one device; only loading and measuring differ. Loading a network keeps its ONNX
file. Measuring divides the networks into batches, each of which is measured by one idle board together with the dense
network.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np

from dsa_hw.errors import MeasurementError
from dsa_hw.utils.arrays import Floats
from dsa_hw.utils.text import one_line
from profilers.fleet import on_worker, tasks
from profilers.fleet.answers import checked_batch
from profilers.fleet.members import BoardType, Fleet, FleetMember
from profilers.measuring.bench import DENSE, Bench, Enough, OnRound
from profilers.measuring.measurement import Measurement, Samples
from profilers.measuring.rules import MeasuringRules
from profilers.measuring.statistics import order_of, quantile
from profilers.networks.loaded import Loadable
from profilers.targets import Loaded, Target, resolve

__all__ = ["FleetBench", "FleetTarget", "SlowFleetTarget"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_BATCH = 8  # networks that a board measures in turns; a lost board costs the time of one batch
_BATCH_BYTES = 2**28  # largest message
_PATIENCE = 60.0  # seconds to wait for a board when none is left
_LATE = (
    1800.0  # seconds that a batch may take longer than twice its time: networks are loaded, and measured at least once
)
_LOSSES = 3  # lost boards after which a batch is given up
_ALIKE = 0.1  # relative difference of the dense network's time between boards of one type that is not reported
_SITTINGS = 10**6  # batches of a sitting at most; their numbers must differ from those of other sittings


@dataclass(frozen=True, eq=False)
class _FleetNetwork(Loaded):
    artefact: bytes = b""
    inputs: list[tuple[str, list[int], bytes]] = field(default_factory=list)


def _nothing() -> None:
    raise MeasurementError("A network of a fleet runs on its boards, not on this computer.")


class _FleetDevice:
    """The state of the boards; they measure batches, never single steps."""

    def __init__(self, board_type: BoardType) -> None:
        self._board_type = board_type
        self.disturbed: str | None = None

    def sequence(self, steps: Sequence[tuple[Loaded, int]]) -> list[Floats]:
        raise MeasurementError("A board of a fleet measures batches, not single steps.")

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
    measured: bool = False
    seen: set[str] = field(default_factory=set)
    losses: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Task:
    """A batch that a board measures now.

    Its runs must have the sitting ``expected``, and be there when `time.monotonic` is ``due``.
    """

    member: FleetMember
    batch: _Batch
    expected: int
    due: float


class _Work:
    """What one call of `FleetBench.measure` distributes; a network is built when it is sent for the first time.

    Args:
        networks: Networks by name.
        dense: The dense network.
        sitting: The number of the call's sitting.
        end: When to stop, by the clock of the bench.
        keep: Takes the runs that a board made.
    """

    def __init__(
        self,
        networks: Mapping[str, Loadable],
        dense: Loadable,
        sitting: int,
        end: float,
        keep: Callable[[FleetMember, dict[str, Samples]], None],
    ) -> None:
        self.sitting, self.end, self.keep = sitting, end, keep
        self._networks = {**networks, DENSE: dense}
        self._content: dict[str, on_worker.Content] = {}

    def content(self, name: str) -> on_worker.Content:
        """Return a network as it is sent."""
        if name not in self._content:
            loaded = self._networks[name].load()
            assert isinstance(loaded, _FleetNetwork)
            self._content[name] = (loaded.artefact, loaded.inputs)
        return self._content[name]


class FleetBench(Bench):
    """A bench that measures on all boards of a type.

    A board measures a batch of networks as a bench of its own does, each run between two runs of the dense network.
    Every batch is a sitting, since it is measured by another process.
    """

    def __init__(self, target: FleetTarget, **options: Any) -> None:
        super().__init__(target, **{**options, "environment": target.board_type.environment})
        self.fleet, self.board_type = target.fleet, target.board_type
        self._seed = int(options.get("seed", 0))
        self._batches = 0
        self._unequal: set[str] = set()

    def measure(
        self,
        networks: Mapping[str, Loadable],
        dense: Loadable,
        *,
        limit: float = 60.0,
        earlier: Mapping[str, Samples] | None = None,
        sitting: int = 0,
        on_round: OnRound | None = None,
        enough: Enough | None = None,
        rules: MeasuringRules | None = None,
    ) -> dict[str, Measurement]:
        """Measure as `Bench.measure` does; every network is measured at least once.

        Args:
            networks: Networks by name.
            dense: The network that every run is compared with.
            limit: Seconds after which no network is measured for a second time.
            earlier: Runs of the same environment that are counted in, by name; those of the dense network as `DENSE`.
            sitting: Number of this sitting; the sittings of its batches have numbers that follow from it.
            on_round: Called with all runs of a batch that a board measured.
            enough: Asked after 2, 4, 8, ... blocks of every network whether to stop.
            rules: The rules of measuring; those of the bench if None.

        Returns:
            A measurement of each network and of the dense one.
        """
        rules = rules or self.rules
        parts = {name: [earlier[name]] if earlier and name in earlier else [] for name in (DENSE, *networks)}
        speeds: dict[str, list[Floats]] = {}

        def judged(look: int = 1) -> dict[str, Measurement]:
            return self.judged({name: Samples.joined(p) for name, p in parts.items()}, rules, look)

        def unfinished(names: Iterable[str]) -> list[str]:
            found = judged()
            return [name for name in names if not found[name].finished]

        def keep(member: FleetMember, new: dict[str, Samples]) -> None:
            speeds.setdefault(member.name, []).append(new[DENSE].values)
            if self.target.estimated is not None and parts[DENSE]:
                del new[DENSE]  # every board computes the same
            for name, samples in new.items():
                parts[name].append(samples)
            if on_round is not None:
                on_round(new)

        def rest_of(names: Sequence[str]) -> MeasuringRules:
            have = min(Samples.joined(parts[name]).blocks for name in names)
            fewest, most = (max(blocks - have, 1) for blocks in (rules.least_blocks, rules.most_blocks))
            return replace(rules, least_blocks=fewest, most_blocks=most)

        names, end = list(networks) or [DENSE], self._clock() + limit
        work = _Work(networks, dense, sitting, end, keep)
        if enough is None or self.target.estimated is not None:
            self._distribute(work, unfinished(names), rest_of, unfinished)
            self._compare(speeds)
            return judged()
        look, blocks = 1, 0
        while True:
            more = max(2**look, rules.least_blocks, blocks + 1) - blocks
            self._distribute(work, names, _always(replace(rules, least_blocks=more, most_blocks=more)), _always([]))
            blocks += more
            found = judged(look)
            if self._clock() >= end or enough(found):
                self._compare(speeds)
                return found
            look += 1

    def _distribute(
        self,
        work: _Work,
        names: Sequence[str],
        rules_of: Callable[[Sequence[str]], MeasuringRules],
        unfinished: Callable[[Sequence[str]], list[str]],
    ) -> None:
        """Let the boards measure networks until none is unfinished or the time is over.

        Args:
            work: The networks, and what becomes of their runs.
            names: The networks to measure.
            rules_of: Returns the rules for a batch.
            unfinished: Returns the networks of a measured batch that need more runs.
        """
        queue = deque(self._cut(work, names))
        running: dict[Any, _Task] = {}
        alone = self._clock()
        try:
            while queue or running:
                if self.fleet.stop.is_set():
                    raise KeyboardInterrupt
                self.fleet.update()
                members = list(self.board_type.members.values())
                busy = {task.member for task in running.values()}
                alone = self._clock() if members else alone
                if not members and self._clock() - alone > _PATIENCE:
                    raise MeasurementError(
                        f"No board of {self.board_type} is left, and none came back within {_PATIENCE:.0f} s. All "
                        "measurements so far are stored: start workers, and run the same command again."
                    )
                left = max(work.end - self._clock(), 0.0)
                if not left:
                    queue = deque(batch for batch in queue if not batch.measured)
                for member in members:
                    if member not in busy and (batch := _next(queue, member, len(members))) is not None:
                        share = left / math.ceil((len(queue) + 1) / len(members))
                        future, task = self._submit(member, batch, work, rules_of(batch.names), share)
                        running[future] = task
                present = set(self.board_type.members.values())
                for future, task in list(running.items()):
                    member, batch = task.member, task.batch
                    if future.done() and future.status == "finished":
                        del running[future]
                        try:
                            samples, busiest = checked_batch(future.result(), {DENSE, *batch.names}, task.expected)
                        except MeasurementError as error:
                            _failed(batch, member, str(error), len(members))
                            queue.append(batch)
                            continue
                        self._note(busiest, member)
                        work.keep(member, self._numbered(samples))
                        batch.seen.add(member.address)
                        batch.measured, batch.names = True, unfinished(batch.names)
                        if batch.names:
                            queue.append(batch)
                    elif future.done() or member not in present or time.monotonic() > task.due:
                        del running[future]
                        if member in present and not future.done():  # it still works on the batch
                            self.fleet.ban(member, "it did not finish a batch in time")
                        self._lost(future, batch, member)
                        queue.appendleft(batch)
                time.sleep(0.02)
        finally:
            for future in running:
                future.cancel()

    def _cut(self, work: _Work, names: Sequence[str]) -> list[_Batch]:
        """Divide networks into equal batches, at least two for each board, to limit delays by slow ones."""
        members = max(len(self.board_type.members), 1)
        largest = max((len(work.content(name)[0]) for name in names), default=1)
        size = min(max(math.ceil(len(names) / (2 * members)), 1), _BATCH, max(_BATCH_BYTES // max(largest, 1), 1))
        return [_Batch(list(names[i : i + size])) for i in range(0, len(names), size)]

    def _submit(
        self, member: FleetMember, batch: _Batch, work: _Work, rules: MeasuringRules, limit: float
    ) -> tuple[Any, _Task]:
        self._batches += 1
        _log.info("%s measures %d networks.", member, len(batch.names))
        sitting = work.sitting * _SITTINGS + self._batches
        expected = sitting if self.target.estimated is None else 0  # computed times belong to no sitting
        task = _Task(member, batch, expected, time.monotonic() + 2 * limit + _LATE)
        future = self.fleet.submit(
            member,
            tasks.measure_batch,
            member.resource,
            self.target.precision,
            self.target.threads,
            {name: work.content(name) for name in batch.names if name != DENSE},
            work.content(DENSE),
            asdict(rules),
            limit,
            sitting,
            self._seed + self._batches,
        )
        return future, task

    def _numbered(self, runs: Mapping[str, Samples]) -> dict[str, Samples]:
        """Return the runs of a batch, with blocks that no other batch has; every board counts them from 0."""
        first = self._blocks
        self._blocks += 1 + max(int(samples.block.max(initial=0)) for samples in runs.values())
        return {name: replace(samples, block=samples.block + first) for name, samples in runs.items()}

    def _compare(self, speeds: Mapping[str, Sequence[Floats]]) -> None:
        """Warn of boards of one type whose dense networks differ in time."""
        seconds = {name: quantile(np.concatenate(runs), order_of("quiet")) for name, runs in speeds.items()}
        if not seconds or max(seconds.values()) <= (1 + _ALIKE) * min(seconds.values()) or self._unequal >= {*seconds}:
            return
        self._unequal |= {*seconds}
        listed = sorted(seconds.items(), key=lambda item: item[1])
        _log.warning(
            "Boards of the type %s differ in speed by more than %s. The dense network takes %s. Ratios to the dense "
            "network are combined, and times are means over the boards. Check clock rate, cooling and power supply.",
            self.board_type,
            f"{_ALIKE:.0%}",
            ", ".join(f"{1e3 * value:.4g} ms on {name}" for name, value in listed),
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


def _always(value: _T) -> Callable[[Sequence[str]], _T]:
    return lambda names: value


def _next(queue: deque[_Batch], member: FleetMember, members: int) -> _Batch | None:
    """Return the next batch that this board has not tried, or any that every board has tried."""
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
