"""Render a sweep or a minimisation as an HTML page: asked, got, verdict, accuracy kept, and what it costs in FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from budgets import Budget
from budgets.budget import FlopsBudget
from dsa_hw.experiments.report import plots
from dsa_hw.experiments.report.allocation import (
    UNKNOWN,
    allocation_pictures,
    budgets_table,
    facts,
    quality_card,
    quality_sentence,
    verdict_mark,
    widths_summary,
    widths_table,
)  # fmt: skip
from dsa_hw.experiments.report.templating import About, Card, Cell, Picture, Table, render_result
from dsa_hw.pipeline.quality import ACCURACY, Quality
from dsa_hw.pipeline.reading import Verdict, worst_verdict
from dsa_hw.pipeline.result import Allocation
from dsa_hw.utils.files import write_text
from dsa_hw.utils.text import percent

__all__ = ["render_minimum", "render_sweep", "write_minimum", "write_sweep"]

_TRIALS_NOTE = (
    "On the validation data. A network is within the drop if its whole interval is. With several networks to try, "
    "these intervals are wider than those of the certificate."
)


def write_sweep(table: pd.DataFrame, budget: Budget, about: About, path: Path) -> Path:
    """Write the page of a sweep, whole or not at all; arguments as for `render_sweep`."""
    write_text(path, render_sweep(table, budget, about))
    return path


def write_minimum(
    result: Allocation, front: pd.DataFrame, cost: Budget, flops: float, about: About, path: Path
) -> Path:
    """Write the page of a minimisation, whole or not at all; arguments as for `render_minimum`."""
    write_text(path, render_minimum(result, front, cost, flops, about))
    return path


def render_sweep(table: pd.DataFrame, budget: Budget, about: About) -> str:
    """Return the page of a sweep.

    Args:
        table: What `dsa_hw.sweep` returns.
        budget: One of its budgets.
        about: Model, target and command.
    """
    infeasible: Mapping[str, str] = table.attrs["infeasible"]
    verdicts = [Verdict(verdict) for verdict in table["verdict"]]
    met = [verdict == Verdict.MET for verdict in verdicts]
    verdict = worst_verdict([*verdicts, *(Verdict.NOT_MET for _ in infeasible)])
    count = len(table) + len(infeasible)
    asked = [*table["asked"], *infeasible]
    between = f"from {asked[0]} to {asked[-1]}" if count > 1 else f"of {asked[0]}"
    got = [(sum(met), "met"), (verdicts.count(Verdict.INCONCLUSIVE), "inconclusive")]
    got += [(verdicts.count(Verdict.NOT_MET), "not met"), (len(infeasible), "impossible")]
    said = ", ".join(f"{number} {what}" for number, what in got if number)
    headline = f"Asked: {count} {budget.title} budget{'s' if count > 1 else ''} {between}. Got: {said}."
    smallest = table[met].iloc[-1] if any(met) else None
    groups = len(table.attrs["dense"]["widths"])
    return render_result(
        about,
        title=f"{count} {budget.title} budget{'s' if count > 1 else ''}",
        headline=headline,
        verdict=str(verdict),
        lede=_sweep_lede(table, smallest, budget),
        warnings=list(infeasible.values()),
        cards=_sweep_cards(table, smallest, budget),
        table=_points(table, budget),
        table_note="The interval of the used share decides the verdict." if _is_measured(table) else "",
        pictures=_sweep_pictures(table, budget),
        widths=_all_widths(table),
        widths_summary=f"Channels that each network keeps in {groups} channel groups",
    )


def _is_measured(table: pd.DataFrame) -> bool:
    """Return whether costs are measured; those that are counted have no interval."""
    return bool((table["low"] < table["high"]).any())


def _closest(table: pd.DataFrame) -> pd.Series[Any]:
    """Return the network that uses the least share of its limit."""
    return table.sort_values("utilisation").iloc[0]


def _sweep_lede(table: pd.DataFrame, smallest: pd.Series[Any] | None, budget: Budget) -> str:
    row, dense = _closest(table) if smallest is None else smallest, table.attrs["dense"]
    share = percent(row["measured"] / row["dense"])
    which = "The smallest network that meets its budget"
    text = ""
    if smallest is None:
        text = f"No network was shown to be within its budget. The closest uses {percent(row['utilisation'])} of its "
        text += "limit. "
        which = "It"
    text += f"{which} has {share} of the dense {budget.title}"
    text += "." if _counts_flops(budget) else f", and {percent(row['flops'] / dense['flops'])} of the dense FLOPs."
    if pd.isna(row["accuracy"]) or dense["accuracy"] is None:
        return f"{text} Its accuracy is not known, because there are no labelled data."
    return f"{text} Its accuracy on the test images is {percent(row['accuracy'])}, dense {percent(dense['accuracy'])}."


def _counts_flops(budget: Budget) -> bool:
    return isinstance(budget, FlopsBudget)


def _sweep_cards(table: pd.DataFrame, smallest: pd.Series[Any] | None, budget: Budget) -> list[Card]:
    dense, row = table.attrs["dense"], _closest(table) if smallest is None else smallest
    how = "measured" if _is_measured(table) else "counted"
    limit = "limit of the closest" if smallest is None else "smallest limit that is met"
    cards = [
        Card("dense network", budget.format(float(row["dense"])), how, "dense"),
        Card(limit, budget.format(row["limit"]), f"asked {row['asked']}"),
        Card("its network", budget.format(row["measured"]), f"{percent(row['utilisation'])} of the limit", budget.key),
    ]
    if dense["accuracy"] is None or pd.isna(row["accuracy"]):
        cards.append(Card("accuracy kept", UNKNOWN, "no labelled data"))
    else:
        more = f"dense {percent(dense['accuracy'])}, {_drop(row['accuracy'], dense['accuracy'])}"
        cards.append(Card("accuracy kept", percent(row["accuracy"]), more))
    if not _counts_flops(budget):
        cards.append(Card("its FLOPs", percent(row["flops"] / dense["flops"]), "of the dense network", "flops"))
    return cards


def _drop(accuracy: float, dense: float) -> str:
    return f"{100 * (accuracy - dense):+.1f} points"


def _points(table: pd.DataFrame, budget: Budget) -> Table:
    dense = table.attrs["dense"]
    rows = []
    for _, row in table.iterrows():
        measured = row["low"] < row["high"]
        known = dense["accuracy"] is not None and not pd.isna(row["accuracy"])
        span = f"{budget.format(row['low'])} to {budget.format(row['high'])}"
        used = f"{percent(row['least_used'])} to {percent(row['most_used'])}"
        rows.append(
            [
                Cell(row["asked"], kind=budget.key),
                Cell(row["verdict"], mark=verdict_mark(Verdict(row["verdict"]))),
                Cell(
                    percent(row["accuracy"]) if known else UNKNOWN,
                    _drop(row["accuracy"], dense["accuracy"]) if known else "",
                ),
                Cell(budget.format(row["measured"]), span if measured else "counted"),
                Cell(budget.format(row["limit"])),
                Cell(
                    percent(row["utilisation"]) if math.isfinite(row["utilisation"]) else UNKNOWN,
                    used if measured else "",
                ),
                *([] if _counts_flops(budget) else [Cell(percent(row["flops"] / dense["flops"]))]),
            ]
        )
    more = 4 if _counts_flops(budget) else 5
    rows += [
        [Cell(name, kind=budget.key), Cell("cannot be met", mark="worse"), *(Cell(UNKNOWN) for _ in range(more))]
        for name in table.attrs["infeasible"]
    ]
    head = [Cell("asked"), Cell("verdict"), Cell("accuracy", "against dense")]
    head += [Cell("measured", "95% interval") if _is_measured(table) else Cell("got"), Cell("limit")]
    head += [Cell("used", "of the limit"), *([] if _counts_flops(budget) else [Cell("FLOPs", "of dense")])]
    return Table("Asked and got", head, rows)


def _sweep_pictures(table: pd.DataFrame, budget: Budget) -> list[Picture]:
    first, last, found = table.iloc[0], table.iloc[-1], []
    if table["accuracy"].notna().all() and len(table) > 1:
        fall = 100 * float(first["accuracy"] - last["accuracy"])
        title = f"From {first['asked']} to {last['asked']} the accuracy falls by {fall:.1f} points"
        if fall <= 0:
            title = f"From {first['asked']} to {last['asked']} the accuracy does not fall ({abs(fall):+.1f} points)"
        unit = "s" if budget.dimension == "time" else budget.dimension
        caption = "Every point is a network with a certificate."
        if _is_measured(table):
            caption += f" Bars are 95% intervals of the {budget.title}."
        found.append(plots.picture(title, plots.front(table, budget.title, unit), "front", caption))
    if _is_measured(table):
        ends = list(dict.fromkeys(percent(end) for end in (table["utilisation"].min(), table["utilisation"].max())))
        title = f"The network{'s use' if len(table) > 1 else ' uses'} {' to '.join(ends)} of the limit"
        title += "s" if len(table) > 1 else ""
        caption = "A budget is met where the whole interval is on the left of the dashed line."
        found.append(plots.picture(title, plots.used_limits(table), "used", caption))
    ratios = _ratios(table)
    kept = ratios[ratios.columns[-1]]
    least = f"{kept.idxmin()} keeps the least: {percent(kept.min(), 0)} of its channels"
    title = f"Under the budget of {last['asked']}, {least}"
    caption = f"Kept channels of {plots.shown_groups(len(ratios))}: the stronger the colour, the more are kept."
    found.append(plots.picture(title, plots.kept_by_budget(ratios), "kept", caption))
    return found


def _ratios(table: pd.DataFrame) -> pd.DataFrame:
    """Return keep ratios with a row for each channel group and a column for each network."""
    sizes = pd.Series(table.attrs["dense"]["widths"])
    return pd.DataFrame({asked: pd.Series(w)[sizes.index] / sizes for asked, w in table.attrs["widths"].items()})


def _all_widths(table: pd.DataFrame) -> Table:
    sizes, widths = table.attrs["dense"]["widths"], table.attrs["widths"]
    rows = [[Cell(n), Cell(str(size)), *(Cell(str(w[n])) for w in widths.values())] for n, size in sizes.items()]
    return Table("Widths per channel group", [Cell("channel group"), Cell("dense"), *map(Cell, widths)], rows)


def render_minimum(result: Allocation, front: pd.DataFrame, cost: Budget, flops: float, about: About) -> str:
    """Return the page of a minimisation.

    Args:
        result: The network that was found.
        front: A row for each network that was tried, as in `dsa_hw.experiments.minimize.Minimum`.
        cost: What was minimised.
        flops: FLOPs of the network, as a share of the dense one's.
        about: Model, target and command.
    """
    certificate, quality = result.certificate, result.quality
    entry = certificate.entries[0]
    share = entry.measured / entry.dense
    as_points = quality.measure == ACCURACY

    def say(drop: float) -> str:
        return f"{100 * drop:.2f} points" if as_points else f"{drop:.4g}"

    most = quality.max_drop or 0.0
    got = f"{cost.format(entry.measured)}, {percent(share)} of dense"
    passing = front[front["passes"]]
    lower = int((passing["measured"] / passing["dense"] < share * (1 - 1e-9)).sum())  # that failed on the test data
    tried = f"{len(front)} network{'s were' if len(front) > 1 else ' was'} tried"
    title = f"{percent(share)} is the lowest {cost.title} whose drop is within {say(most)}; {tried}"
    if lower:
        title = f"{len(passing)} of {len(front)} networks are within {say(most)} on the validation data"
    caption = "Every point is a network that was tried, judged on the validation data; bars are confidence intervals."
    front_picture = plots.picture(title, plots.drops(front, most, cost.title, as_points=as_points), "drops", caption)
    lede = [quality_sentence(certificate), _limit_sentence(quality, say(most))]
    if lower:
        lede.append(f"The next lower {cost.title} passed on the validation data, but not on the test data.")
    by_flops = isinstance(cost, FlopsBudget)
    if not by_flops:
        lede.append(f"The network has {percent(flops)} of the dense FLOPs.")
    about = replace(about, facts=[*_limits(result), *about.facts, *facts(certificate, result.recovery)])
    return render_result(
        about,
        title=f"lowest {cost.title}",
        headline=f"Asked: the lowest {cost.title} with a drop of at most {say(most)}. Got: {got}.",
        verdict=str(certificate.verdict),
        lede=" ".join(lede),
        warnings=[e.doubt for e in certificate.entries if e.doubt],
        cards=[
            Card("dense network", cost.format(entry.dense), "", "dense"),
            Card("found", cost.format(entry.measured), f"{percent(share)} of dense", cost.key),
            quality_card(quality),
            _drop_card(quality, say),
            *([] if by_flops else [Card("its FLOPs", percent(flops), "of the dense network", "flops")]),
        ],
        table=_trials(front, cost, say),
        table_note=_TRIALS_NOTE,
        pictures=[front_picture, *allocation_pictures(result)],
        widths=widths_table(result),
        widths_summary=widths_summary(result),
    )


def _limit_sentence(quality: Quality, most: str) -> str:
    """Return whether the drop is within its limit, and on how sure a ground."""
    said = {
        Verdict.MET: f"The whole interval is within the drop of {most}.",
        Verdict.NOT_MET: f"The drop is larger than {most}.",
        Verdict.INCONCLUSIVE: f"The interval reaches beyond the drop of {most}, so the verdict is inconclusive.",
    }
    return said[quality.verdict or Verdict.INCONCLUSIVE]


def _drop_card(quality: Quality, say: Callable[[float], str]) -> Card:
    drop = quality.drop
    if drop is None:
        return Card("drop", UNKNOWN, "")
    return Card("drop", say(drop.value), f"interval {say(drop.low)} to {say(drop.high)}")


def _limits(result: Allocation) -> list[tuple[str, str]]:
    """Return a line for each budget of the certificate."""
    return [(f"budget {row[0].text}", f"{row[3].text}, {row[1].text}") for row in budgets_table(result).rows]


def _trials(front: pd.DataFrame, cost: Budget, say: Callable[[float], str]) -> Table:
    rows = [
        [
            Cell(row["asked"], kind=cost.key),
            Cell("yes" if row["passes"] else "no", mark="better" if row["passes"] else "worse"),
            Cell(say(row["drop"]), f"{say(row['drop_low'])} to {say(row['drop_high'])}"),
            Cell(cost.format(row["measured"]), percent(row["measured"] / row["dense"]) + " of dense"),
            Cell(f"{row['epochs']:g} epoch{'' if row['epochs'] == 1 else 's'}" if row["epochs"] else "none"),
        ]
        for _, row in front.iterrows()
    ]
    head = [Cell("asked"), Cell("within the drop"), Cell("drop", "confidence interval")]
    head += [Cell("measured"), Cell("fine-tuning")]
    return Table("Networks that were tried", head, rows)
