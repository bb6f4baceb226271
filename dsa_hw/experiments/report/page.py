"""Render findings as one HTML page; everything from outside (names of models, groups, commands) is escaped here."""

from __future__ import annotations

import html
import re
from pathlib import Path
from string import Template
from typing import Any

import pandas as pd

from dsa_hw.experiments.report import plots
from dsa_hw.experiments.report.findings import Findings, seconds
from dsa_hw.experiments.report.template import PAGE
from dsa_hw.training.intervals import share_interval
from dsa_hw.utils.files import write_text
from dsa_hw.utils.text import percent

__all__ = ["render", "write"]


def write(findings: Findings, path: Path) -> Path:
    """Write the page to ``path``, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, render(findings))
    return path


def render(findings: Findings) -> str:
    """Return the page as text."""
    about = findings.about
    title = f"{about.get('model', 'network')} on {about.get('target', 'its target')}: budgets compared"
    parts = [
        _header(findings),
        _equal(findings),
        _table(findings),
        _figures(findings),
        _measured(findings),
        _limits(findings),
        _repeat(findings),
        _widths(findings),
        f"<footer>Made by dsa-hw {_e(about.get('version', ''))} on {_e(about.get('date', ''))}. "
        "This page needs no network.</footer>",
    ]
    return Template(PAGE).substitute(title=_e(title), body="\n".join(p for p in parts if p))


def _e(value: object) -> str:
    """Escape a value; apostrophes become typographic, a number stays on one line with its unit."""
    text = re.sub(r"(?<=\w)&#x27;(?=\w)", "&rsquo;", html.escape(str(value), quote=True))
    return re.sub(r"(\d) (?=%|ms\b|MFLOPs\b)", "\\1&nbsp;", text)


def _dot(kind: str) -> str:
    return f'<span class="dot {_e(kind)}" aria-hidden="true"></span>'


def _name(row: pd.Series[Any]) -> str:
    """Return the name of a network: ``latency budget 50%``."""
    if row["kind"] == "dense":
        return "dense"
    return f"{plots.budget_title(row['kind'])} {row['asked']}"


def _header(findings: Findings) -> str:
    about = findings.about
    where = f"{about.get('model', '')} · {about.get('data', '')} · {about.get('target', '')} · {about.get('date', '')}"
    lede = " ".join(findings.lede())
    trust = findings.rows["trusted"].all()
    warning = "Some latencies on this page cannot be trusted under the measuring rules; they are marked."
    doubt = "" if trust else f'<p class="warn">{warning}</p>'
    note = f'<p class="warn">{_e(about["note"])}</p>' if about.get("note") else ""
    return (
        f'<header>\n<p class="eyebrow">{_e(where)}</p>\n<h1>{_e(findings.headline())}</h1>\n'
        f'<p class="lede">{_e(lede)}</p>\n{doubt}{note}{_cards(findings)}\n</header>'
    )


def _cards(findings: Findings) -> str:
    pairs = findings.pairs()
    first = findings.methods()[0] if findings.methods() else ""
    if pairs:
        chosen = [findings.dense, *pairs[0]]
    else:
        rows = findings.rows
        chosen = [findings.dense, *(r for _, r in rows[rows["method"] == first].iterrows())][:4]
    items = []
    for row in chosen:
        label = _name(row) + (", same latency" if row["matches"] else "")
        more = f"{seconds(row['seconds'])} · {row['flops'] / 1e6:.1f} MFLOPs"
        items.append(
            f'<li><span class="label">{_dot(row["kind"])}{_e(label)}</span>'
            f'<span class="value">{percent(row["accuracy"])}</span><span class="more">{_e(more)}</span></li>'
        )
    return f'<ul class="cards" aria-label="Test accuracy and latency of the main networks">{"".join(items)}</ul>'


def _scroll(label: str, head: list[str], rows: list[list[str]]) -> str:
    """Return a table in a box that scrolls; the cells are HTML."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>\n' for row in rows
    )
    return (
        f'<div class="scroll" role="region" aria-label="{_e(label)}" tabindex="0"><table>\n'
        f"<thead><tr>{top}</tr></thead>\n<tbody>\n{body}</tbody></table></div>"
    )


