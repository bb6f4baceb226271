"""The members of a fleet, grouped by type of board.

Boards have the same type if their environments are equal (processor, runtime, versions, flags) and their controls take
equally long. Boards of one model can still differ (a missing heat sink, a weak power supply); then they get different
types, and their measurements are not mixed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsa_hw.errors import MeasurementError, ProfileError
from dsa_hw.utils.text import one_line
from profilers.fleet import tasks
from profilers.measuring import environment as environments

__all__ = ["BoardType", "Fleet", "FleetMember", "controls_agree", "group_by_type"]

_log = logging.getLogger(__name__)

_CONTROL = 2.0  # seconds for which a new member runs its control
_UPDATE_EVERY = 0.5  # seconds between updates of the members
_MARK = "fleet control"  # in the environment of a type: the control of its first board


@dataclass(frozen=True)
class FleetMember:
    """A worker of the fleet with one of its resources.

    ``about`` is the description that it returned.
    """

    address: str
    resource: str
    name: str
    about: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return f"{self.name} ({self.resource} at {self.address})"


@dataclass(eq=False)
class BoardType:
    """Boards that measure alike.

    ``environment`` has the control (s) of its first board, which identifies the type.
    """

    environment: dict[str, str]
    control: float
    about: Mapping[str, Any]
    members: dict[tuple[str, str], FleetMember] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The target of its members."""
        return str(self.about["title"])

    def __str__(self) -> str:
        return f"{self.title}, control {1e3 * self.control:.4g} ms"


def controls_agree(a: float, b: float, tolerance: float) -> bool:
    """Return whether two controls (s) are equal within ``tolerance``."""
    return max(a, b) <= min(a, b) * (1 + tolerance)


def group_by_type(
    members: Sequence[FleetMember], environments_known: Sequence[Mapping[str, str]], tolerance: float
) -> list[BoardType]:
    """Group members by type.

    Types of an earlier run (environments of the store) are continued.

    Args:
        members: The members, with their descriptions.
        environments_known: Environments of the store.
        tolerance: Largest relative difference between controls of one type.

    Returns:
        The types, the fastest first.
    """
    board_types: list[BoardType] = []
    for member in sorted(members, key=lambda b: float(b.about["control"])):
        board_type = _matching_type(member, board_types, tolerance)
        if board_type is None:
            board_type = _stored_type(member, environments_known, tolerance) or _new_type(member)
            board_types.append(board_type)
        board_type.members[(member.address, member.resource)] = member
    return board_types


def _matching_type(member: FleetMember, board_types: Sequence[BoardType], tolerance: float) -> BoardType | None:
    control = float(member.about["control"])
    fitting = [
        board_type
        for board_type in board_types
        if _unmarked(board_type.environment) == member.about["environment"]
        and controls_agree(board_type.control, control, tolerance)
    ]
    return min(fitting, key=lambda board_type: abs(board_type.control - control), default=None)


def _stored_type(member: FleetMember, known: Sequence[Mapping[str, str]], tolerance: float) -> BoardType | None:
    earlier = [BoardType(dict(e), float(e[_MARK]), member.about) for e in known if _MARK in e]
    return _matching_type(member, earlier, tolerance)


def _new_type(member: FleetMember) -> BoardType:
    control = float(member.about["control"])
    return BoardType({**member.about["environment"], _MARK: f"{control:.6g}"}, float(f"{control:.6g}"), member.about)


def _unmarked(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key != _MARK}


