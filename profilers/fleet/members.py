"""Who is in a fleet, and which boards are of a kind.

Boards are of one kind where their environments are equal (processor, runtime, versions, flags) and the control takes
them equally long. Two boards of a type can still be unlike (a heat sink that fell off, a tired power supply): then they
are kept apart, and their measurements do not mix.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsa_hw.errors import MeasurementError, ProfileError
from profilers.fleet import tasks
from profilers.measuring import environment as environments

__all__ = ["Board", "Fleet", "Kind", "like", "sort_into_kinds"]

_log = logging.getLogger(__name__)

_CONTROL = 2.0  # seconds of control at the first meeting
_GLANCE = 0.5  # seconds between looks at who is there
_MARK = "fleet control"  # in the environment of a kind: the control of the board that founded it


@dataclass(frozen=True)
class Board:
    """A worker of the fleet with one of its resources; ``about`` is how it introduced itself."""

    address: str
    resource: str
    name: str
    about: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return f"{self.name} ({self.resource} at {self.address})"


@dataclass(eq=False)
class Kind:
    """Boards that are alike. ``environment`` names the control (s) of its founder, by which the kind is found again."""

    environment: dict[str, str]
    control: float
    about: Mapping[str, Any]
    boards: dict[tuple[str, str], Board] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The target of its boards."""
        return str(self.about["title"])

    def __str__(self) -> str:
        return f"{self.title}, control {1e3 * self.control:.4g} ms"


def like(a: float, b: float, tolerance: float) -> bool:
    """Whether two controls (s) are equal within ``tolerance``."""
    return max(a, b) <= min(a, b) * (1 + tolerance)


def sort_into_kinds(
    boards: Sequence[Board], environments_known: Sequence[Mapping[str, str]], tolerance: float
) -> list[Kind]:
    """Kinds of ``boards``; those of an earlier run (environments of the store) are continued."""
    kinds: list[Kind] = []
    for board in sorted(boards, key=lambda b: float(b.about["control"])):
        kind = _home(board, kinds, tolerance)
        if kind is None:
            kind = _continued(board, environments_known, tolerance) or _founded(board)
            kinds.append(kind)
        kind.boards[(board.address, board.resource)] = board
    return kinds


def _home(board: Board, kinds: Sequence[Kind], tolerance: float) -> Kind | None:
    control = float(board.about["control"])
    fitting = [
        kind
        for kind in kinds
        if _unmarked(kind.environment) == board.about["environment"] and like(kind.control, control, tolerance)
    ]
    return min(fitting, key=lambda kind: abs(kind.control - control), default=None)


def _continued(board: Board, known: Sequence[Mapping[str, str]], tolerance: float) -> Kind | None:
    earlier = [Kind(dict(e), float(e[_MARK]), board.about) for e in known if _MARK in e]
    return _home(board, earlier, tolerance)


def _founded(board: Board) -> Kind:
    control = float(board.about["control"])
    return Kind({**board.about["environment"], _MARK: f"{control:.6g}"}, float(f"{control:.6g}"), board.about)


def _unmarked(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key != _MARK}


