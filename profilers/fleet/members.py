"""The members of a fleet, grouped by type of board.

Boards have the same type if their environments are equal (processor, runtime, versions, flags). Boards of one type can
still differ in speed (a missing heat sink, a weak power supply). Every board compares networks with its own runs of the
dense network, so that their ratios can be combined; see `profilers.fleet.bench`.
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
from profilers.fleet.answers import checked_description
from profilers.measuring import environment as environments

__all__ = ["BoardType", "Fleet", "FleetMember", "group_by_type"]

_log = logging.getLogger(__name__)

_UPDATE_EVERY = 0.5  # seconds between updates of the members
_DESCRIBE = 300.0  # seconds within which a board must describe itself; it imports torch for that
_SCHEDULER = 30.0  # seconds within which the scheduler must answer


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
    """Boards with equal environments.

    Attributes:
        environment: Their environment.
        about: The description that the first of them returned.
        members: The boards, by address and resource.
        name: The title of their target, with what tells them from other types of the same title.
    """

    environment: dict[str, str]
    about: Mapping[str, Any]
    members: dict[tuple[str, str], FleetMember] = field(default_factory=dict)
    name: str = ""

    @property
    def title(self) -> str:
        """The title of their target."""
        return str(self.about["title"])

    def __str__(self) -> str:
        return self.name or self.title


def group_by_type(members: Sequence[FleetMember]) -> list[BoardType]:
    """Group members by their environment; return the types with distinct names, sorted by the name of a member."""
    board_types: list[BoardType] = []
    for member in sorted(members, key=lambda m: (m.name, m.address, m.resource)):
        board_type = _matching_type(member, board_types)
        if board_type is None:
            board_type = BoardType(dict(member.about["environment"]), member.about)
            board_types.append(board_type)
        board_type.members[(member.address, member.resource)] = member
    for title in {board_type.title for board_type in board_types}:
        _name([board_type for board_type in board_types if board_type.title == title])
    return board_types


def _matching_type(member: FleetMember, board_types: Sequence[BoardType]) -> BoardType | None:
    return next((t for t in board_types if t.environment == member.about["environment"]), None)


def _name(board_types: Sequence[BoardType]) -> None:
    """Name types of one title by the first parts of the environment that tell them apart."""
    parts: list[list[str]] = [[] for _ in board_types]
    for key in dict.fromkeys(key for board_type in board_types for key in board_type.environment):
        values = [board_type.environment.get(key, "absent") for board_type in board_types]
        if len(set(map(tuple, parts))) < len(parts) and len(set(values)) > 1:
            for part, value in zip(parts, values, strict=True):
                part.append(f"{key} {value}")
    for board_type, part in zip(board_types, parts, strict=True):
        board_type.name = ", ".join([board_type.title, *part])


class Fleet:
    """The workers of a scheduler that declare a resource.

    It may be used from several threads.

    Args:
        client: A Dask client.
        wanted: The resource, e.g. "onnxruntime/cpu"; "auto/cpu" is every runtime on the CPU, "auto/any" everything.
        precision: "fp32" or "fp16".
        threads: CPU threads of one run.
    """

    def __init__(self, client: Any, wanted: str, precision: str, threads: int) -> None:
        self.client, self.wanted, self.precision, self.threads = client, wanted, precision, threads
        self.board_types: list[BoardType] = []
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._pending: dict[FleetMember, tuple[Any, float]] = {}  # with the time by which it must be there
        self._seen: set[FleetMember] = set()
        self._updated = 0.0

    def discover(self) -> list[BoardType]:
        """Describe every member and return their types.

        Raises:
            ProfileError: No worker declares the resource.
            MeasurementError: No member can measure.
        """
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
        self.board_types = group_by_type(members)
        for board_type in self.board_types[1:]:
            reason = environments.differences(self.board_types[0].environment, board_type.environment)
            names = ", ".join(member.name for member in board_type.members.values())
            _log.warning("%s is not of the type %s: %s", names, self.board_types[0], reason)
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
                joined = _matching_type(member, self.board_types)
                if joined is None:
                    _log.warning("%s has a new type; run the command again to profile it.", member)
                else:
                    joined.members[(member.address, member.resource)] = member
                    _log.info("%s has the type %s.", member, joined)

    def ban(self, member: FleetMember, reason: str) -> None:
        """Do not use a member again; it stays in the fleet."""
        with self._lock:
            for board_type in self.board_types:
                board_type.members.pop((member.address, member.resource), None)
        _log.warning("%s is not used any more: %s.", member, reason)

    def _present(self) -> set[FleetMember]:
        try:
            # Not client.scheduler_info, whose workers a concurrent heartbeat may remove.
            found = self.client.sync(self.client.scheduler.identity, n_workers=-1, callback_timeout=_SCHEDULER)
            workers = {str(address): _checked_worker(info) for address, info in found["workers"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise MeasurementError(f"The scheduler of the fleet sent an invalid answer ({one_line(error)}).") from error
        except (OSError, TimeoutError, RuntimeError) as error:
            raise MeasurementError(
                f"The scheduler of the fleet does not answer ({one_line(error)}). All measurements so far are stored: "
                "start it, and run the same command again."
            ) from error
        self._workers = workers
        return {
            FleetMember(address, resource, info["name"] or address)
            for address, info in workers.items()
            for resource in info["resources"]
            if self._matches(resource)
        }

    def _matches(self, resource: str) -> bool:
        runtime, slash, device = resource.partition("/")
        wanted_runtime, _, wanted_device = self.wanted.partition("/")
        return bool(slash) and wanted_runtime in ("auto", runtime) and ((wanted_device or "cpu") in ("any", device))

    def _request_descriptions(self, present: set[FleetMember]) -> None:
        for member in present - self._seen - set(self._pending):
            arguments = (member.resource, self.precision, self.threads)
            self._pending[member] = self.submit(member, tasks.describe, *arguments), time.monotonic() + _DESCRIBE

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
        for member, (future, due) in list(self._pending.items()):
            if member not in present:
                del self._pending[member]
                future.cancel()
                _log.warning("%s disappeared before it was described.", member)
            elif future.done():
                del self._pending[member]
                self._seen.add(member)
                problem = future.exception() if future.status != "finished" else None
                try:
                    failed = {"error": f"{type(problem).__name__}: {one_line(problem)}"}
                    about = checked_description(failed if problem else future.result())
                except MeasurementError as error:
                    _log.warning("%s is not used: %s", member, error)
                    continue
                self._warn(member, about)
                found.append(FleetMember(member.address, member.resource, member.name, about))
            elif time.monotonic() > due:
                del self._pending[member]
                self._seen.add(member)
                future.cancel()
                _log.warning("%s is not used: it did not describe itself within %g s.", member, _DESCRIBE)
        return found

    def _warn(self, member: FleetMember, about: Mapping[str, Any]) -> None:
        if about["watched"] and about["estimated"] is None:
            _log.warning(
                "%s runs Dask's profiler, which disturbs measurements. Start it with "
                "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED=False.",
                member,
            )
        if self._workers[member.address]["nthreads"] > 1:
            _log.warning(
                "%s has several threads, whose tasks would disturb each other. Start it with --nthreads 1.", member
            )

    def _no_member(self) -> ProfileError:
        declared = sorted({r for info in self._workers.values() for r in info["resources"]})
        name = self.wanted if not self.wanted.startswith("auto") and "any" not in self.wanted else "onnxruntime/cpu"
        return ProfileError(
            f"No worker of the fleet declares {self.wanted}: there are {len(self._workers)} workers, which declare "
            f"{', '.join(declared) or 'nothing'}. Start workers with dask worker SCHEDULER --nthreads 1 --resources "
            f'"{name}=1"'
        )


def _checked_worker(info: Any) -> dict[str, Any]:
    """Return name, resources and threads of a worker, as the scheduler knows them; text on one line."""
    return {
        "name": one_line(info.get("name", ""), 100),
        "resources": [one_line(resource, 100) for resource in info.get("resources", {})],
        "nthreads": int(info.get("nthreads", 1)),
    }