class Fleet:
    """The workers of a scheduler that declare a resource.

    It may be used from several threads.

    Args:
        client: A Dask client.
        wanted: The resource, e.g. "onnxruntime/cpu"; "auto/cpu" is every runtime on the CPU, "auto/any" everything.
        precision: "fp32" or "fp16".
        threads: CPU threads of one run.
        reset: Whether boards forget the stored reference of their control.
    """

    def __init__(self, client: Any, wanted: str, precision: str, threads: int, *, reset: bool = False) -> None:
        self.client, self.wanted, self.precision, self.threads = client, wanted, precision, threads
        self.board_types: list[BoardType] = []
        self.stop = threading.Event()
        self._reset = reset
        self._lock = threading.Lock()
        self._pending: dict[FleetMember, Any] = {}
        self._seen: set[FleetMember] = set()
        self._updated = 0.0

    def discover(self, known: Sequence[Mapping[str, str]], tolerance: float) -> list[BoardType]:
        """Describe every member and group them by type.

        Args:
            known: Environments of the store.
            tolerance: Largest relative difference between controls of one type.

        Returns:
            The types, the fastest first.

        Raises:
            ProfileError: No worker declares the resource.
            MeasurementError: No member can measure.
        """
        self._tolerance = tolerance
        present = self._present()
        if not present:
            raise self._no_member()
        self._request_descriptions(present)
        members: list[FleetMember] = []
        while self._pending:
            time.sleep(0.05)
            members += self._described(self._present())
        if not members:
            raise MeasurementError(f"No board of the fleet can measure {self.wanted}; see the warnings above.")
        self.board_types = group_by_type(members, known, tolerance)
        for board_type in self.board_types[1:]:
            reason = environments.differences(
                _unmarked(self.board_types[0].environment), _unmarked(board_type.environment)
            )
            names = ", ".join(member.name for member in board_type.members.values())
            _log.warning(
                "%s is not of the type %s: %s",
                names,
                self.board_types[0],
                reason or f"its control differs: {board_type}",
            )
        return self.board_types

    def update(self) -> None:
        """Remove members that are gone, and add new ones to their type."""
        with self._lock:
            if time.monotonic() - self._updated < _UPDATE_EVERY:
                return
            self._updated = time.monotonic()
            present = self._present()
            for board_type in self.board_types:
                for place, member in list(board_type.members.items()):
                    if member not in present:
                        del board_type.members[place]
                        self._seen.discard(member)
                        _log.warning("%s is gone; other boards measure its configurations.", member)
            self._request_descriptions(present)
            for member in self._described(present):
                joined = _matching_type(member, self.board_types, self._tolerance)
                if joined is None:
                    control = f"control {1e3 * member.about['control']:.4g} ms"
                    _log.warning("%s (%s) has a new type; run the command again to profile it.", member, control)
                else:
                    joined.members[(member.address, member.resource)] = member
                    _log.info("%s has the type %s.", member, joined)

    def _present(self) -> set[FleetMember]:
        try:
            # Not client.scheduler_info, whose workers a concurrent heartbeat may remove.
            workers = self.client.sync(self.client.scheduler.identity, n_workers=-1)["workers"]
        except (OSError, TimeoutError, RuntimeError) as error:
            raise MeasurementError(
                f"The scheduler of the fleet does not answer ({one_line(error)}). All measurements so far are stored: "
                "start it, and run the same command again."
            ) from error
        self._workers = workers
        return {
            FleetMember(address, resource, str(info.get("name", address)))
            for address, info in workers.items()
            for resource in info.get("resources", {})
            if self._matches(resource)
        }

    def _matches(self, resource: str) -> bool:
        runtime, slash, device = resource.partition("/")
        wanted_runtime, _, wanted_device = self.wanted.partition("/")
        return bool(slash) and wanted_runtime in ("auto", runtime) and ((wanted_device or "cpu") in ("any", device))

    def _request_descriptions(self, present: set[FleetMember]) -> None:
        for member in present - self._seen - set(self._pending):
            arguments = (member.resource, self.precision, self.threads, _CONTROL, self._reset)
            self._pending[member] = self.submit(member, tasks.describe, *arguments)

    def submit(self, member: FleetMember, function: Any, *arguments: Any) -> Any:
        """Call ``function`` on one member, which runs one task at a time."""
        return self.client.submit(
            function,
            *arguments,
            workers=[member.address],
            resources={member.resource: 1},
            allow_other_workers=False,
            pure=False,
        )

    def _described(self, present: set[FleetMember]) -> list[FleetMember]:
        """Return members whose description arrived."""
        found = []
        for member, future in list(self._pending.items()):
            if member not in present:
                del self._pending[member]
                future.cancel()
                _log.warning("%s disappeared before it was described.", member)
            elif future.done():
                del self._pending[member]
                self._seen.add(member)
                problem = future.exception() if future.status != "finished" else None
                about = {"error": f"{type(problem).__name__}: {problem}"} if problem else future.result()
                if "error" in about:
                    _log.warning("%s is not used: %s", member, about["error"])
                    continue
                self._warn(member, about)
                found.append(FleetMember(member.address, member.resource, member.name, about))
        return found

    def _warn(self, member: FleetMember, about: Mapping[str, Any]) -> None:
        if about["watched"] and about["estimated"] is None:
            _log.warning(
                "%s runs Dask's profiler, which disturbs measurements. Start it with "
                "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED=False.",
                member,
            )
        if int(self._workers[member.address].get("nthreads", 1)) > 1:
            _log.warning(
                "%s has several threads, whose tasks would disturb each other. Start it with --nthreads 1.", member
            )

    def _no_member(self) -> ProfileError:
        declared = sorted({r for info in self._workers.values() for r in info.get("resources", {})})
        name = self.wanted if not self.wanted.startswith("auto") and "any" not in self.wanted else "onnxruntime/cpu"
        return ProfileError(
            f"No worker of the fleet declares {self.wanted}: there are {len(self._workers)} workers, which declare "
            f"{', '.join(declared) or 'nothing'}. Start workers with dask worker SCHEDULER --nthreads 1 --resources "
            f'"{name}=1"'
        )