class Fleet:
    """The workers behind a scheduler that declare ``wanted`` ("onnxruntime/cpu"; "auto/cpu" is every runtime on it,
    "auto/any" everything). Several threads may ask."""

    def __init__(self, client: Any, wanted: str, precision: str, threads: int, *, reset: bool = False) -> None:
        self.client, self.wanted, self.precision, self.threads = client, wanted, precision, threads
        self.kinds: list[Kind] = []
        self.stop = threading.Event()
        self._reset = reset
        self._lock = threading.Lock()
        self._meeting: dict[Board, Any] = {}
        self._met: set[Board] = set()
        self._looked = 0.0

    def meet(self, known: Sequence[Mapping[str, str]], tolerance: float) -> list[Kind]:
        """Introduce every board that is there, and sort them into kinds."""
        self._tolerance = tolerance
        present = self._present()
        if not present:
            raise self._nobody()
        self._welcome(present)
        boards: list[Board] = []
        while self._meeting:
            time.sleep(0.05)
            boards += self._introduced(self._present())
        if not boards:
            raise MeasurementError(f"no board of the fleet can measure {self.wanted}; the warnings above say why")
        self.kinds = sort_into_kinds(boards, known, tolerance)
        for kind in self.kinds[1:]:
            reason = environments.differences(_unmarked(self.kinds[0].environment), _unmarked(kind.environment))
            names = ", ".join(board.name for board in kind.boards.values())
            _log.warning("%s kept apart from %s: %s", names, self.kinds[0], reason or f"its control is unlike: {kind}")
        return self.kinds

    def look(self) -> None:
        """Drop boards that are gone; let new ones join their kind."""
        with self._lock:
            if time.monotonic() - self._looked < _GLANCE:
                return
            self._looked = time.monotonic()
            present = self._present()
            for kind in self.kinds:
                for place, board in list(kind.boards.items()):
                    if board not in present:
                        del kind.boards[place]
                        self._met.discard(board)
                        _log.warning("%s is gone; its configurations go to other boards", board)
            self._welcome(present)
            for board in self._introduced(present):
                kind_ = _home(board, self.kinds, self._tolerance)
                if kind_ is None:
                    control = f"control {1e3 * board.about['control']:.4g} ms"
                    _log.warning("%s (%s) is of no kind in this run; run again for a profile of it", board, control)
                else:
                    kind_.boards[(board.address, board.resource)] = board
                    _log.info("%s joins %s", board, kind_)

    def _present(self) -> set[Board]:
        try:
            # Not client.scheduler_info: a heartbeat that comes in between would leave it without workers.
            workers = self.client.sync(self.client.scheduler.identity, n_workers=-1)["workers"]
        except (OSError, TimeoutError, RuntimeError) as error:
            raise MeasurementError(
                f"the scheduler of the fleet does not answer ({error}); what was measured is stored: start it, and run "
                "the same command again"
            ) from error
        self._workers = workers
        return {
            Board(address, resource, str(info.get("name", address)))
            for address, info in workers.items()
            for resource in info.get("resources", {})
            if self._matches(resource)
        }

    def _matches(self, resource: str) -> bool:
        runtime, slash, device = resource.partition("/")
        wanted_runtime, _, wanted_device = self.wanted.partition("/")
        return bool(slash) and wanted_runtime in ("auto", runtime) and ((wanted_device or "cpu") in ("any", device))

    def _welcome(self, present: set[Board]) -> None:
        for board in present - self._met - set(self._meeting):
            arguments = (board.resource, self.precision, self.threads, _CONTROL, self._reset)
            self._meeting[board] = self.submit(board, tasks.introduce, *arguments)

    def submit(self, board: Board, function: Any, *arguments: Any) -> Any:
        """Have ``board`` call ``function``: nobody else may, and it does one thing at a time."""
        return self.client.submit(
            function,
            *arguments,
            workers=[board.address],
            resources={board.resource: 1},
            allow_other_workers=False,
            pure=False,
        )

    def _introduced(self, present: set[Board]) -> list[Board]:
        """Boards whose introduction is done."""
        found = []
        for board, future in list(self._meeting.items()):
            if board not in present:
                del self._meeting[board]
                future.cancel()
                _log.warning("%s went away before it could introduce itself", board)
            elif future.done():
                del self._meeting[board]
                self._met.add(board)
                problem = future.exception() if future.status != "finished" else None
                about = {"error": f"{type(problem).__name__}: {problem}"} if problem else future.result()
                if "error" in about:
                    _log.warning("%s is left out: %s", board, about["error"])
                    continue
                self._advise(board, about)
                found.append(Board(board.address, board.resource, board.name, about))
        return found

    def _advise(self, board: Board, about: Mapping[str, Any]) -> None:
        if about["watched"] and about["estimated"] is None:
            _log.warning(
                "%s runs Dask's own profiler, which disturbs what is measured; start it with "
                "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED=False",
                board,
            )
        if int(self._workers[board.address].get("nthreads", 1)) > 1:
            _log.warning("%s has several threads; start it with --nthreads 1, it shall do one thing at a time", board)

    def _nobody(self) -> ProfileError:
        declared = sorted({r for info in self._workers.values() for r in info.get("resources", {})})
        name = self.wanted if not self.wanted.startswith("auto") and "any" not in self.wanted else "onnxruntime/cpu"
        return ProfileError(
            f"no worker of the fleet declares {self.wanted}: there are {len(self._workers)} workers, which declare "
            f"{', '.join(declared) or 'nothing'}; start workers with dask worker SCHEDULER --nthreads 1 --resources "
            f'"{name}=1"'
        )
