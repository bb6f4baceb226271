"""Render the findings of a comparison as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from dsa_hw.experiments.report import plots
from dsa_hw.experiments.report.allocation import verdict_mark
from dsa_hw.experiments.report.findings import Findings, seconds
from dsa_hw.experiments.report.templating import Card, Cell, Picture, Table, render_page, wrapped
from dsa_hw.pipeline.reading import Verdict
from dsa_hw.training.intervals import share_interval
from dsa_hw.utils.files import write_text
from dsa_hw.utils.text import percent

__all__ = ["render", "write"]

_NOT_SHOWN = ("model", "data", "command", "version", "date", "note", "limits")
_NONE = "\N{EN DASH}"


def write(findings: Findings, path: Path) -> Path:
    """Write the page to ``path``, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, render(findings))
    return path


def render(findings: Findings) -> str:
    """Return the page as text."""
    about = findings.about
    warnings = [about["note"]] if about.get("note") else []
    if not findings.rows["trusted"].all():
        warnings.insert(0, "Some latencies on this page cannot be trusted under the measuring rules; they are marked.")
    pictures = [_fronts(findings), _keep(findings), _prediction(findings), _teeth(findings), _convergence(findings)]
    return render_page(
        "comparison.html",
        title=f"{about.get('model', 'network')} on {about.get('target', 'its target')}: budgets compared",
        version=about.get("version", ""),
        date=about.get("date", ""),
        where=" · ".join(about.get(key, "") for key in ("model", "data", "target", "date")),
        headline=findings.headline(),
        verdict=findings.verdict(),
        lede=" ".join(findings.lede()),
        warnings=warnings,
        cards=_cards(findings),
        equal=_equal(findings),
        networks=_networks(findings),
        pictures=[picture for picture in pictures if picture is not None],
        measured=[(key, value) for key, value in about.items() if key not in _NOT_SHOWN],
        limits=[line for line in about.get("limits", "").split("\n") if line],
        command=wrapped(about.get("command", "")),
        widths=_widths(findings),
        widths_summary=f"Channels that each network keeps in {len(findings.sizes)} channel groups",
    )


def _name(row: pd.Series[Any]) -> str:
    """Return the name of a network: ``latency budget of 50%``."""
    if row["kind"] == "dense":
        return "dense"
    return f"{plots.budget_title(row['kind'])} of {row['asked']}"


def _cards(findings: Findings) -> list[Card]:
    dense, two = findings.dense, findings.asked_alike()
    chosen = list(two) if two else [row for _, row in findings.pruned().iterrows()][:3]
    if pairs := findings.pairs():
        named = {str(r["id"]) for r in chosen}
        chosen += [r for r in pairs[0] if str(r["id"]) not in named][: 4 - len(chosen)]
    return [
        Card(
            _name(row) + (", at the same latency" if row["matches"] else ""),
            percent(row["accuracy"]),
            f"accuracy; {seconds(row['seconds'])}"
            + ("" if row["kind"] == "dense" else f", {percent(row['seconds'] / dense['seconds'])} of dense"),
            row["kind"],
        )
        for row in [dense, *chosen]
    ]


def _equal(findings: Findings) -> Table | None:
    rows = []
    for ours, theirs in findings.pairs():
        d = findings.difference(str(ours["id"]), str(theirs["id"]))
        other = "FLOPs budget" if theirs["kind"] == "flops" else "the other"
        more = {"inconclusive": "inconclusive", "better": "latency budget", "worse": other}[d.verdict]
        against = f"{ours['method']}, against {plots.budget_title(theirs['kind'])}, {theirs['method']}"
        rows.append(
            [
                Cell(f"latency {ours['asked']}", against, kind="latency"),
                Cell(seconds(ours["seconds"]), _interval(ours)),
                Cell(seconds(theirs["seconds"]), _interval(theirs)),
                Cell(f"{theirs['seconds'] / ours['seconds']:.3f}"),
                Cell(percent(ours["accuracy"])),
                Cell(percent(theirs["accuracy"])),
                Cell(
                    f"{d.points:+.1f}",
                    f"± {d.error:.1f}" if d.error == d.error else "",
                    mark=d.verdict if d.verdict in ("better", "worse") else "",
                ),
                Cell(more),
            ]
        )
    head = [Cell(t) for t in ("network", "its latency", "the other's", "ratio", "its accuracy", "the other's")]
    head += [Cell("difference", "points, 95%"), Cell("more accurate")]
    return Table("Accuracy at equal measured latency", head, rows) if rows else None


