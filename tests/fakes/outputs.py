"""What ``--json`` printed, checked against the published schema by a validator that is not ours."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import jsonschema
import pytest

SCHEMAS = Path(__file__).parents[2] / "docs" / "reference" / "schemas"


def printed_json(capsys: pytest.CaptureFixture[str], schema: str) -> Any:
    """Return the one JSON object on standard output, which follows ``output-SCHEMA.schema.json``."""
    content = json.loads(capsys.readouterr().out, parse_constant=_refuse)
    _validator(schema).validate(content)
    return content


@cache
def _validator(schema: str) -> jsonschema.Draft202012Validator:
    found = json.loads((SCHEMAS / f"output-{schema}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(found)


def _refuse(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")