def _equal(findings: Findings) -> str:
    pairs = findings.pairs()
    if not pairs:
        return ""
    rows = []
    for ours, theirs in pairs:
        d = findings.difference(str(ours["id"]), str(theirs["id"]))
        sure = f"<small>± {d.error:.1f}</small>" if d.error == d.error else ""
        mark = {"better": "better", "worse": "worse"}.get(d.verdict, "")
        rows.append(
            [
                f"{_dot('latency')}latency {_e(ours['asked'])}"
                f"<small>{_e(ours['method'])}, against {_e(plots.budget_title(theirs['kind']))}, "
                f"{_e(theirs['method'])}</small>",
                f"{_e(seconds(ours['seconds']))}<small>{_interval(ours)}</small>",
                f"{_e(seconds(theirs['seconds']))}<small>{_interval(theirs)}</small>",
                f"{theirs['seconds'] / ours['seconds']:.3f}",
                percent(ours["accuracy"]),
                percent(theirs["accuracy"]),
                f'<span class="{mark}">{d.points:+.1f}</span>{sure}',
                _e(
                    {
                        "inconclusive": "inconclusive",
                        "better": "latency budget",
                        "worse": "FLOPs budget" if theirs["kind"] == "flops" else "the other",
                    }[d.verdict]
                ),
            ]
        )
    head = [
        "network",
        "its latency",
        "the other&rsquo;s",
        "ratio",
        "its accuracy",
        "the other&rsquo;s",
        "difference<small>points, 95%</small>",
        "more accurate",
    ]
    text = (
        "For a fair comparison the other budget is changed until its network has the same measured latency as the "
        "network of the latency budget. Then only the accuracies differ. The error of the difference is over paired "
        "test images; it does not include the variation between training seeds."
    )
    table = _scroll("Accuracy at equal measured latency", head, rows)
    return f"<section>\n<h2>At equal measured latency</h2>\n<p>{text}</p>\n{table}\n</section>"


def _interval(row: pd.Series[Any]) -> str:
    return f"{1e3 * row['low']:#.3g} &ndash; {1e3 * row['high']:#.3g}"


def _accuracy_interval(findings: Findings, row: pd.Series[Any]) -> str:
    """Return Wilson's interval over the test images; empty where single predictions are not known."""
    correct = findings.correct.get(str(row["id"]))
    if correct is None:
        return ""
    found = share_interval(int(correct.sum()), len(correct), 0.95)
    return f"{100 * found.low:.1f} &ndash; {100 * found.high:.1f}"


def _table(findings: Findings) -> str:
    dense = findings.dense
    rows = []
    for _, row in findings.rows.iterrows():
        sub = row["method"] or "as trained"
        if row["matches"]:
            sub += f", at the latency of {_name(findings.row(str(row['matches'])))}"
        doubt = "" if row["trusted"] else " (not trusted)"
        before = "&ndash;" if pd.isna(row["accuracy_before"]) else percent(row["accuracy_before"])
        rows.append(
            [
                f"{_dot(row['kind'])}{_e(_name(row))}<small>{_e(sub)}</small>",
                f"{_e(seconds(row['seconds']))}{doubt}<small>{_interval(row)}</small>",
                percent(row["seconds"] / dense["seconds"]),
                "&ndash;" if pd.isna(row["predicted"]) else _e(seconds(row["predicted"])),
                f"{row['flops'] / 1e6:.2f} M<small>{percent(row['flops'] / dense['flops'])}</small>",
                f"{row['params'] / 1e3:.1f} k<small>{percent(row['params'] / dense['params'])}</small>",
                before,
                f"{percent(row['accuracy'])}<small>{_accuracy_interval(findings, row)}</small>",
            ]
        )
    head = [
        "network",
        "latency<small>95% interval, ms</small>",
        "of dense",
        "predicted",
        "FLOPs",
        "parameters",
        "accuracy<small>before fine-tuning</small>",
        "accuracy<small>after, 95% interval</small>",
    ]
    return f"<section>\n<h2>All networks</h2>\n{_scroll('All networks', head, rows)}\n</section>"


def _figure(title: str, figure: Any, name: str, alt: str, caption: str) -> str:
    picture = plots.as_svg(figure, name, alt)
    return f"<figure>\n<h3>{_e(title)}</h3>\n{picture}\n<figcaption>{_e(caption)}</figcaption>\n</figure>"


def _figures(findings: Findings) -> str:
    found = [_fronts(findings), _keep(findings), _prediction(findings), _teeth(findings), _convergence(findings)]
    return f'<section>\n<h2>Pictures</h2>\n<div class="figures">\n{"".join(f for f in found if f)}\n</div>\n</section>'


def _fronts(findings: Findings) -> str:
    rows = findings.rows[findings.rows["kind"] != "dense"]
    points = "; ".join(
        f"{_name(r)} ({r['method']}): {seconds(r['seconds'])}, {percent(r['accuracy'])}" for _, r in rows.iterrows()
    )
    caption = (
        "Up and to the left is better. Every point is one trained network, measured in the same interleaved session."
    )
    return _figure(
        "Accuracy against latency",
        plots.fronts(findings),
        "fronts",
        f"Accuracy against measured latency. {points}.",
        caption,
    )


def _two(findings: Findings) -> tuple[str, str] | None:
    """Return the latency-budget network and a FLOPs-budget network, at equal latency if there is one."""
    pairs = findings.pairs()
    if pairs:
        return str(pairs[0][0]["id"]), str(pairs[0][1]["id"])
    rows = findings.rows
    sides = [rows[rows["kind"] == kind]["id"] for kind in ("latency", "flops")]
    return (str(sides[0].iloc[0]), str(sides[1].iloc[0])) if all(len(s) for s in sides) else None


