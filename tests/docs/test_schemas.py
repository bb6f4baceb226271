"""The published JSON Schemas are those of the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_schemas", ROOT / "docs" / "schemas.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_published_schemas_are_up_to_date() -> None:
    script = _script()
    expected = {f"{name}.schema.json": script.schema_text(schema) for name, schema in script.SCHEMAS.items()}
    found = {path.name: path.read_text() for path in script.FOLDER.glob("*.json")}
    assert found == expected, "Run: python docs/schemas.py"
