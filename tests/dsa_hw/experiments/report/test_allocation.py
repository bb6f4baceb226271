"""The page of an allocation: every number of its certificate, whole and by itself."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from pathlib import Path

import dsa_hw
from dsa_hw.channels import find_groups
from dsa_hw.experiments.report import flops_share, render_allocation, write_allocation
from tests.dsa_hw.experiments.report.conftest import small_dense
from tests.dsa_hw.experiments.report.test_page import read


def text_of(page: str) -> str:
    text = html.unescape(re.sub(r"<(style|script|svg).*?</\1>|<[^>]*>", " ", page, flags=re.S)).replace("\xa0", " ")
    return text.replace("≤", "<=").replace("µs", "us")


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
    quality = small_result.quality
    assert quality.value is not None
    assert quality.drop is not None
    assert f"Accuracy is {100 * quality.value.value:.1f}% on 200 inputs (validation data)" in text
    assert f"{-100 * quality.drop.value:+.1f} points" in text
    assert "dsa-hw verify small/plan.json --model small" in text


def test_flops_stand_beside_a_measured_cost(small_result: dsa_hw.Allocation) -> None:
    share = flops_share(find_groups(small_dense(), small_result.inputs), small_result.widths)
    entry = small_result.certificate.entries[0]
    assert abs(share - entry.measured / entry.dense) < 1e-9, "the first budget counts FLOPs"
    measured = dsa_hw.LatencyBudget("50%").to_dict()
    entry = replace(entry, budget=measured, asked="latency <= 50% of the dense network", dimension="time", runs=12)
    certificate = replace(small_result.certificate, entries=(entry,))
    text = text_of(render_allocation(replace(small_result, certificate=certificate), model="small", flops=0.25))
    took = 100 * entry.measured / entry.dense
    assert f"The pruned network has 25.0% of the dense FLOPs and {took:.1f}% of the dense latency." in text
    assert "The interval of the used share decides the verdict." in text


def test_warnings_stand_before_the_numbers(small_result: dsa_hw.Allocation) -> None:
    text = text_of(render_allocation(small_result, model="small", warnings=["The weights are random."]))
    assert text.index("The weights are random.") < text.index("channels kept")


def test_names_of_the_user_are_text(small_result: dsa_hw.Allocation, tmp_path: Path) -> None:
    path = write_allocation(small_result, tmp_path / "index.html", model="<img src=x onerror=alert(1)>")
    page = path.read_text()
    assert "<img" not in page
    assert "&lt;img src=x" in page
