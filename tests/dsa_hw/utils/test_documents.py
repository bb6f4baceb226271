"""Whatever a JSON file contains, reading it gives a checked object or one typed line."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from dsa_hw.errors import FileError, PlanError
from dsa_hw.utils.documents import (
    Document,
    SealedDocument,
    check_seal,
    parse_json,
    read_document,
    read_json,
    sealed,
)

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",))),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",))), children, max_size=4)
    ),
    max_leaves=20,
)


class Entry(Document):
    limit: float = Field(gt=0)
    widths: tuple[int, ...] = ()


class Example(SealedDocument):
    remedy = "Make it with dsa-hw example."
    format: Literal["example 1"]
    entries: tuple[Entry, ...] = Field(min_length=1)


def _example(**changes: Any) -> dict[str, Any]:
    return sealed({"format": "example 1", "entries": [{"limit": 2.5, "widths": [1, 2]}], **changes})


@given(_JSON)
def test_plain_json_is_read_as_it_was_written(value: Any) -> None:
    found = parse_json(json.dumps(value).encode(), "value")
    assert json.dumps(found) == json.dumps(value)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not valid JSON at line 1, column 1"),
        (b'{"a": 1', "not valid JSON"),
        (b"[" * 100_000, "nested more than 64 deep"),
        (b"[" * 65 + b"]" * 65, "nested more than 64 deep"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "nested more than 64 deep"),
        (b"[[1], [2}]", "not valid JSON"),
        (b"1" * 5000, "more than 64 bits"),
        (b"[9223372036854775808]", "more than 64 bits"),
        (b"[NaN]", "not finite"),
        (b"[-Infinity]", "not finite"),
        (b"[1e999]", "not finite"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
        (b'"\xff"', "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (rb'"\ud800"', "not UTF-8"),
        (b"[1] [2]", "not valid JSON"),
        (b"1" * 2000, "more than 64 bits"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_refused_json_is_one_line_that_names_the_file(data: bytes, reason: str) -> None:
    with pytest.raises(PlanError, match=reason) as caught:
        parse_json(data, "plan p.json", error=PlanError)
    assert str(caught.value).startswith("Cannot read plan p.json: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_brackets_in_strings_and_depth_at_the_limit_are_accepted() -> None:
    assert parse_json(json.dumps(["[" * 1000, '\\"[{' * 100]).encode(), "x") == ["[" * 1000, '\\"[{' * 100]
    value = parse_json(b"[" * 64 + b"]" * 64, "x")
    for _ in range(63):
        (value,) = value
    assert value == []


def test_size_is_limited(tmp_path: Path) -> None:
    (tmp_path / "large.json").write_bytes(b" " * 1001)
    with pytest.raises(FileError, match="more than 1000 bytes"):
        read_json(tmp_path / "large.json", max_bytes=1000)
    with pytest.raises(FileError, match="1001 bytes"):
        parse_json(b" " * 1001, "x", max_bytes=1000)


@pytest.mark.parametrize("name", ["missing.json", "folder", "pipe", "nul\0"])
def test_what_is_no_file_is_a_typed_error_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="Cannot read"):
        read_json(f"{tmp_path}/{name}")


def test_document_has_exact_types_and_tuples() -> None:
    found = read_document(_example(), Example)
    assert found.entries == (Entry(limit=2.5, widths=(1, 2)),)
    assert read_document(json.dumps(_example()).encode(), Example) == found
    with pytest.raises(ValueError, match="frozen"):
        found.format = "other"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ({"limit": -1}, r"entries\[0\]\.limit: must be greater than 0; got -1"),
        ({"limit": "2"}, r"entries\[0\]\.limit: must be a valid number; got '2'"),
        ({"limit": True}, r"entries\[0\]\.limit: must be a valid number; got True"),
        ({"limit": 1, "widths": [1.5]}, r"entries\[0\]\.widths\[0\]: must be a valid integer"),
        ({"limit": 1, "widths": 3}, r"entries\[0\]\.widths: must be a valid array"),
        ({}, r"entries\[0\]\.limit: is missing"),
        ({"limit": 1, "limits": 1}, r"entries\[0\]\.limits: unknown field"),
        (None, r"entries\[0\]: must be an object; got None"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_accepted(entry: Any, line: str) -> None:
    with pytest.raises(FileError, match=line) as caught:
        read_document(_example(entries=[entry]), Example, "e.json")
    assert str(caught.value).endswith("Make it with dsa-hw example.")
    assert "\n" not in str(caught.value)


def test_another_format_is_called_that() -> None:
    with pytest.raises(FileError, match="format must be 'example 1'; got 'example 0'"):
        read_document({"format": "example 0"}, Example)
    with pytest.raises(FileError, match="a JSON object is expected; got"):
        read_document(b"[1]", Example)
    with pytest.raises(FileError, match="not JSON data"):
        read_document({"a": {1, 2}}, Example)


def test_unknown_field_lists_the_known_ones() -> None:
    with pytest.raises(FileError, match="more: unknown field; accepted fields: sha256, format, entries"):
        read_document(_example(more=1), Example)


@given(st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), max_size=5), _JSON, max_size=4))
def test_seal_survives_a_file_and_no_change(content: dict[str, Any]) -> None:
    content.pop("sha256", None)
    again = json.loads(json.dumps(sealed(content), indent=1))
    check_seal(again, "x")
    with pytest.raises(FileError, match="changed after it was saved"):
        check_seal({**again, "one more": 1}, "x")


def test_no_flipped_byte_of_a_sealed_document_is_accepted_with_another_content() -> None:
    data = json.dumps(_example(), indent=1).encode()
    wanted = read_document(data, Example)
    generator = random.Random(0)
    for _ in range(400):
        changed = bytearray(data)
        changed[generator.randrange(len(data))] = generator.randrange(256)
        with contextlib.suppress(FileError):
            assert read_document(bytes(changed), Example) == wanted


def test_pydantic_is_not_imported_with_the_package_or_for_help() -> None:
    code = (
        "import sys, dsa_hw, dsa_hw.cli.main as m\n"
        "try: m.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
