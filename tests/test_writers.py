"""Nothing but ``dsa_hw.utils.files`` writes files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_OWN = {
    "dsa_hw/utils/files.py": "the writer",
    "profilers/remote/agent.py": "runs on boards as one file",
    "profilers/litert/worker/service.py": "runs in another environment, in a temporary folder",
    "profilers/litert/convert.py": "the temporary folder of the worker",
    "profilers/litert/client.py": "the log of the worker, in its temporary folder",
    "profilers/targets/adb.py": "a temporary folder",
    "dsa_hw/cli/setup.py": "a temporary folder",
}
_METHODS = {
    "write_text",
    "write_bytes",
    "savefig",
    "to_csv",
    "to_json",
    "to_parquet",
    "to_pickle",
    "to_excel",
    "tofile",
}
_FUNCTIONS = {"torch.save", "np.save", "np.savez", "json.dump", "pickle.dump", "onnx.save", "shutil.copy", "os.replace"}
_WRITING = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND"}


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _writes(call: ast.Call) -> bool:
    name = _name(call.func)
    method = name.rpartition(".")[2]
    if "." in name and method in ("to_csv", "to_json"):
        return bool(call.args) or any(k.arg in ("path_or_buf", "path") for k in call.keywords)  # else it returns text
    if method == "savefig":
        return not (call.args and _name(call.args[0]) == "buffer")
    if name in _FUNCTIONS or ("." in name and method in _METHODS):
        return not name.startswith("files.")
    if name == "os.open":
        if _name(call.args[0]) == "os.devnull":
            return False
        return any(isinstance(n, ast.Attribute) and n.attr in _WRITING for n in ast.walk(call))
    if name in ("open", "io.open", "gzip.open") or method in ("open", "fdopen"):
        modes = [a.value for a in [*call.args, *(k.value for k in call.keywords)] if isinstance(a, ast.Constant)]
        return any(isinstance(m, str) and len(m) <= 3 and set(m) & set("wax+") for m in modes)
    return False


def _unsafe(tree: ast.AST, inside: bool = False) -> Iterator[ast.Call]:
    if isinstance(tree, ast.With):
        contexts = [item.context_expr for item in tree.items]
        if any(isinstance(c, ast.Call) and _name(c.func).endswith(("whole_file", "whole_folder")) for c in contexts):
            inside = True
    if isinstance(tree, ast.Call) and not inside and _writes(tree):
        yield tree
    for child in ast.iter_child_nodes(tree):
        yield from _unsafe(child, inside)


def test_every_writer_uses_the_durable_one() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
        for package in ("dsa_hw", "budgets", "profilers")
        for path in sorted((ROOT / package).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in _OWN
        for call in _unsafe(ast.parse(path.read_text()))
    ]
    assert not found, "Write through dsa_hw.utils.files"


@pytest.mark.parametrize(
    "code",
    ["open(p, 'w')", "p.open('ab')", "p.write_text(t)", "table.to_csv(p)", "f.savefig(p)", "torch.save(x, p)",
     "os.open(p, os.O_RDWR | os.O_CREAT)"],
)  # fmt: skip
def test_the_search_sees_writers(code: str) -> None:
    assert list(_unsafe(ast.parse(code)))
    assert not list(_unsafe(ast.parse(f"with whole_file(q) as p:\n    {code}")))


@pytest.mark.parametrize("code", ["open(p)", "p.open('rb')", "table.to_csv(index=False)", "write_text(p, t)"])
def test_the_search_accepts_the_rest(code: str) -> None:
    assert not list(_unsafe(ast.parse(code)))
