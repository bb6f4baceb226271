"""Text for messages: single lines, percentages, and lists of accepted names."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

__all__ = ["first_line", "json_text", "one_line", "percent", "printable", "unknown_name"]


def one_line(text: object, limit: int = 300) -> str:
    """Return ``text`` on one line of at most ``limit`` characters, without control characters.

    An exception without a message gives the name of its class.

    >>> one_line("cannot read\\n  the file")
    'cannot read the file'
    """
    line = " ".join(str(text).split())
    if not line and isinstance(text, BaseException):
        line = type(text).__name__
    line = printable(line)
    return line if len(line) <= limit else line[: limit - 3] + "..."


def printable(text: str) -> str:
    """Return ``text`` with a question mark for each control character, which could change what a terminal shows.

    >>> printable("\x1b[2J MET")
    '?[2J MET'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def first_line(error: BaseException) -> str:
    """Return the first line of the message of ``error``, without its full stop, as part of another message.

    >>> first_line(RuntimeError("Shapes do not match.\\nWhile executing conv2d"))
    'Shapes do not match'
    """
    return one_line(str(error).strip().partition("\n")[0] or type(error).__name__).rstrip(". ")


def percent(share: float, digits: int = 1) -> str:
    """Format a share as a percentage.

    >>> percent(0.0153)
    '1.5%'
    """
    return f"{100 * share:.{digits}f}%"


def json_text(content: Any) -> str:
    """Return plain data as JSON, with null for NaN and infinity, which JSON does not have.

    >>> json_text({"low": 1.5, "high": float("inf")})
    '{\\n "low": 1.5,\\n "high": null\\n}'
    """
    return json.dumps(_finite(content), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def unknown_name(what: str, name: str, available: Iterable[str], plural: str | None = None) -> str:
    """Return the message for a name that is not among the available ones.

    >>> unknown_name("method", "dsaa", ["dsa", "uniform"])
    "Unknown method 'dsaa'. Did you mean 'dsa'? Available methods: dsa, uniform."
    """
    names = sorted(available)
    close = get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"Unknown {what} {name!r}.{hint} Available {plural or f'{what}s'}: {', '.join(names)}."
