"""The page: whole, by itself, with every number, and with nothing of the user's taken for HTML."""

from __future__ import annotations

import base64
import hashlib
import html
import html.parser
import re
from pathlib import Path

import pandas as pd
import pytest
from scipy.stats import binomtest

from dsa_hw.experiments.report import Findings, plots, render, write
from dsa_hw.experiments.report.findings import seconds
from tests.fakes.findings import findings as made


@pytest.fixture(scope="module")
def findings() -> Findings:
    return made()


@pytest.fixture(scope="module")
def page(findings: Findings) -> str:
    return render(findings)


class Reader(html.parser.HTMLParser):
    """Checks that tags are closed in order; collects ids, attributes and text."""

    void = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [str(v) for k, v in attrs if k == "id"]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [str(v) for k, v in attrs if k == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without a start"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


def test_parses_and_ids_are_unique(page: str) -> None:
    reader = read(page)
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids)) > 0
    assert reader.tags.count("h1") == 1
    assert reader.tags.count("figure") == 5


def test_needs_no_network(page: str) -> None:
    assert not re.search(r"https?://|//[a-z]+\.[a-z]", page)
    reader = read(page)
    assert reader.tags.count("script") == 1
    assert "link" not in reader.tags
    references = [v for k, v in reader.attributes if k in ("src", "href", "xlink:href")]
    assert references  # the plots use their own markers
    assert all(v is not None and v.startswith("#") for v in references)
    assert all(v is not None and v[1:] in reader.ids for v in references)


def test_has_the_numbers_of_every_row(page: str, findings: Findings) -> None:
    text = html.unescape(re.sub(r"<[^>]*>", " ", page)).replace("\xa0", " ")
    for _, row in findings.rows.iterrows():
        for number in (f"{1e3 * row['seconds']:#.3g}", f"{100 * row['accuracy']:.1f}%", f"{row['flops'] / 1e6:.2f} M"):
            assert number in text, (row["id"], number)
        assert f"{1e3 * row['low']:#.3g} – {1e3 * row['high']:#.3g}" in text  # noqa: RUF001
        correct = findings.correct[str(row["id"])]
        ends = binomtest(int(correct.sum()), len(correct)).proportion_ci(method="wilson")
        assert f"{100 * ends.low:.1f} – {100 * ends.high:.1f}" in text  # noqa: RUF001
    for id, widths in findings.widths.iterrows():
        assert all(f"{int(w)}" in text for w in widths), id


def test_only_the_script_of_the_page_may_run(page: str) -> None:
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1])  # type: ignore[index]
    script = re.search(r"<script>(.*?)</script>", page, re.S)[1]  # type: ignore[index]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert " on" not in " ".join(k for k, _ in read(page).attributes), "no event handlers in attributes"


def test_pictures_can_be_heard(page: str) -> None:
    labels = re.findall(r'<svg role="img" aria-label="([^"]+)"', page)
    assert len(labels) == 5
    assert all(len(label) > 40 for label in labels)


def test_colours_follow_the_theme(page: str) -> None:
    pictures = re.findall(r"<svg.*?</svg>", page, re.S)
    assert pictures
    used = {c for p in pictures for c in re.findall(r"#[0-9a-f]{6}\b", p)}
    assert used <= {"#000000"}, used  # all others are variables of the page


def test_escapes_what_the_user_named() -> None:
    evil = "<script>alert('x')</script>\"&"
    page = render(made(evil))
    assert page.count("<script") == 1, "the page's own"
    assert "&lt;script&gt;alert(" in page
    assert read(page).open == []


@pytest.mark.parametrize(
    ("accuracies", "words"),
    [
        ((0.972, 0.930), "4.2 percentage points more accurate"),
        ((0.930, 0.972), "4.2 percentage points less accurate"),
        ((0.958, 0.958), "do not differ clearly"),
    ],
)
def test_headline_goes_either_way(accuracies: tuple[float, float], words: str) -> None:
    found = made(accuracies=accuracies)
    assert found.headline() == (
        "Asked for 50% of the dense latency: the latency budget gave 49.6%, the FLOPs budget of 50% gave 61.2%."
    )
    text = " ".join(found.lede())
    assert "The network of the FLOPs budget is 22% slower than asked." in text
    assert f"Accuracy is {100 * accuracies[0]:.1f}% with the latency budget, 96.9% with the FLOPs budget" in text
    assert words in text
    assert "At the same measured latency (0.794 ms)" in text


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("NOT MET", "The latency budget of 50% is not met: measured 99.2% of the limit."),
        ("INCONCLUSIVE", "The latency budget of 50% is too close to its limit for a verdict: measured 99.2% of it."),
    ],
)
def test_a_missed_budget_is_named_first(verdict: str, words: str) -> None:
    found = made()
    found.rows["verdict"] = ["", verdict, *(len(found.rows) - 2) * [""]]
    text = html.unescape(re.sub(r"<[^>]*>", " ", render(found)))
    assert found.lede()[0] == words
    assert words in text
    assert f"{verdict} " in text[: text.index(words)], "the badge stands beside the headline"


def test_the_best_pruned_network_is_not_called_better_than_the_dense_one(page: str) -> None:
    assert "Of the pruned networks, that of the latency budget of 50% has the highest accuracy: 97.2%" in page


def test_of_equally_accurate_networks_the_fastest_is_named() -> None:
    found = made()
    found.rows["accuracy"] = 0.972
    page = html.unescape(render(found)).replace("\xa0", " ")
    pruned = found.rows[found.rows["kind"] != "dense"]
    fastest = seconds(pruned["seconds"].min())
    assert "Of the pruned networks with the highest accuracy, 97.2%, that of" in page
    assert f"is the fastest: {fastest}" in page
    low, high = plots.fronts(found).axes[0].get_ylim()
    assert (high - low, high <= 100.2) == (pytest.approx(2), True)


def test_write_is_whole_or_not_at_all(tmp_path: Path, findings: Findings) -> None:
    path = write(findings, tmp_path / "deep" / "index.html")
    assert path.read_text().rstrip().endswith("</html>")
    assert [p.name for p in path.parent.iterdir()] == ["index.html"]


def test_a_front_is_two_points_high_and_ends_at_100() -> None:
    rows = pd.DataFrame(
        {
            "asked": ["90%", "50%"],
            "limit": [9e-4, 5e-4],
            "measured": [8.8e-4, 4.9e-4],
            "dense": 1e-3,
            "accuracy": [0.997, 0.992],
        }
    )
    rows = rows.assign(low=rows["measured"], high=rows["measured"])
    low, high = plots.front(rows, "latency", "s").axes[0].get_ylim()
    assert high - low == pytest.approx(2)
    assert low < 99.2 < 99.7 < high < 100.5
    wide = plots.front(rows.assign(accuracy=[0.9, 0.5]), "latency", "s").axes[0].get_ylim()
    assert wide[0] < 50 < 90 < wide[1]