def _keep(findings: Findings) -> str:
    chosen = _two(findings)
    if chosen is None:
        return ""
    difference = findings.widths.loc[chosen[0]] - findings.widths.loc[chosen[1]]
    gap = pd.Series(difference.to_numpy(float) / findings.sizes, index=list(findings.widths.columns))
    where = str(gap.abs().idxmax())
    names = [plots.budget_title(findings.row(id)["kind"]) for id in chosen]
    shares = [
        findings.widths.loc[id][where] / findings.sizes[list(findings.widths.columns).index(where)] for id in chosen
    ]
    caption = (
        f"Largest difference: {where}, of which the {names[0]} keeps {percent(shares[0], 0)} and the {names[1]} "
        f"{percent(shares[1], 0)}."
    )
    if not gap.abs().max():
        caption = "Both budgets chose the same widths."
    return _figure(
        "What each budget keeps",
        plots.keep_ratios(findings, *chosen),
        "keep",
        f"Kept channels per channel group. {caption}",
        caption,
    )


def _prediction(findings: Findings) -> str:
    cost = findings.cost
    if cost is None or cost.fitted is None:
        return ""
    pruned = findings.rows[findings.rows["kind"] != "dense"]
    off = (pruned["predicted"] / pruned["seconds"] - 1).abs()
    caption = (
        f"Cost model {cost.name}, fitted to {cost.provenance.configurations} configurations with "
        f"{cost.provenance.holdout} held out. "
        f"The pruned networks of this page are off by {percent(off.mean())} on average, {percent(off.max())} at worst."
    )
    return _figure(
        "Predicted against measured",
        plots.prediction(findings),
        "prediction",
        f"Predicted against measured latency. {caption}",
        caption,
    )


def _teeth(findings: Findings) -> str:
    found = plots.saw_tooth(findings.profile) if findings.profile is not None else None
    if found is None:
        return ""
    figure, group, worst = found
    if worst > 0:
        caption = (
            f"Channel counts of {group}, measured on the target: off its grid they take up to {percent(worst, 0)} "
            "longer than predicted from grid-aligned widths."
        )
    else:
        caption = f"Channel counts of {group}, measured on the target: none is slower than its neighbours predict."
    return _figure(
        "Latency against channel count", figure, "teeth", f"Measured time against channels. {caption}", caption
    )


def _convergence(findings: Findings) -> str:
    figure = plots.convergence(findings)
    if figure is None:
        return ""
    caption = "The limit falls to the budget during the allocation; solid lines: cost at the keep ratios of each step."
    return _figure("Budget convergence", figure, "convergence", f"Cost against limit by step. {caption}", caption)


def _measured(findings: Findings) -> str:
    skipped = ("model", "data", "command", "version", "date", "note", "limits")
    items = "".join(
        f"<dt>{_e(key)}</dt><dd>{_e(value)}</dd>" for key, value in findings.about.items() if key not in skipped
    )
    return f"<section>\n<h2>How it was measured</h2>\n<dl>{items}</dl>\n</section>"


def _limits(findings: Findings) -> str:
    lines = [line for line in findings.about.get("limits", "").split("\n") if line]
    if not lines:
        return ""
    items = "".join(f"<li>{_e(line)}</li>" for line in lines)
    return f'<section>\n<h2>What this does not show</h2>\n<ul class="plain">{items}</ul>\n</section>'


def _repeat(findings: Findings) -> str:
    command = findings.about.get("command", "")
    if not command:
        return ""
    return (
        f'<section>\n<h2>How to repeat it</h2>\n<pre tabindex="0"><code>{html.escape(_wrapped(command))}</code></pre>\n'
        '<p class="note">The same command with the same folder continues; with a new folder it starts '
        "again.</p>\n</section>"
    )


def _wrapped(command: str) -> str:
    """Return the command with one option per line, as a shell accepts it."""
    return command.replace(" --", " \\\n  --")


def _widths(findings: Findings) -> str:
    head = [
        "channel group",
        "dense",
        *(
            f"{_e(_name(row))}<small>{_e(row['method'])}{', equal latency' if row['matches'] else ''}</small>"
            for row in (findings.row(str(id)) for id in findings.widths.index)
        ),
    ]
    rows = [
        [_e(name), str(int(size)), *(str(int(w)) for w in findings.widths[name])]
        for name, size in zip(findings.widths.columns, findings.sizes, strict=True)
    ]
    table = _scroll("Widths per channel group", head, rows)
    summary = f"<summary>Channels kept in each of {len(rows)} channel groups</summary>"
    return f"<section>\n<h2>Widths</h2>\n<details>{summary}\n{table}\n</details>\n</section>"
