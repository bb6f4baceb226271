"""Packages that cannot live beside ours, called in an environment of their own.

``dsa-hw setup ethos-u`` makes it, in the user's cache folder (or ``DSA_HW_HOME``). A `Worker` is one process there:
JSON lines over its standard input and output, arrays and networks as files in a folder of its own. No pickle crosses.
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

__all__ = ["PACKAGES", "Worker", "environment_folder", "python_of", "versions"]

PACKAGES = ("litert-torch==0.10.0", "ai-edge-quantizer==0.10.0", "ai-edge-litert==2.3.0", "ethos-u-vela==5.2.0")
"""What goes into the environment, in the versions that this code was run with; the same as the extra ``ethos-u``."""

_COMMAND = "dsa-hw setup ethos-u"


def environment_folder() -> Path:
    """Where the environment is, or will be."""
    if home := os.environ.get("DSA_HW_HOME"):
        base = Path(home)
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home()) / "dsa_hw"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches" / "dsa_hw"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsa_hw"
    return base / "environments" / "ethos-u"


def python_of(folder: Path) -> Path:
    """The interpreter of the environment in ``folder``."""
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def versions() -> dict[str, str]:
    """Versions of `PACKAGES` and torch in the environment; `MissingDependencyError` with the command that makes it."""
    folder = environment_folder()
    if not python_of(folder).exists():
        raise MissingDependencyError(
            f"LiteRT and Vela live in an environment of their own, and there is none in {folder}; make it with "
            f"{_COMMAND} (some minutes, about 2 GB)"
        )
    wanted = {package.partition("==")[0] for package in PACKAGES} | {"torch"}
    places = [*folder.glob("lib/python*/site-packages"), *folder.glob("Lib/site-packages")]
    found = {str(d.name).lower(): d.version for d in distributions(path=[str(p) for p in places])}
    if missing := sorted(wanted - found.keys()):
        raise MissingDependencyError(
            f"the environment in {folder} lacks {', '.join(missing)} (an installation that was interrupted?); make it "
            f"again with {_COMMAND} --again"
        )
    return {name: found[name] for name in sorted(wanted)}


class Worker:
    """One process in the environment, started by the first request and ended with this object."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dsa-hw-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        self._log = self.folder / "worker.log"
        self._process: subprocess.Popen[str] | None = None
        self._names = 0

    @property
    def pid(self) -> int | None:
        """The process, if it runs."""
        return None if self._process is None else self._process.pid

    def path(self, suffix: str) -> Path:
        """A new file name in the folder."""
        self._names += 1
        return self.folder / f"{self._names}{suffix}"

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """One request, and its answer.

        `ModelError` where the network cannot be done, `MeasurementError` where the worker fails or dies.
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
            process.kill()  # it may be busy for long, and its answer would be taken for that of the next request
            self.close()
            raise
        try:
            answer = json.loads(line)
            assert isinstance(answer, dict)
        except (ValueError, AssertionError) as error:
            self.close()
            what = f"answered {line[:80]!r}" if line else "ended"
            raise MeasurementError(
                f"the worker {what} when asked to {do}; its last words: {self._last_words()}"
            ) from error
        if "refused" in answer:
            raise ModelError(str(answer["refused"]))
        if "done" not in answer:
            raise MeasurementError(f"the worker could not {do}: {answer.get('failed')}; {self._last_words()}")
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
                    start_new_session=True,  # Ctrl-C is for us; the worker ends with its input
                )
            weakref.finalize(self, _end, process)
            self._process = process
        return self._process

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
            return " ".join(lines[-3:])[-300:] or "none"
        return "none"


def _clean() -> dict[str, str]:
    """Our environment variables without those that would bring our packages along."""
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