def _interval(row: pd.Series[Any]) -> str:
    return f"{1e3 * row['low']:#.3g} {_NONE} {1e3 * row['high']:#.3g}"


def _accuracy_interval(findings: Findings, row: pd.Series[Any]) -> str:
    """Return Wilson's interval over the test images; empty where single predictions are not known."""
    correct = findings.correct.get(str(row["id"]))
    if correct is None:
        return ""
    found = share_interval(int(correct.sum()), len(correct), 0.95)
    return f"{100 * found.low:.1f} {_NONE} {100 * found.high:.1f}"


def _verdict(row: pd.Series[Any]) -> Cell:
    """Return whether the network is within the budget that it was made for."""
    verdict = row.get("verdict")
    if row["kind"] == "dense" or row["matches"] or not isinstance(verdict, str) or not verdict:
        return Cell(_NONE)
    return Cell(verdict, mark=verdict_mark(Verdict(verdict)))


def _networks(findings: Findings) -> Table:
    dense = findings.dense
    rows = []
    for _, row in findings.rows.iterrows():
        sub = row["method"] or "as trained"
        if row["matches"]:
            sub += f", at the latency of {_name(findings.row(str(row['matches'])))}"
        doubt = "" if row["trusted"] else " (not trusted)"
        rows.append(
            [
                Cell(_name(row), sub, kind=row["kind"]),
                _verdict(row),
                Cell(f"{seconds(row['seconds'])}{doubt}", _interval(row)),
                Cell(percent(row["seconds"] / dense["seconds"])),
                Cell(_NONE if pd.isna(row["predicted"]) else seconds(row["predicted"])),
                Cell(f"{row['flops'] / 1e6:.2f} M", percent(row["flops"] / dense["flops"])),
                Cell(f"{row['params'] / 1e3:.1f} k", percent(row["params"] / dense["params"])),
                Cell(_NONE if pd.isna(row["accuracy_before"]) else percent(row["accuracy_before"])),
                Cell(percent(row["accuracy"]), _accuracy_interval(findings, row)),
            ]
        )
    head = [Cell("network"), Cell("budget"), Cell("latency", "95% interval, ms")]
    head += [Cell(text) for text in ("of dense", "predicted", "FLOPs", "parameters")]
    head += [Cell("accuracy", "before fine-tuning"), Cell("accuracy", "after, 95% interval")]
    return Table("All networks", head, rows)


def _fronts(findings: Findings) -> Picture:
    rows = findings.rows[findings.rows["kind"] != "dense"]
    points = "; ".join(
        f"{_name(r)} ({r['method']}): {seconds(r['seconds'])}, {percent(r['accuracy'])}" for _, r in rows.iterrows()
    )
    caption = (
        "Up and to the left is better. Every point is one trained network, measured in the same interleaved session."
    )
    best = rows.sort_values(["accuracy", "seconds"], ascending=[True, False]).iloc[-1] if len(rows) else findings.dense
    title = (
        f"Of the pruned networks, that of the {_name(best)} has the highest accuracy: {percent(best['accuracy'])} at "
        f"{seconds(best['seconds'])}"
    )
    if (rows["accuracy"] == best["accuracy"]).sum() > 1:
        title = (
            f"Of the pruned networks with the highest accuracy, {percent(best['accuracy'])}, that of the {_name(best)} "
            f"is the fastest: {seconds(best['seconds'])}"
        )
    if not len(rows):
        title = "Nothing was pruned"
    description = f"Accuracy against measured latency. {points}."
    return plots.picture(title, plots.fronts(findings), "fronts", caption, description)


