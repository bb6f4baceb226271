"""JSON files from anywhere: parsed within limits, checked against a schema, sealed by a checksum.

A file is data. It may come from a stranger, from a broken disk or from another version of this program, so whatever it
contains, reading it either gives a checked object or raises one typed error whose message is one line:

    class Technology(Document):
        remedy = "See docs/reference/costs.md."
        mac: float = Field(ge=0)

    found = read_document("my_chip.json", Technology)

`SealedDocument` adds a SHA-256 over the content. It detects damage and editing by hand; it is not a signature.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, NoReturn, TypeVar, get_args

import pydantic
from pydantic import ConfigDict, Field

from dsa_hw.errors import DsaError, FileError
from dsa_hw.utils.text import one_line

__all__ = [
    "MAX_BYTES",
    "Document",
    "Line",
    "SealedDocument",
    "check_seal",
    "parse_json",
    "read_bytes",
    "read_document",
    "read_json",
    "sealed",
]

MAX_BYTES: Final = 64 * 2**20
"""Largest file that is read: the cost model of a network with 200 channel groups has less than 10 MiB."""

# A string, also one that is not closed: brackets in it do not count. Possessive, so that the time is linear.
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_INTEGERS: Final = 2**63  # NumPy, SQLite and other languages read 64-bit integers

Line = Annotated[str, Field(max_length=4000, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]*$")]
"""Text that is printed: without control characters, with which a file could write to other lines of a terminal."""

_Schema = TypeVar("_Schema", bound="Document")


class Document(pydantic.BaseModel):
    """A JSON object with known fields: types are exact, numbers are finite, unknown fields are refused.

    Subclasses list the fields with their ranges (``Field(gt=0)``). Where a field ``format: Literal["..."]`` exists, it
    is compared first, so that a file of another kind or version is called that.

    Attributes:
        remedy: A sentence for error messages: how to make a correct file.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    remedy: ClassVar[str] = ""


class SealedDocument(Document):
    """A document with a checksum of its content; `read_document` refuses one that was damaged or edited."""

    sha256: str = Field(pattern="^[0-9a-f]{64}$")


def parse_json(
    data: bytes, what: str, *, max_bytes: int = MAX_BYTES, max_depth: int = 64, error: type[DsaError] = FileError
) -> Any:
    """Parse JSON that may be damaged or hostile.

    Args:
        data: The bytes.
        what: What they are, for messages, e.g. "plan small/plan.json".
        max_bytes: Largest accepted size.
        max_depth: Largest number of arrays and objects in each other.
        error: The class to raise.

    Returns:
        Dictionaries, lists, strings, finite numbers within 64 bits, booleans and None.

    Raises:
        DsaError: Too large, too deep, not UTF-8, not JSON, a repeated key, NaN, infinity or an integer of more than 64
            bits; of class ``error``.
    """

    def refuse(reason: str) -> NoReturn:
        raise error(f"Cannot read {what}: {reason}.")

    if len(data) > max_bytes:
        refuse(f"it has {len(data)} bytes; at most {max_bytes} are accepted")
    if _is_deeper(data, max_depth):
        refuse(f"its brackets are nested more than {max_depth} deep")
    try:
        text = data.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_constant,
        )
        if r"\ud" in text.lower():  # half of a surrogate pair cannot be printed or written
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as reason:
        raise error(
            f"Cannot read {what}: not valid JSON at line {reason.lineno}, column {reason.colno} ({reason.msg})."
        ) from reason
    except UnicodeError as reason:
        raise error(f"Cannot read {what}: it is not UTF-8 text.") from reason
    except _RefusedError as reason:
        raise error(f"Cannot read {what}: {reason}.") from reason
    return value


def read_bytes(
    path: str | os.PathLike[str],
    what: str | None = None,
    *,
    max_bytes: int = MAX_BYTES,
    error: type[DsaError] = FileError,
) -> bytes:
    """Read a regular file of limited size; the arguments are those of `parse_json`."""
    what = str(path) if what is None else what
    try:
        # Not blocking: opening a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise error(f"Cannot read {what}: it is not a regular file.")
            data = file.read(max_bytes + 1)
    except (OSError, ValueError, TypeError) as reason:  # a path with a NUL character, something that is no path
        if isinstance(reason, DsaError):
            raise
        said = getattr(reason, "strerror", None) or reason
        raise error(f"Cannot read {one_line(what)}: {one_line(said)}.") from reason
    if len(data) > max_bytes:
        raise error(f"Cannot read {what}: it has more than {max_bytes} bytes.")
    return data


def read_json(
    path: str | os.PathLike[str],
    what: str | None = None,
    *,
    max_bytes: int = MAX_BYTES,
    max_depth: int = 64,
    error: type[DsaError] = FileError,
) -> Any:
    """Read a JSON file; the arguments and the result are those of `parse_json`."""
    what = str(path) if what is None else what
    data = read_bytes(path, what, max_bytes=max_bytes, error=error)
    return parse_json(data, what, max_bytes=max_bytes, max_depth=max_depth, error=error)


