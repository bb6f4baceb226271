"""The pages in a real browser: no errors, nothing blocked, tables that can be sorted, nothing that axe-core finds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsa_hw import Allocation, FlopsBudget
from dsa_hw.experiments.report import render, render_allocation, render_minimum, render_sweep
from tests.fakes import fronts
from tests.fakes.browser import BROWSER, Browser
from tests.fakes.findings import findings

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")

ROOT = Path(__file__).parents[4]
AXE = Path(os.environ.get("DSA_HW_AXE", ROOT / "node_modules" / "axe-core" / "axe.min.js"))
PAGES = ("comparison", "allocation", "sweep", "long names", "minimum")
WIDTHS = (390, 820, 1400)
COLUMN = (
    "[...document.querySelector('table[data-sortable]').tBodies[0].rows].map((row) => Number(row.cells[1].textContent))"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all pages."""
    with Browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(small_result: Allocation) -> dict[str, str]:
    judged = render_minimum(small_result, fronts.trials(), FlopsBudget("60%"), 0.42, fronts.ABOUT)
    return {
        "comparison": render(findings()),
        "allocation": render_allocation(small_result, model="small", command="dsa-hw verify plan.json --model small"),
        "sweep": render_sweep(fronts.sweep_table(), fronts.BUDGET, fronts.ABOUT),
        "long names": render_sweep(fronts.sweep_with_long_names(), fronts.BUDGET, fronts.ABOUT),
        "minimum": judged,
    }


@pytest.mark.parametrize("name", PAGES)
def test_page_fits_every_width_without_errors(
    name: str, pages: dict[str, str], browser: Browser, tmp_path: Path
) -> None:
    for width in WIDTHS:
        browser.open(pages[name], tmp_path / "index.html", width=width)
        assert browser.log == []
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), f"scrolls sideways at {width}"
    assert browser.run("document.querySelectorAll('h1').length") == 1


@pytest.mark.parametrize("name", PAGES)
def test_widths_are_sorted_by_a_click(name: str, pages: dict[str, str], browser: Browser, tmp_path: Path) -> None:
    browser.open(pages[name], tmp_path / "index.html")
    head = "table[data-sortable] thead th:nth-child(2)"
    browser.click(f"{head} button")
    up = browser.run(COLUMN)
    browser.click(f"{head} button")
    assert up == sorted(up)
    assert len(set(up)) > 1
    assert browser.run(COLUMN) == up[::-1]
    assert browser.run(f"document.querySelector('{head}').getAttribute('aria-sort')") == "descending"
    assert browser.log == []


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.skipif(not AXE.exists(), reason="no axe-core here: npm install --no-save axe-core")
def test_axe_finds_no_violation(name: str, pages: dict[str, str], browser: Browser, tmp_path: Path) -> None:
    for dark in (False, True):
        browser.open(pages[name], tmp_path / "index.html", dark=dark)
        browser.run(AXE.read_text("utf-8") + "; 0")
        found = browser.run(
            "axe.run().then((r) => r.violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.html).join(' ')}`))"
        )
        assert found == [], f"dark: {dark}"


def test_points_of_figures_have_tooltips(pages: dict[str, str], browser: Browser, tmp_path: Path) -> None:
    browser.open(pages["sweep"], tmp_path / "index.html")
    tips = browser.run("[...document.querySelectorAll('figure svg g > title')].map((e) => e.textContent)")
    table = fronts.sweep_table()
    assert len([t for t in tips if "of the limit" in t]) == len(table)
    assert len([t for t in tips if t.endswith("kept")]) == len(table) * len(fronts.SIZES)
    assert "asked 90%: 96.0% of the limit, interval 94.1% to 97.9%, MET" in tips


def test_policy_blocks_another_script(pages: dict[str, str], browser: Browser, tmp_path: Path) -> None:
    page = pages["comparison"].replace("</main>", "<script>document.title = 'ran'</script></main>")
    browser.open(page, tmp_path / "index.html")
    assert browser.run("document.title") != "ran"
    assert any("Content Security Policy" in line for line in browser.log)
