"""The files and the names of the packages that the documents mention exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.docs.blocks import DOCUMENTS, ROOT, inline_code

_FILE = re.compile(r"(?<![\w/.-])(?:dsa_hw|budgets|profilers|tests|benchmarks|docs|examples)/[\w/.-]*")
_NAME = re.compile(r"(?:dsa_hw|budgets|profilers)(?:\.[A-Za-z_]\w*)+")
_OWN_FILES = re.compile(r"\.(jsonl|json|sqlite|png)$")  # written by the command in the same line


def exists(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:i]))
            except ModuleNotFoundError:
                return False
        found = getattr(found, part)
    return True


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_mentioned_files_and_names_exist(page: Path) -> None:
    missing = set()
    for code in inline_code(page):
        missing |= {f for f in _FILE.findall(code) if not _OWN_FILES.search(f) and not (ROOT / f.rstrip(".")).exists()}
        missing |= {name for name in _NAME.findall(code) if not exists(name)}
    assert missing == set()
