"""Notebooks made from ``examples/*.py`` and from the tutorial; ``python docs/notebooks.py`` writes them again.

Notebooks are derived: change the script or the page, never the notebook. tests/docs/test_notebooks.py compares them,
and executes that of the tutorial. It has outputs: it is executed when its cells change, or with ``--execute``.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "notebooks"
TUTORIAL = ROOT / "docs" / "guide" / "tutorial.md"
SOURCES = [*sorted((ROOT / "examples").glob("*.py")), TUTORIAL]

_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}

Cell = tuple[str, str]
"""Kind ("markdown" or "code") and text."""


def place_of(path: Path) -> Path:
    """Return where the notebook of a script or page is; that of a page is beside it, so that its links hold."""
    return path.with_suffix(".ipynb") if path.suffix == ".md" else FOLDER / f"{path.stem}.ipynb"


def cells_of(path: Path) -> list[Cell]:
    """Return the cells of the notebook of a script or a page."""
    if path.suffix == ".md":
        return _cells_of_page(path)
    made = f"*Made from [{path.name}](../../{path.relative_to(ROOT).as_posix()}) by docs/notebooks.py.*"
    (kind, first), *rest = _cells_of_script(path)
    return [(kind, f"{first}\n\n{made}"), *rest]


def notebook_of(path: Path) -> dict[str, Any]:
    """Return the notebook of a script, without outputs."""
    cells: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells_of(path)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text}
        cells.append(cell if kind == "markdown" else {**cell, "execution_count": None, "outputs": []})
    return {"cells": cells, "metadata": {"kernelspec": _KERNEL}, "nbformat": 4, "nbformat_minor": 5}


def executed(notebook: dict[str, Any], folder: str | Path) -> dict[str, Any]:
    """Return a notebook with the outputs of a new kernel that works in ``folder``; an error of a cell is raised."""
    import nbformat
    from nbclient import NotebookClient

    found = nbformat.from_dict(json.loads(json.dumps(notebook)))
    NotebookClient(found, timeout=900, resources={"metadata": {"path": str(folder)}}, record_timing=False).execute()
    return dict(json.loads(json.dumps(found)))


def main() -> None:
    """Write every notebook."""
    FOLDER.mkdir(exist_ok=True)
    for path in SOURCES:
        notebook, place = notebook_of(path), place_of(path)
        if path == TUTORIAL:
            if (
                "--execute" not in sys.argv
                and place.exists()
                and _sources(json.loads(place.read_text())) == _sources(notebook)
            ):
                continue
            with tempfile.TemporaryDirectory() as folder:
                notebook = executed(notebook, folder)
            notebook["metadata"] = {"kernelspec": _KERNEL}
        place.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(place)


def _sources(notebook: dict[str, Any]) -> list[Cell]:
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def _cells_of_page(path: Path) -> list[Cell]:
    """Return the text between Python blocks as Markdown, and the blocks as code."""
    parts = re.split(r"^```python\n(.*?)^```$", path.read_text(), flags=re.S | re.M)
    kinds = ("markdown", "code")
    found = [(kinds[number % 2], part.strip("\n")) for number, part in enumerate(parts)]
    return [(kind, text) for kind, text in found if text]


def _cells_of_script(path: Path) -> list[Cell]:
    """Return a cell for the docstring, the imports, each function, and a call of ``main`` as the docstring has it."""
    text = path.read_text()
    tree = ast.parse(text)
    lines, description = text.splitlines(), inspect.cleandoc(ast.get_docstring(tree) or "")
    title, _, more = description.partition("\n")
    found: list[Cell] = [("markdown", f"# {title.rstrip('.')}\n{more}".strip())]
    imports: list[str] = []
    body = tree.body[1:-1]  # without the docstring and the call for the command line
    for number, node in enumerate(body):
        end = body[number + 1].lineno - 1 if number + 1 < len(body) else tree.body[-1].lineno - 1
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        part = "\n".join(lines[start - 1 : end]).strip("\n")
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.append(("code", part))
        elif not part.startswith("from __future__"):
            imports.append(part)
    found.insert(1, ("code", "\n".join(imports)))
    usage = re.search(rf"python examples/{path.name}(.*)", description)
    words = shlex.split(usage[1]) if usage else []
    takes_list = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == "main").args.args[:1]
    as_list = bool(takes_list) and takes_list[0].arg == "words"
    call = f"main({words!r})" if as_list else f"main({', '.join(map(repr, words))})"
    return [*found, ("code", f"result = {call}")]


if __name__ == "__main__":
    main()
