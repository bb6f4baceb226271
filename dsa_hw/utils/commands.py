"""One way to run a command: errors on one line, exit codes, interrupts and closed pipes."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from dsa_hw.errors import DsaError
from dsa_hw.utils.text import one_line

__all__ = ["run_command"]

_log = logging.getLogger(__name__)


def run_command(prog: str, run: Callable[[], int | None], *, verbose: bool = False, out: Path | None = None) -> int:
    """Run a command and report its errors on standard error.

    Args:
        prog: The command as it was typed; it begins every error message.
        run: Does the work and returns an exit code; None stands for 0.
        verbose: Log the traceback of an error.
        out: The file or folder from which an interrupted command continues; None where nothing is kept.

    Returns:
        The exit code: that of ``run``, of the error, or 130 for an interrupt.
    """
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s")
    try:
        code = int(run() or 0)
        sys.stdout.flush()  # a closed pipe fails here, not when the interpreter ends
        return code
    except DsaError as error:
        if verbose:
            _log.exception(prog)
        sys.stderr.write(f"{prog}: {one_line(error, 2000)}\n")
        return error.exit_code
    except BrokenPipeError:  # the reader of a pipe was closed: `dsa-hw inspect | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        kept = "Nothing was kept." if out is None else f"Finished work is in {out}. Repeat the command to continue."
        sys.stderr.write(f"\n{prog}: Interrupted. {kept}\n")  # a new line, below the progress bar and ^C
        return 130
