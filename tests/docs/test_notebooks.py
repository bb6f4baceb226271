"""The notebooks are what docs/notebooks.py makes of the scripts, which other tests run, and of the tutorial."""

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
    return dict(json.loads(notebooks.place_of(source).read_text()))


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
                assert (notebooks.place_of(source).parent / link).exists(), link


def test_every_notebook_has_a_source() -> None:
    found = {path for folder in ("examples", "docs") for path in (ROOT / folder).rglob("*.ipynb")}
    assert found == {notebooks.place_of(path) for path in notebooks.SOURCES}


def printed(cell: dict[str, Any]) -> str:
    """Return what a cell has printed."""
    return "".join("".join(o["text"]) for o in cell["outputs"] if o.get("name") == "stdout")


def test_notebook_of_the_tutorial_has_outputs() -> None:
    code = [cell for cell in notebook(notebooks.TUTORIAL)["cells"] if cell["cell_type"] == "code"]
    assert {o["output_type"] for cell in code for o in cell["outputs"]} == {"stream"}
    for cell in code:
        assert bool(printed(cell)) == ("print(" in "".join(cell["source"])), cell["source"]
    assert sum("MET" in printed(cell) and "NOT MET" not in printed(cell) for cell in code) >= 3


# Little time: this is about the code, not about the machine.
FAST = """
from dsa_hw import ProfileOptions
from dsa_hw.methods.dsa.method import _OPTIONS
ProfileOptions.reading_limit, _OPTIONS["steps"] = 1.0, 30
"""
CHECK = """
from pathlib import Path
assert dense_accuracy > 0.5
assert Path("small.onnx").stat().st_size > 10_000
assert Path("latency/profile.sqlite").exists()
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tutorial_runs_in_a_kernel_on_onnx_runtime(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    made = notebook(notebooks.TUTORIAL)
    extra = [{"cell_type": "code", "id": name, "metadata": {}, "source": text, "execution_count": None, "outputs": []}
             for name, text in (("fast", FAST), ("check", CHECK))]  # fmt: skip
    again = notebooks.executed({**made, "cells": [extra[0], *made["cells"], extra[1]]}, tmp_path)["cells"][1:-1]
    for cell, shown in zip(again, made["cells"], strict=True):
        if cell["cell_type"] == "code":
            assert bool(printed(cell)) == bool(printed(shown))
