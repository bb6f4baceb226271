"""The Python blocks of the documents run, in order and in a folder of their own.

Those of the tutorial run as a notebook, in test_notebooks.py.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dsa_hw
from dsa_hw.methods.dsa.method import _OPTIONS
from dsa_hw.zoo.models import load_model
from profilers.targets import Loaded, base
from tests.docs.blocks import GUIDE, ROOT, Block, blocks
from tests.fakes.digits import Formula, Net, formula

_spec = importlib.util.spec_from_file_location("docs_readme", ROOT / "docs" / "readme.py")
assert _spec is not None
assert _spec.loader is not None
readme: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(readme)

TUTORIAL = ROOT / "docs" / "guide" / "tutorial.md"
# These begin with the reader's own network and data.
SHORT = [ROOT / "docs" / "index.md", ROOT / "docs" / "development" / "baselines.md"]
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


class Fast(InPlaceOfOnnxRuntime):
    """About the time of a ResNet-20 for CIFAR-10 in ONNX Runtime on one core."""

    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        return Loaded.exact(0.24 * formula(artefact, inputs))


def test_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(base._REGISTRY, "onnxruntime", Fast)
    monkeypatch.setitem(_OPTIONS, "steps", 5)
    torch.save(load_model("resnet20_a")[0].state_dict(), "resnet20-12fca82f.th")
    images, labels = torch.randint(256, (64, 32, 32, 3), dtype=torch.uint8).numpy(), torch.randint(10, (64,)).numpy()
    np.savez("cifar10.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    names: dict[str, Any] = {}
    assert run(ROOT / "README.md", names) == []
    assert names["result"].certificate.verdict == dsa_hw.Verdict.MET
    assert (tmp_path / "small" / "plan.json").exists()


def test_readme_shows_the_output_of_its_code() -> None:
    found = readme.BLOCKS.search(readme.README.read_text())
    assert found is not None
    limit = re.search(r"latency=([\d.]+)ms", found["code"])
    assert limit is not None
    assert f"latency <= {1000 * float(limit[1]):g} us" in found["output"], "run python docs/readme.py FOLDER"
    assert found["output"].count("MET") == 2


def test_every_python_block_of_the_guide_is_found() -> None:
    for page in (ROOT / "README.md", TUTORIAL, *PAGES):
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
