"""The notebooks are what docs/notebooks.py makes of the scripts, which other tests run."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("docs_notebooks", ROOT / "docs" / "notebooks.py")
assert _spec is not None
assert _spec.loader is not None
notebooks: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(notebooks)


def notebook(source: Path) -> dict[str, Any]:
    return dict(json.loads((notebooks.FOLDER / f"{source.stem}.ipynb").read_text()))


@pytest.mark.parametrize("source", notebooks.SOURCES, ids=lambda path: path.stem)
def test_notebook_has_the_cells_of_its_source(source: Path) -> None:
    found = notebook(source)
    assert [(c["cell_type"], "".join(c["source"])) for c in found["cells"]] == notebooks.cells_of(source), (
        "run python docs/notebooks.py"
    )
    for cell in found["cells"]:
        if cell["cell_type"] == "code":
            compile("".join(cell["source"]), source.name, "exec")
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", "".join(cell["source"])):
            if cell["cell_type"] == "markdown":
                assert (notebooks.FOLDER / link).exists(), link


def test_every_notebook_has_a_source() -> None:
    assert {path.stem for path in notebooks.FOLDER.glob("*.ipynb")} == {path.stem for path in notebooks.SOURCES}
