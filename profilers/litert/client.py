"""Call LiteRT and Vela in an environment of their own.

Their packages conflict with those of dsa_hw. ``dsa-hw setup ethos-u`` creates the environment in the user's cache
folder. A `Worker` is one process in it. Requests and answers are JSON lines on its standard input and output; arrays
and networks are files in a temporary folder. Nothing is pickled. Every request has a time limit, and answers have a
limited size and depth.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from dsa_hw.errors import DsaError, MeasurementError, MissingDependencyError, ModelError
from dsa_hw.utils.documents import parse_json
from dsa_hw.utils.files import cache_folder
from dsa_hw.utils.processes import EndedError, FloodError, PipedProcess, StalledError
from dsa_hw.utils.text import one_line

__all__ = ["PACKAGES", "Worker", "environment_folder", "invalid_answer", "python_of", "versions"]

PACKAGES = ("litert-torch==0.10.0", "ai-edge-quantizer==0.10.0", "ai-edge-litert==2.3.0", "ethos-u-vela==5.2.0")
"""What the environment contains, in tested versions; the same as the extra ``ethos-u``."""

_COMMAND = "dsa-hw setup ethos-u"
_START = 300.0  # seconds for the process to start: its imports take some on a slow disk
_LIMIT = 600.0  # seconds for a request
_CONVERT = 3600.0  # converting a large network takes minutes
_ANSWER = 2**24  # bytes of an answer at most: 500,000 times
_DEPTH = 16


def environment_folder() -> Path:
    """Return the folder of the environment; it need not exist."""
    return cache_folder() / "environments" / "ethos-u"


def python_of(folder: Path) -> Path:
    """Return the Python interpreter of the environment in ``folder``."""
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def versions() -> dict[str, str]:
    """Return the versions of `PACKAGES` and torch in the environment.

    Raises:
        MissingDependencyError: The environment does not exist or is incomplete; the message has the command to create
            it.
    """
    folder = environment_folder()
    if not python_of(folder).exists():
        raise MissingDependencyError(
            f"LiteRT and Vela need an environment of their own, which does not exist in {folder}. Create it with: "
            f"{_COMMAND} (some minutes, about 2 GB)"
        )
    wanted = {package.partition("==")[0] for package in PACKAGES} | {"torch"}
    places = [*folder.glob("lib/python*/site-packages"), *folder.glob("Lib/site-packages")]
    found = {str(d.name).lower(): d.version for d in distributions(path=[str(p) for p in places])}
    if missing := sorted(wanted - found.keys()):
        raise MissingDependencyError(
            f"The environment in {folder} lacks {', '.join(missing)}. Create it again with: {_COMMAND} --again"
        )
    return {name: found[name] for name in sorted(wanted)}


class Worker:
    """One process in the environment.

    The first request starts it, and it ends with this object.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dsa-hw-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        self._process: PipedProcess | None = None
        self._forgotten: list[str] = []
        self._names = 0

    @property
    def pid(self) -> int | None:
        """Id of the process; None if it does not run."""
        return None if self._process is None else self._process.pid

    def path(self, suffix: str) -> Path:
        """Return a new file name in the folder."""
        self._names += 1
        return self.folder / f"{self._names}{suffix}"

    def forget(self, name: str) -> None:
        """Let the process free what was loaded from a file, with the next request."""
        self._forgotten.append(name)

    def ask(self, do: str, *, limit: float | None = None, **request: Any) -> dict[str, Any]:
        """Send one request and return its answer, whose content is not checked.

        Args:
            do: The request, a method of `profilers.litert.worker.service.Service`.
            limit: Seconds within which the worker must answer; None for the default of the request.
            request: Its arguments.

        Raises:
            ModelError: The network is not supported.
            MeasurementError: The worker fails, ends, does not answer in time, or answers with something else.
        """
        limit = limit or (_CONVERT if do == "convert" else _LIMIT)
        deadline = time.monotonic() + limit + (_START if self._process is None else 0.0)
        process = self._started()
        forgotten, self._forgotten[:] = self._forgotten[:], []
        try:
            text = json.dumps({"do": do, "forgotten": forgotten, **request}, allow_nan=False)
            process.write(text.encode() + b"\n", deadline)
            line = process.read_until(b"\n", _ANSWER, deadline)
            answer = _checked(line)
        except (DsaError, EndedError, FloodError, StalledError) as error:
            late = isinstance(error, StalledError)
            if isinstance(error, EndedError):
                process.ended(5.0)
            log = _log_end(process)
            self.close(at_once=True)
            what = f"did not answer within {limit:g} s" if late else "ended"
            if isinstance(error, (DsaError, FloodError)):
                what = f"sent an invalid answer ({one_line(error, 200)})"
            raise MeasurementError(f"The LiteRT worker {what} at request {do!r}. End of its log: {log}") from error
        except BaseException:
            self.close(at_once=True)  # a late answer would be mistaken for that of the next request
            raise
        if "refused" in answer:
            raise ModelError(one_line(answer["refused"], 1000))
        if "failed" in answer:
            raise MeasurementError(
                f"The LiteRT worker failed at request {do!r}: {one_line(answer['failed'])}. End of its log: "
                f"{_log_end(process)}"
            )
        return dict(answer["done"])

    def close(self, *, at_once: bool = False) -> None:
        """End the process; ``at_once`` does not wait for it to end by itself."""
        process, self._process = self._process, None
        if process is not None:
            process.close(0.0 if at_once else 5.0)

    def _started(self) -> PipedProcess:
        if self._process is None:
            versions()
            script = Path(__file__).parent / "worker" / "service.py"
            process = PipedProcess(
                [str(python_of(environment_folder())), str(script), str(self.folder)],
                environment={**_clean(), "PYTHONNOUSERSITE": "1"},
            )
            weakref.finalize(self, process.close)
            self._process = process
        return self._process


def invalid_answer(do: str, what: str) -> MeasurementError:
    """Return the error for an answer of the worker that does not match the request ``do``."""
    return MeasurementError(f"The LiteRT worker sent an invalid answer to request {do!r}: {what}. Please report this.")


def _checked(line: bytes) -> Mapping[str, Any]:
    """Return an answer with one of the fields done, refused and failed."""
    answer = parse_json(line, "its answer", max_bytes=_ANSWER, max_depth=_DEPTH)
    if not isinstance(answer, dict) or len(answer) != 1:
        raise MeasurementError(f"it is {one_line(line[:80].decode(errors='replace'))!r}")
    ((kind, content),) = answer.items()
    if {"done": dict, "refused": str, "failed": str}.get(kind) is not type(content):
        raise MeasurementError(f"it is {one_line(line[:80].decode(errors='replace'))!r}")
    return answer


def _log_end(process: PipedProcess) -> str:
    lines = [line for line in process.error_text.splitlines() if line.strip()]
    return one_line(" ".join(lines[-3:])[-300:]) or "empty"


def _clean() -> dict[str, str]:
    """Return our environment variables without those that add packages to Python's path."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
