"""The page of an allocation: every number of its certificate, whole and by itself."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import dsa_hw
from dsa_hw.experiments.report import render_allocation, write_allocation
from tests.dsa_hw.experiments.report.test_page import read


@pytest.fixture(scope="module")
def result() -> dsa_hw.Allocation:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.ReLU(), nn.Conv2d(24, 8, 3)
    )
    budgets = [dsa_hw.FlopsBudget("50%"), dsa_hw.ParamsBudget("60%")]
    return dsa_hw.allocate(model, budgets, example_inputs=torch.zeros(1, 3, 12, 12), method="uniform", progress=False)


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"<(style|script|svg).*?</\1>|<[^>]*>", " ", page, flags=re.S)).replace("\xa0", " ")


def test_page_has_verdict_numbers_and_widths(result: dsa_hw.Allocation) -> None:
    page = render_allocation(result, model="small", command="dsa-hw verify small/plan.json --model small")
    text = text_of(page)
    reader = read(page)
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    assert "MET" in text
    for entry in result.certificate.entries:
        assert entry.asked in text
        assert f"{100 * entry.utilisation:.1f}%" in text
    for name, width in result.widths.items():
        assert re.search(rf"{name}\s+\d+\s+{width}\s", text), name
    assert str(result.quality) in text
    assert "dsa-hw verify small/plan.json --model small" in text


def test_names_of_the_user_are_text(result: dsa_hw.Allocation, tmp_path: Path) -> None:
    path = write_allocation(result, tmp_path / "index.html", model="<img src=x onerror=alert(1)>")
    page = path.read_text()
    assert "<img" not in page
    assert "&lt;img src=x" in page
