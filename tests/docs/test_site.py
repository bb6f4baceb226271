"""The site builds without warnings, documents every public name and loads nothing from elsewhere."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

mkdocs_config = pytest.importorskip("mkdocs.config", reason="the docs extra is not installed")
pytest.importorskip("mkdocstrings", reason="the docs extra is not installed")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mkdocs.commands.build import build

    folder = tmp_path_factory.mktemp("site")
    config = mkdocs_config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    config.plugins.run_event("startup", command="build", dirty=False)
    build(config)
    return folder


@pytest.mark.parametrize("package", ["dsa_hw", "budgets", "profilers"])
def test_reference_documents_every_public_name(site: Path, package: str) -> None:
    page = (site / "reference" / f"{package}.html").read_text()
    documented = set(re.findall(rf'<h3 id="{package}\.(\w+)"', page))
    assert set(importlib.import_module(package).__all__) <= documented


@pytest.mark.parametrize("package", ["dsa_hw", "budgets", "profilers"])
def test_examples_of_docstrings_are_shown_as_code(site: Path, package: str) -> None:
    page = (site / "reference" / f"{package}.html").read_text()
    assert '<span class="gp">' in page
    assert "<blockquote>" not in page


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loaded = re.compile(
        r'<(?:script|img|iframe)[^>]*\ssrc="(?:https?:)?//|<link[^>]*rel="stylesheet"[^>]*href="(?:https?:)?//'
    )
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    assert [str(page) for page in pages if loaded.search(page.read_text())] == []


def test_formulas_are_rendered_without_scripts(site: Path) -> None:
    page = (site / "development" / "mathematics.html").read_text()
    assert "<math" in page
    assert "arithmatex" not in page


def test_links_of_the_readme_exist() -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / "README.md").read_text())
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
