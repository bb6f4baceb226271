"""Packages of the user that hide ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_module_that_hides_one_of_our_packages_is_named(tmp_path: Path) -> None:
    (tmp_path / "budgets.py").write_text("")
    path = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(Path(__file__).parents[3])!r}]"
    code = f"{path}; from dsa_hw.cli.main import main; sys.exit(main(['inspect', '--model', 'resnet18']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "budgets.py hides the package budgets" in done.stderr
    assert len(done.stderr.splitlines()) == 1
