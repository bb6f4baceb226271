"""The local process that is connected to an agent."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from importlib import resources
from typing import Any

from dsa_hw.utils.text import one_line
from profilers.remote import agent

__all__ = ["BOOTSTRAP", "Channel", "LostError", "RefusedError"]

# Runs on the board before its Python version is known: old syntax, one line, no single quotes.
BOOTSTRAP = (
    "import sys; "
    'sys.version_info < (3, 8) and sys.exit("dsa-hw-agent: python %d.%d is too old" % sys.version_info[:2]); '
    "size = int(sys.stdin.buffer.readline()); "
    'exec(compile(sys.stdin.buffer.read(size), "agent.py", "exec"))'
)
Json = dict[str, Any]

_GREETING_LIMIT = 2**16  # bytes that a login script may print before the agent starts


class LostError(Exception):
    """The process ended or does not answer.

    It has the exit status (None: no answer) and the end of its standard error.
    """

    def __init__(self, status: int | None, text: str) -> None:
        super().__init__(f"exit status {status}: {text}")
        self.status, self.text = status, text


class RefusedError(Exception):
    """The agent refused a request: the kind of refusal, and its text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Channel:
    """A running ``command`` that is connected to an agent.

    The agent must start within ``limit`` seconds.
    """

    def __init__(self, command: Sequence[str], limit: float) -> None:
        # In a session of its own, so that Ctrl-C reaches only us and we close the connection properly.
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._errors: deque[str] = deque(maxlen=30)
        self._frames: queue.SimpleQueue[tuple[Json, bytes] | str | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._listen, self._collect)]
        for thread in self._threads:
            thread.start()
        try:
            source = resources.files(__package__).joinpath("agent.py").read_bytes()
            self._write(str(len(source)).encode() + b"\n" + source)
            if self._next(limit) != "hello":
                raise self._lost()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Id of the local process."""
        return self._process.pid

    def exchange(self, header: Json, payload: bytes = b"", limit: float = 60.0) -> tuple[Json, bytes]:
        """Send one request and return its reply.

        Args:
            header: The request.
            payload: Raw bytes that belong to it.
            limit: Seconds within which the agent must answer.

        Raises:
            RefusedError: The agent refuses the request.
            LostError: No answer comes.
        """
        assert self._process.stdin is not None
        try:
            agent.write_frame(self._process.stdin, {**header, "limit": limit}, payload)  # type: ignore[arg-type]
        except OSError as error:
            raise self._lost() from error
        reply = self._next(limit + 10)
        if not isinstance(reply, tuple):
            raise self._lost()
        if "refused" in reply[0]:
            raise RefusedError(one_line(reply[0]["refused"], 20), one_line(reply[0].get("text", "")))
        return reply

    def close(self) -> None:
        """Close the input, which ends the agent; terminate the process if it does not end."""
        process = self._process
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        for end in (None, process.terminate, process.kill):
            if end is not None:
                end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
                break
        for thread in self._threads:
            thread.join(2)
        for stream in (process.stdout, process.stderr):
            if stream is not None and not any(t.is_alive() for t in self._threads):
                stream.close()

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError as error:
            raise self._lost() from error

    def _next(self, limit: float) -> tuple[Json, bytes] | str | None:
        try:
            return self._frames.get(timeout=limit)
        except queue.Empty:
            raise LostError(None, f"no answer for {limit:.0f} s") from None

    def _lost(self) -> LostError:
        try:
            status: int | None = self._process.wait(5)
        except subprocess.TimeoutExpired:
            status = None
        self._threads[1].join(1)  # the rest of its standard error
        return LostError(status, "\n".join(self._errors))

    def _listen(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        try:
            seen = b""
            while not seen.endswith(agent.BANNER):
                byte = stream.read(1)
                if not byte or len(seen) > _GREETING_LIMIT:
                    break
                seen += byte
            else:
                self._frames.put("hello")
                while (frame := agent.read_frame(stream)) is not None:  # type: ignore[arg-type]
                    self._frames.put(frame)
        except (OSError, ValueError) as error:
            self._errors.append(f"invalid answer: {one_line(error)}")
        self._frames.put(None)

    def _collect(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stderr:
                self._errors.append(line[:500].decode(errors="replace").rstrip())
