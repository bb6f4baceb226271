"""The page of an allocation: every number of its certificate, whole and by itself."""

from __future__ import annotations

import html
import re
from pathlib import Path

import dsa_hw
from dsa_hw.experiments.report import render_allocation, write_allocation
from tests.dsa_hw.experiments.report.test_page import read


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"<(style|script|svg).*?</\1>|<[^>]*>", " ", page, flags=re.S)).replace("\xa0", " ")


def test_page_has_verdict_numbers_and_widths(small_result: dsa_hw.Allocation) -> None:
    page = render_allocation(small_result, model="small", command="dsa-hw verify small/plan.json --model small")
    text = text_of(page)
    reader = read(page)
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    assert "MET" in text
    for entry in small_result.certificate.entries:
        assert entry.asked in text
        assert f"{100 * entry.utilisation:.1f}%" in text
    for name, width in small_result.widths.items():
        assert re.search(rf"{name}\s+\d+\s+{width}\s", text), name
    assert str(small_result.quality) in text
    assert "dsa-hw verify small/plan.json --model small" in text


def test_names_of_the_user_are_text(small_result: dsa_hw.Allocation, tmp_path: Path) -> None:
    path = write_allocation(small_result, tmp_path / "index.html", model="<img src=x onerror=alert(1)>")
    page = path.read_text()
    assert "<img" not in page
    assert "&lt;img src=x" in page
