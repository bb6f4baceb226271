"""The local process that is connected to an agent.

A request and its answer have one deadline, for writing as well as for reading. Nothing of what a board sends is kept
without a limit: an answer is read when it is expected, and no further than the caller allows.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from importlib import resources
from typing import Any

from dsa_hw.errors import DsaError
from dsa_hw.utils.documents import parse_json
from dsa_hw.utils.processes import EndedError, FloodError, PipedProcess, StalledError
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
_HEADER_LIMIT = 2**20
_DEPTH = 8  # of the JSON of an answer
_GRACE = 10.0  # seconds after the limit of a request; until then the agent ends itself


class LostError(Exception):
    """The process ended, does not answer, or sends something else than answers.

    Attributes:
        status: The exit status; None if it still runs.
        text: The end of its standard error, or what is wrong.
        late: Whether the time limit of a request was exceeded.
    """

    def __init__(self, status: int | None, text: str, late: bool = False) -> None:
        super().__init__(text if status is None else f"exit status {status}: {text}")
        self.status, self.text, self.late = status, text, late


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
        self._numbers = itertools.count(1)
        self._stuck = False  # whether it does not answer properly: then it will not end by itself either
        self._process = PipedProcess(command)
        begin = time.monotonic()
        try:
            source = resources.files(__package__).joinpath("agent.py").read_bytes()
            self._process.write(str(len(source)).encode() + b"\n" + source, begin + limit)
            self._process.read_until(agent.BANNER, _GREETING_LIMIT, begin + limit)
        except (EndedError, FloodError, StalledError) as error:
            lost = self._lost(error, limit, begin)
            self.close()
            raise lost from error
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Id of the local process."""
        return self._process.pid

    def exchange(self, header: Json, payload: bytes = b"", limit: float = 60.0, most: int = 0) -> tuple[Json, bytes]:
        """Send one request and return its reply.

        Args:
            header: The request.
            payload: Raw bytes that belong to it.
            limit: Seconds within which the agent must answer.
            most: Most bytes that may belong to the reply.

        Raises:
            RefusedError: The agent refuses the request.
            LostError: No answer comes, or not one to this request. The channel cannot be used any more.
        """
        begin, number = time.monotonic(), next(self._numbers)
        deadline = begin + limit + _GRACE
        try:
            request = agent.frame({**header, "id": number, "limit": limit}, payload)
            self._process.write(request, deadline)
            size, extra = agent.LENGTHS.unpack(self._process.read(agent.LENGTHS.size, deadline))
            if size > _HEADER_LIMIT or extra > most:
                raise FloodError(f"an answer of {size} + {extra} bytes")
            text, data = self._process.read(size, deadline), self._process.read(extra, deadline)
            reply = parse_json(text, "the answer", max_bytes=_HEADER_LIMIT, max_depth=_DEPTH)
        except (EndedError, FloodError, StalledError, DsaError) as error:
            raise self._lost(error, limit, begin) from error
        if not isinstance(reply, dict) or type(reply.get("id")) is not int or reply["id"] != number:
            self._stuck = True
            raise LostError(None, "invalid answer: it does not belong to the request")
        if "refused" in reply:
            raise RefusedError(one_line(reply["refused"], 20), one_line(reply.get("text", "")))
        return reply, data

    def close(self) -> None:
        """Close the input, which ends the agent; terminate the process if it does not end."""
        if self._stuck:
            self._process.close(0.0)
        else:
            self._process.close()

    def _lost(self, error: Exception, limit: float, begin: float) -> LostError:
        self._stuck = not isinstance(error, EndedError)
        if isinstance(error, StalledError):
            return LostError(None, f"no answer for {time.monotonic() - begin:.0f} s", late=True)
        if not isinstance(error, EndedError):
            return LostError(None, f"invalid answer: {one_line(error)}")
        late = time.monotonic() - begin >= limit
        status = self._process.ended(5.0)
        return LostError(status, self._process.error_text.strip(), late)
