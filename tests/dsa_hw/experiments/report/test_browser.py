"""The pages in a real browser: no errors, nothing blocked, and tables that can be sorted."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dsa_hw.experiments.report import render
from tests.fakes.findings import findings

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")

# Clicks the second column of widths twice and leaves its values in the title, where --dump-dom shows them.
CLICKS = """<script>
addEventListener("load", () => {
  const table = document.querySelector("table[data-sortable]"), button = table.querySelectorAll("thead button")[1];
  const column = () => [...table.tBodies[0].rows].map((row) => row.cells[1].textContent).join(" ");
  button.click(); const up = column(); button.click();
  document.title = up + " | " + column() + " | " + button.closest("th").getAttribute("aria-sort");
});
</script>"""


def opened(page: str, folder: Path) -> tuple[str, str]:
    """Open a page; return the document after its scripts have run, and what the browser logged."""
    path = folder / "index.html"
    path.write_text(page)
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=2000", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def page() -> str:
    return render(findings())


def test_page_opens_without_errors(page: str, tmp_path: Path) -> None:
    document, log = opened(page, tmp_path)
    assert "<h1>" in document
    assert "CONSOLE" not in log


def test_policy_blocks_another_script(page: str, tmp_path: Path) -> None:
    document, log = opened(page.replace("</main>", "<script>document.title = 'ran'</script></main>"), tmp_path)
    assert "<title>ran</title>" not in document
    assert "Content Security Policy" in log


def test_widths_are_sorted_by_a_click(page: str, tmp_path: Path) -> None:
    free = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace("</body>", f"{CLICKS}</body>")
    document, _ = opened(free, tmp_path)
    up, down, direction = re.search(r"<title>(.*?)</title>", document)[1].split(" | ")  # type: ignore[index]
    numbers = list(map(int, up.split()))
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 1
    assert list(map(int, down.split())) == numbers[::-1]
    assert direction == "descending"