def _two(findings: Findings) -> tuple[str, str] | None:
    """Return the latency-budget network and a FLOPs-budget network, at equal latency if there is one."""
    pairs = findings.pairs()
    if pairs:
        return str(pairs[0][0]["id"]), str(pairs[0][1]["id"])
    rows = findings.rows
    sides = [rows[rows["kind"] == kind]["id"] for kind in ("latency", "flops")]
    return (str(sides[0].iloc[0]), str(sides[1].iloc[0])) if all(len(s) for s in sides) else None


def _keep(findings: Findings) -> Picture | None:
    chosen = _two(findings)
    if chosen is None:
        return None
    difference = findings.widths.loc[chosen[0]] - findings.widths.loc[chosen[1]]
    gap = pd.Series(difference.to_numpy(float) / findings.sizes, index=list(findings.widths.columns))
    where = str(gap.abs().idxmax())
    names = [plots.budget_title(findings.row(id)["kind"]) for id in chosen]
    shares = [
        findings.widths.loc[id][where] / findings.sizes[list(findings.widths.columns).index(where)] for id in chosen
    ]
    title = (
        f"The budgets differ most at {where}: the {names[0]} keeps {percent(shares[0], 0)}, the {names[1]} "
        f"{percent(shares[1], 0)}"
    )
    if not gap.abs().max():
        title = "Both budgets chose the same widths"
    caption = "Kept channels of every channel group, in the order of the network."
    return plots.picture(title, plots.keep_ratios(findings, *chosen), "keep", caption)


def _prediction(findings: Findings) -> Picture | None:
    cost = findings.cost
    if cost is None or cost.fitted is None:
        return None
    pruned = findings.rows[findings.rows["kind"] != "dense"]
    off = (pruned["predicted"] / pruned["seconds"] - 1).abs()
    caption = (
        f"Cost model {cost.name}, fitted to {cost.provenance.configurations} configurations with "
        f"{cost.provenance.holdout} held out. Measured against predicted latency."
    )
    title = f"Predicted latencies are off by {percent(off.mean())} on average, {percent(off.max())} at worst"
    return plots.picture(title, plots.prediction(findings), "prediction", caption)


def _teeth(findings: Findings) -> Picture | None:
    found = plots.saw_tooth(findings.profile) if findings.profile is not None else None
    if found is None:
        return None
    figure, group, worst = found
    title = "No channel count is slower than its neighbours predict"
    if worst > 0:
        title = f"Channel counts off the grid take up to {percent(worst, 0)} longer than widths on it predict"
    caption = f"Measured time against channels of {group}."
    return plots.picture(title, figure, "teeth", caption)


def _convergence(findings: Findings) -> Picture | None:
    figure = plots.convergence(findings)
    if figure is None:
        return None
    id, history = next(iter(plots.drawn_histories(findings).items()))
    ends = [percent(float(history[name].iloc[-1])) for name in ("cost", "limit")]
    name = _name(findings.row(id))
    title = f"The allocation for the {name} ends at {ends[0]} of the dense cost, with a limit of {ends[1]}"
    caption = "The limit falls to the budget during the allocation; solid lines: cost at the keep ratios of each step."
    return plots.picture(title, figure, "convergence", caption)


def _widths(findings: Findings) -> Table:
    head = [Cell("channel group"), Cell("dense")]
    for id in findings.widths.index:
        row = findings.row(str(id))
        head.append(Cell(_name(row), f"{row['method']}{', equal latency' if row['matches'] else ''}"))
    rows = [
        [Cell(str(name)), Cell(str(int(size))), *(Cell(str(int(w))) for w in findings.widths[name])]
        for name, size in zip(findings.widths.columns, findings.sizes, strict=True)
    ]
    return Table("Widths per channel group", head, rows)
