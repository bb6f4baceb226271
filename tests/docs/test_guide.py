"""The Python blocks of the documents run, in order and in a folder of their own."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import dsa_hw
from dsa_hw import ProfileOptions
from dsa_hw.methods.dsa.method import _OPTIONS
from profilers.targets import Loaded, base
from tests.docs.blocks import GUIDE, ROOT, Block, blocks
from tests.fakes.digits import Formula, Net, formula

TUTORIAL = ROOT / "docs" / "guide" / "tutorial.md"
# These begin with the reader's own network and data.
SHORT = [ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "development" / "baselines.md"]
PAGES = [*SHORT, *(page for page in GUIDE if page != TUTORIAL)]


class InPlaceOfOnnxRuntime(Formula):
    """Times from a formula under the name of ONNX Runtime: a profile takes seconds, and all its values are exact."""

    runtime = "onnxruntime"

    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        return Loaded.exact(40 * formula(artefact, inputs))  # slow enough for the "5ms" of the first pages


def run(page: Path, names: dict[str, Any]) -> list[Block]:
    """Execute the blocks of a page that are not marked, and return those that are."""
    marked = []
    for block in blocks(page):
        if block.language == "python":
            code = compile("\n" * (int(block.where.rpartition(":")[2]) - 1) + block.text, str(page), "exec")
            if block.not_run is None:
                exec(code, names)
            else:
                marked.append(block)
    return marked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(base._REGISTRY, "onnxruntime", InPlaceOfOnnxRuntime)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    if page in SHORT:
        data = [(torch.randn(8, 3, 16, 16), torch.randint(10, (8,))) for _ in range(4)]
        names = {"model": Net().eval(), "example_inputs": (torch.zeros(1, 3, 16, 16),), "train": data, "val": data}
    for block in run(page, names):
        assert_names_exist(block)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tutorial_runs_on_onnx_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Little time: this test is about the code, not about the machine.
    monkeypatch.setattr(ProfileOptions, "reading_limit", 1.0)
    monkeypatch.setitem(_OPTIONS, "steps", 30)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    assert run(TUTORIAL, names) == []
    assert names["dense_accuracy"] > 0.5
    assert (tmp_path / "small.onnx").stat().st_size > 10_000
    assert (tmp_path / "latency" / "profile.sqlite").exists()


def test_every_python_block_of_the_guide_is_found() -> None:
    for page in (TUTORIAL, *PAGES):
        found = [block for block in blocks(page) if block.language == "python"]
        assert len(found) == page.read_text().count("```python"), page
        assert sum(block.not_run is not None for block in found) == page.read_text().count("<!--"), page


def assert_names_exist(block: Block) -> None:
    """Assert that what a block imports and the parameters it passes exist, as far as they can be checked unrun."""
    names: dict[str, Any] = {"dsa_hw": dsa_hw}
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name] = importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            assert hasattr(names[node.value.id], node.attr), f"{block.where}: {ast.unparse(node)}"
        if isinstance(node, ast.Call) and (called := _called(node.func, names)) is not None:
            keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(called).bind(*node.args, **keywords)


def _called(function: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(function, ast.Name):
        return names.get(function.id)
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id in names:
        return getattr(names[function.value.id], function.attr, None)
    return None


def test_unknown_parameter_in_a_marked_block_is_found() -> None:
    def block(text: str) -> Block:
        return Block("page.md:1", "python", text, "needs a GPU")

    assert_names_exist(block("from dsa_hw import LatencyBudget\nLatencyBudget('5ms', target='tensorrt/cuda')"))
    with pytest.raises(TypeError):
        assert_names_exist(block("from dsa_hw import LatencyBudget\nLatencyBudget('5ms', rules=None)"))
    with pytest.raises(AttributeError):
        assert_names_exist(block("from dsa_hw import recheck"))
    with pytest.raises(AssertionError):
        assert_names_exist(block("import dsa_hw\ndsa_hw.recheck(plan)"))
