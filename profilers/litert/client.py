"""Call LiteRT and Vela in an environment of their own.

Their packages conflict with those of dsa_hw. ``dsa-hw setup ethos-u`` creates the environment in the user's cache
folder. A `Worker` is one process in it. Requests and answers are JSON lines on its standard input and output; arrays
and networks are files in a temporary folder. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import weakref
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from dsa_hw.errors import MeasurementError, MissingDependencyError, ModelError
from dsa_hw.utils.files import cache_folder

__all__ = ["PACKAGES", "Worker", "environment_folder", "python_of", "versions"]

PACKAGES = ("litert-torch==0.10.0", "ai-edge-quantizer==0.10.0", "ai-edge-litert==2.3.0", "ethos-u-vela==5.2.0")
"""What the environment contains, in tested versions; the same as the extra ``ethos-u``."""

_COMMAND = "dsa-hw setup ethos-u"


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
        self._log = self.folder / "worker.log"
        self._process: subprocess.Popen[str] | None = None
        self._names = 0

    @property
    def pid(self) -> int | None:
        """Id of the process; None if it does not run."""
        return None if self._process is None else self._process.pid

    def path(self, suffix: str) -> Path:
        """Return a new file name in the folder."""
        self._names += 1
        return self.folder / f"{self._names}{suffix}"

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send one request and return its answer.

        Raises:
            ModelError: The network is not supported.
            MeasurementError: The worker fails or ends.
        """
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:
            process.kill()  # a late answer would be mistaken for that of the next request
            self.close()
            raise
        try:
            answer = json.loads(line)
            assert isinstance(answer, dict)
        except (ValueError, AssertionError) as error:
            self.close()
            what = f"answered {line[:80]!r}" if line else "ended"
            raise MeasurementError(
                f"The LiteRT worker {what} at request {do!r}. End of its log: {self._log_end()}"
            ) from error
        if "refused" in answer:
            raise ModelError(str(answer["refused"]))
        if "done" not in answer:
            raise MeasurementError(
                f"The LiteRT worker failed at request {do!r}: {answer.get('failed')}. End of its log: {self._log_end()}"
            )
        return dict(answer["done"])

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            versions()
            script = Path(__file__).parent / "worker" / "service.py"
            with self._log.open("ab") as log:
                process = subprocess.Popen(
                    [str(python_of(environment_folder())), str(script), str(self.folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**_clean(), "PYTHONNOUSERSITE": "1"},
                    start_new_session=True,  # Ctrl-C must not reach the worker, which ends with its input
                )
            weakref.finalize(self, _end, process)
            self._process = process
        return self._process

    def _log_end(self) -> str:
        with contextlib.suppress(OSError):
            lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
            return " ".join(lines[-3:])[-300:] or "empty"
        return "empty"


def _clean() -> dict[str, str]:
    """Return our environment variables without those that add packages to Python's path."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def _end(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()  # the worker ends when its input does
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
