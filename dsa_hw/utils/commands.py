"""One way to run a command: errors on one line, exit codes, signals and closed pipes."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import re
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from dsa_hw.errors import DsaError
from dsa_hw.utils.files import cache_folder, write_text
from dsa_hw.utils.text import one_line

__all__ = ["TerminatedError", "run_command", "terminate"]

_log = logging.getLogger(__name__)

_UNEXPECTED = 1
_INTERRUPTED = 130  # as a shell reports SIGINT
_TERMINATED = 143  # and SIGTERM


class TerminatedError(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C: work is saved and temporary files are removed."""


def terminate(number: int, frame: Any) -> None:
    """Raise `TerminatedError`; the handler of SIGTERM while a command runs."""
    raise TerminatedError


def run_command(
    prog: str,
    run: Callable[[], int | None],
    *,
    verbose: bool = False,
    quiet: bool = False,
    as_json: bool = False,
    out: Path | None = None,
    again: str = "Repeat the command to continue.",
) -> int:
    """Run a command and report its errors on standard error, each on one line.

    The traceback of an unexpected error is written to a file in the cache folder or a temporary one.

    Args:
        prog: The command as it was typed; it begins every error message.
        run: Does the work and returns an exit code; None stands for 0.
        verbose: Log the traceback of an error.
        quiet: Log errors only.
        as_json: Also print an error as a JSON object on standard output.
        out: The file or folder from which an interrupted command continues; None where nothing is kept.
        again: How to continue, in a sentence.

    Returns:
        The exit code: that of ``run``, of the error, 1 for an unexpected error, 130 for Ctrl-C or 143 for SIGTERM.
    """
    level = logging.INFO if verbose else logging.ERROR if quiet else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", handlers=[_StandardError()])
    if verbose or quiet:  # an outer command may have configured it already
        logging.getLogger().setLevel(level)
    try:
        with _sigterm_raises():
            code = int(run() or 0)
            sys.stdout.flush()  # a closed pipe fails here, not when the interpreter ends
            return code
    except DsaError as error:
        if verbose:
            _log.exception(prog)
        return _failed(prog, one_line(error, 2000), error.exit_code, as_json)
    except KeyboardInterrupt as error:
        ended = "Terminated" if isinstance(error, TerminatedError) else "Interrupted"
        during = next((f" during the stage {one_line(note)!r}" for note in getattr(error, "__notes__", ())), "")
        is_kept = out is not None and out.exists()
        kept = f"Finished work is in {out}. {again}" if is_kept else "Nothing was kept."
        code = _TERMINATED if isinstance(error, TerminatedError) else _INTERRUPTED
        _say("")  # a new line, below ^C
        return _failed(prog, f"{ended}{during}. {kept}", code, as_json)
    except Exception as error:
        gone = _lost_output()
        if gone and isinstance(error, BrokenPipeError):
            return 0  # the reader of a pipe was closed: `dsa-hw inspect | head`
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            # Files of ours are written by `dsa_hw.utils.files`, whose errors say which.
            where = one_line(error.filename or "standard output or a temporary file (TMPDIR)")
            return _failed(prog, f"Cannot write {where}: {one_line(error.strerror)}.", DsaError.exit_code, False)
        if verbose:
            _log.exception(prog)
        where = _write_traceback(prog, error)
        text = f"Unexpected {type(error).__name__}: {one_line(error, 500).rstrip('.')}. {where}"
        return _failed(prog, f"{text} Please report it with the command.", _UNEXPECTED, as_json and not gone)


def _failed(prog: str, message: str, code: int, as_json: bool) -> int:
    """Print why a command failed, in the one form that all errors have, and return its exit code."""
    if as_json:
        with contextlib.suppress(OSError, ValueError):
            print(json.dumps({"error": message, "exit_code": code}), flush=True)
    _say(f"{prog}: {message}")
    return code


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what is standard error at the moment, also while a progress display stands in for it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Standard error."""
        return sys.stderr


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise `TerminatedError`, if nothing else handles it; only the main thread may set a handler."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _lost_output() -> bool:
    """Return whether standard output cannot be written; then discard what is left for it."""
    try:
        sys.stdout.flush()
        # Python discards what a closed pipe did not take, so that flushing again succeeds. Ask the pipe.
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            return False
    except (io.UnsupportedOperation, AttributeError):  # not a file; Windows has no poll
        return False
    except (OSError, ValueError):  # ValueError: closed
        pass
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _write_traceback(prog: str, error: Exception) -> str:
    """Write the traceback to a file and return a sentence that names it."""
    text = "".join(traceback.format_exception(error))
    name = re.sub(r"[^a-z0-9]+", "-", prog.lower()).strip("-")
    name = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    reason: object = ""
    for is_cache in (True, False):
        try:
            folder = cache_folder() / "tracebacks" if is_cache else Path(tempfile.mkdtemp(prefix="dsa-hw-"))
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, f"{prog}\n{text}")
        except (DsaError, OSError) as failed:
            reason = failed
        else:
            return f"The traceback is in {path}."
    return f"The traceback cannot be written ({one_line(reason)})."


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads standard error any more
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
