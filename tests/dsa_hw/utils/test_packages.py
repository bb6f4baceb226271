"""The packages ``budgets`` and ``profilers`` are ours, and modules of the user that hide them are named."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import dsa_hw
from dsa_hw.utils.packages import OWN, why_hidden

ROOT = Path(dsa_hw.__file__).parents[1]


@pytest.mark.parametrize("name", OWN)
def test_package_name_resolves_to_this_distribution(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert Path(str(spec.origin)).resolve() == (ROOT / name / "__init__.py").resolve()
    assert set(importlib.metadata.packages_distributions()[name]) == {"dsa-hw"}
    assert why_hidden(name) is None


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path[:0] = ['', {str(ROOT)!r}]; sys.argv = ['x', *{list(words[1:])!r}]; {words[0]}"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


MODULE = "import runpy; runpy.run_module({!r}, run_name='__main__')"
COMMAND = "from dsa_hw.cli.main import main; sys.exit(main())"


@pytest.mark.parametrize("content", ["", "raise ZeroDivisionError\n"], ids=["empty", "raising"])
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("start", [COMMAND, MODULE.format("dsa_hw.cli")], ids=["dsa-hw", "python -m dsa_hw.cli"])
def test_command_names_the_file_that_hides_a_package(start: str, name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(content)
    done = run(tmp_path, start, "inspect", "--model", "resnet18")
    assert done.returncode == 2, done.stderr
    assert f"{name}.py hides the package {name} of dsa-hw. Rename that file" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("name", "attribute"), [("budgets", "LatencyBudget"), ("profilers", "MeasuringRules")])
def test_import_names_the_file_that_hides_a_package(name: str, attribute: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("")
    done = run(tmp_path, f"import dsa_hw; dsa_hw.{attribute}")
    assert done.stderr.splitlines()[-1].startswith("dsa_hw.errors.MissingDependencyError: ")
    assert f"{name}.py hides the package {name} of dsa-hw. Rename that file" in done.stderr


@pytest.mark.parametrize("command", ["latency", "energy"])
def test_profilers_command_names_the_file_that_hides_its_package(command: str, tmp_path: Path) -> None:
    (tmp_path / "profilers.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", f"profilers.{command}", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "__path__ attribute not found on 'profilers'" in done.stderr  # from Python, before any of our code runs
    assert len(done.stderr.splitlines()) == 1


def test_profilers_command_works_beside_a_module_called_budgets(tmp_path: Path) -> None:
    (tmp_path / "budgets.py").write_text("raise ZeroDivisionError\n")
    done = run(tmp_path, MODULE.format("profilers.latency"), "--model", ":")
    assert done.returncode == 2, done.stderr
    assert "Cannot import model ':'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
