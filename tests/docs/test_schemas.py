"""The published JSON Schemas are those of the code."""

from __future__ import annotations

import importlib.util
import re
import signal
from pathlib import Path
from types import ModuleType

from dsa_hw import errors
from dsa_hw.cli.documents import OUTPUTS

ROOT = Path(__file__).parents[2]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_schemas", ROOT / "docs" / "schemas.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_of_commands_lists_every_output_and_exit_code() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert set(re.findall(r"\(schemas/output-([\w-]+)\.schema\.json\)", page)) == set(OUTPUTS)
    known = {error.exit_code for error in vars(errors).values() if isinstance(error, type)}
    signals = {128 + signal.SIGINT, 128 + signal.SIGTERM}
    assert set(map(int, re.findall(r"^\| (\d+) \|", page, re.MULTILINE))) == {0, 1, *known, *signals}


def test_published_schemas_are_up_to_date() -> None:
    script = _script()
    expected = {f"{name}.schema.json": script.schema_text(schema) for name, schema in script.SCHEMAS.items()}
    found = {path.name: path.read_text() for path in script.FOLDER.glob("*.json")}
    assert found == expected, "Run: python docs/schemas.py"
