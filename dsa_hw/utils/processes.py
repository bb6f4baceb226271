"""Child processes that may hang or print without end.

Every read and write has a deadline, and nothing that a process prints is kept without a limit.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsa_hw.utils.text import one_line

__all__ = ["EndedError", "FloodError", "Output", "PipedProcess", "StalledError", "run_bounded"]

_BLOCK = 2**16
_GRACE = 2.0  # seconds that a process gets to end by itself


class StalledError(Exception):
    """The process did not read or write in time."""


class EndedError(Exception):
    """The process ended, or closed the pipe."""


class FloodError(Exception):
    """The process wrote more than is accepted."""


class PipedProcess:
    """A process whose standard input, output and error are pipes.

    It is not thread-safe. Standard error is read while the other two are waited for; its last ``error_bytes`` bytes are
    kept. Between two calls the process may fill its pipes, and then waits.

    Args:
        command: The program and its arguments.
        environment: Environment variables; those of this process if None.
        error_bytes: How much of standard error is kept.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, error_bytes: int = 2**14
    ) -> None:
        # In a session of its own: Ctrl-C reaches only us, and its children can be ended with it.
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if environment is None else dict(environment),
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._input, self._output, self._errors = self._process.stdin, self._process.stdout, self._process.stderr
        for stream in (self._input, self._output, self._errors):
            os.set_blocking(stream.fileno(), False)
        self._error_bytes = error_bytes
        self._error_tail = b""
        self._unread = bytearray()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    @property
    def error_text(self) -> str:
        """The end of its standard error."""
        self._read_errors()
        return self._error_tail.decode(errors="replace")

    def write(self, data: bytes, deadline: float) -> None:
        """Write all of ``data``.

        Args:
            data: The bytes.
            deadline: When to give up, by `time.monotonic`.

        Raises:
            StalledError: The process does not read.
            EndedError: It closed its input.
        """
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._input.fileno(), view) :]
            except BlockingIOError:
                self._wait(self._input.fileno(), selectors.EVENT_WRITE, deadline)
            except (OSError, ValueError) as error:
                raise EndedError("it closed its input") from error

    def read(self, size: int, deadline: float) -> bytes:
        """Read exactly ``size`` bytes of standard output; errors as of `write`."""
        while len(self._unread) < size:
            self._read_more(deadline)
        found = bytes(self._unread[:size])
        del self._unread[:size]
        return found

    def read_until(self, end: bytes, limit: int, deadline: float) -> bytes:
        """Read standard output up to and including ``end``.

        Args:
            end: The last bytes to read.
            limit: Most bytes that are accepted.
            deadline: When to give up, by `time.monotonic`.

        Raises:
            FloodError: ``end`` is not among the first ``limit`` bytes.
            StalledError: The process does not write.
            EndedError: It closed its output.
        """
        start = 0
        while (place := self._unread.find(end, start, limit)) < 0:
            if len(self._unread) >= limit:
                raise FloodError(f"it wrote more than {limit} bytes")
            start = max(len(self._unread) - len(end) + 1, 0)
            self._read_more(deadline)
        return self.read(place + len(end), deadline)

    def ended(self, seconds: float) -> int | None:
        """Return the exit status, for which ``seconds`` are waited; None if it still runs.

        What it still prints to standard error is read.
        """
        end = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < end:
            self._read_errors()
            time.sleep(0.01)
        self._read_errors()
        return self._process.returncode

    def close(self, grace: float = _GRACE) -> None:
        """Close its input and wait for its end; then end it and its children.

        Args:
            grace: Seconds that it gets to end by itself, and again after a signal to terminate; 0 kills at once.
        """
        with contextlib.suppress(OSError):
            self._input.close()
        if not grace:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, number)
            if self.ended(grace if number != signal.SIGKILL else 5.0) is not None:
                break
        for stream in (self._output, self._errors):
            with contextlib.suppress(OSError):
                stream.close()

    def _read_more(self, deadline: float) -> None:
        while True:
            try:
                block = self._output.read(_BLOCK)
            except (OSError, ValueError) as error:
                raise EndedError("it closed its output") from error
            if block is not None:
                break
            self._wait(self._output.fileno(), selectors.EVENT_READ, deadline)
        if not block:
            raise EndedError("it closed its output")
        self._unread += block

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        """Wait until a pipe is ready; read standard error meanwhile."""
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, event)
            if not self._errors.closed:
                selector.register(self._errors, selectors.EVENT_READ)
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StalledError("it does not answer" if event == selectors.EVENT_READ else "it does not read")
                ready = {key.fd for key, _ in selector.select(left)}
                if not self._errors.closed and self._errors.fileno() in ready and not self._read_errors():
                    selector.unregister(self._errors)
                    self._errors.close()
                if descriptor in ready:
                    return

    def _read_errors(self) -> bool:
        """Read what is there of standard error, at most some blocks; return whether more may come."""
        for _ in range(16):
            try:
                block = self._errors.read(_BLOCK)
            except (OSError, ValueError):
                return False
            if not block:
                return block is None
            self._error_tail = (self._error_tail + block)[-self._error_bytes :]
        return True


@dataclass(frozen=True)
class Output:
    """What a command printed, and its exit status."""

    status: int
    stdout: str
    stderr: str


def run_bounded(command: Sequence[str], *, limit: float, most: int = 2**20) -> Output:
    """Run a command without input.

    Args:
        command: The program and its arguments.
        limit: Seconds after which it is ended.
        most: Most bytes of standard output that are accepted; of standard error the last ``most`` bytes are kept.

    Returns:
        Its exit status and what it printed, with invalid bytes replaced.

    Raises:
        StalledError: It did not end in time.
        FloodError: It printed too much.
        OSError: It cannot be started.
    """
    deadline = time.monotonic() + limit
    process = PipedProcess(command, error_bytes=most)
    finished = False
    try:
        process._input.close()
        found = bytearray()
        with contextlib.suppress(EndedError):
            while True:
                process._read_more(deadline)
                found += process._unread
                process._unread.clear()
                if len(found) > most:
                    raise FloodError(f"{one_line(command[0], 60)} printed more than {most} bytes")
        status = process.ended(max(deadline - time.monotonic(), 0.0))
        if status is None:
            raise StalledError(f"{one_line(command[0], 60)} did not end within {limit:g} s")
        finished = True
        return Output(status, found.decode(errors="replace"), process.error_text)
    finally:
        process.close(_GRACE if finished else 0.0)