def read_document(
    source: str | os.PathLike[str] | bytes | Mapping[str, Any],
    schema: type[_Schema],
    what: str | None = None,
    *,
    max_bytes: int = MAX_BYTES,
    max_depth: int = 64,
    error: type[DsaError] = FileError,
) -> _Schema:
    """Read a JSON document and check it against its schema.

    Args:
        source: A path, the bytes of a file, or JSON data that was parsed already.
        schema: The class of the document.
        what: What it is, for messages; the path if None.
        max_bytes: As for `parse_json`.
        max_depth: As for `parse_json`.
        error: The class to raise.

    Returns:
        The checked document.

    Raises:
        DsaError: The source cannot be read or parsed, has another format, was changed after it was sealed, or has a
            field that is missing, unknown or wrong; the message names the first such field. Of class ``error``.

    Example:
        >>> from pydantic import Field
        >>> class Size(Document):
        ...     width: int = Field(ge=1)
        >>> read_document(b'{"width": 8}', Size).width
        8
        >>> read_document(b'{"width": 0}', Size, "size.json")
        Traceback (most recent call last):
        ...
        dsa_hw.errors.FileError: Cannot use size.json: width: must be greater than or equal to 1; got 0.
    """
    if what is None:
        what = "the data" if isinstance(source, (bytes, Mapping)) else str(source)
    remedy = f" {schema.remedy}" if schema.remedy else ""

    def refuse(reason: str) -> NoReturn:
        raise error(f"Cannot use {one_line(what)}: {reason}.{remedy}")

    if isinstance(source, Mapping):
        try:
            data = json.dumps(dict(source), allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as reason:
            refuse(f"it is not JSON data ({one_line(reason).rstrip('.')})")
    elif isinstance(source, bytes):
        data = source
    else:
        data = read_bytes(source, what, max_bytes=max_bytes, error=error)
    content = parse_json(data, what, max_bytes=max_bytes, max_depth=max_depth, error=error)
    if not isinstance(content, dict):
        refuse(f"a JSON object is expected; got {one_line(json.dumps(content), 60)}")
    if "format" in schema.model_fields:
        (expected,) = get_args(schema.model_fields["format"].annotation)
        if content.get("format") != expected:
            refuse(f"its format must be {expected!r}; got {one_line(repr(content.get('format')), 60)}")
    if issubclass(schema, SealedDocument):
        check_seal(content, what, error, schema.remedy)
    try:
        # From JSON, where a list may become a tuple of the schema; all other types are exact.
        return schema.model_validate_json(data)
    except pydantic.ValidationError as reason:
        refuse(_first_problem(reason, schema))


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``content`` with the field ``sha256``: the hash of all other fields.

    >>> sealed({"width": 8})["sha256"][:8]
    'a5fa3de3'
    """
    return {**content, "sha256": _checksum(content)}


def check_seal(
    content: Mapping[str, Any], what: str, error: type[DsaError] = FileError, remedy: str = "Make it again."
) -> None:
    """Refuse content that was changed after `sealed`.

    Args:
        content: Parsed JSON with the field ``sha256``.
        what: What it is, for messages.
        error: The class to raise.
        remedy: How to make a correct file.

    Raises:
        DsaError: The checksum is missing or does not match; of class ``error``.
    """
    if content.get("sha256") != _checksum(content):
        missing = "it has no checksum (sha256)" if "sha256" not in content else "the checksum does not match"
        raise error(f"Cannot use {one_line(what)}: it was changed after it was saved, {missing}. {remedy}".rstrip())


def _checksum(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of canonical JSON: sorted keys, no spaces, ASCII, shortest exact floats."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


class _RefusedError(Exception):
    """JSON that Python would accept and we do not."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        key = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise _RefusedError(f"key {one_line(repr(key), 60)} occurs twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) <= 20 and -_INTEGERS <= (value := int(digits)) < _INTEGERS:
        return value
    raise _RefusedError(f"an integer has more than 64 bits ({one_line(digits, 24)})")


def _number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _RefusedError(f"a number is not finite ({one_line(digits, 24)})")
    return value


def _constant(name: str) -> NoReturn:
    raise _RefusedError(f"a number is not finite ({name})")


def _is_deeper(data: bytes, limit: int) -> bool:
    """Return whether brackets are nested more than ``limit`` deep, without recursion.

    Each pass removes the innermost pairs. Few brackets that are left over are not closed; the parser says where.
    """
    rest = _STRING.sub(b"", data).translate(None, _NOT_BRACKETS)
    for _ in range(limit):
        shorter = rest.replace(b"[]", b"").replace(b"{}", b"")
        if len(shorter) == len(rest):
            break
        rest = shorter
    balanced = rest.count(b"[") == rest.count(b"]") and rest.count(b"{") == rest.count(b"}")
    return len(rest) > limit or bool(rest and balanced)


def _first_problem(reason: pydantic.ValidationError, schema: type[Document]) -> str:
    problems = reason.errors(include_url=False)
    first = problems[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    kind, given = first["type"], one_line(repr(first["input"]), 60)
    if kind == "missing":
        said = "is missing"
    elif kind == "extra_forbidden":
        known = f"; accepted fields: {', '.join(schema.model_fields)}" if len(first["loc"]) == 1 else ""
        said = f"unknown field{known}"
    else:
        text = first["msg"].removeprefix("Value error, ")
        said = f"{re.sub('^(Input|String|Value) should', 'must', text)}; got {given}"
    more = f" ({len(problems) - 1} more problems)" if len(problems) > 1 else ""
    return one_line(f"{place}: {said}{more}" if place else f"{said}{more}", 400)
