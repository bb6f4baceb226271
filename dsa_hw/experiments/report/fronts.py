"""Render a sweep or a minimisation as an HTML page: asked, got, verdict, accuracy kept, and what it costs in FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from budgets import Budget
from dsa_hw.experiments.report import plots
from dsa_hw.experiments.report.allocation import (
    UNKNOWN,
    allocation_pictures,
    budgets_table,
    facts,
    quality_card,
    verdict_mark,
    widths_table,
)  # fmt: skip
from dsa_hw.experiments.report.templating import Card, Cell, Picture, Table, render_page
from dsa_hw.pipeline.quality import ACCURACY
from dsa_hw.pipeline.reading import Verdict, worst_verdict
from dsa_hw.pipeline.result import Allocation
from dsa_hw.utils.files import write_text
from dsa_hw.utils.text import percent

__all__ = ["About", "render_minimum", "render_sweep", "write_minimum", "write_sweep"]


@dataclass(frozen=True)
class About:
    """What a page says besides its results.

    Attributes:
        model: Name of the network.
        target: Where it was measured.
        date: When, as ``2026-11-18``.
        version: Of this program.
        command: The command line; empty if there was none.
        facts: How the networks were made and measured: name, text.
    """

    model: str
    target: str
    date: str
    version: str
    command: str = ""
    facts: Sequence[tuple[str, str]] = ()


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
    return render_page(
        "result.html",
        title=f"{about.model}: {count} {budget.title} budgets",
        version=about.version,
        date=about.date,
        where=" · ".join((about.model, about.target, about.date)),
        headline=headline,
        verdict=str(verdict),
        lede=_sweep_lede(table, smallest, budget),
        warnings=[f"{name}: {why}" for name, why in infeasible.items()],
        cards=_sweep_cards(table, smallest, budget),
        table=_points(table, budget),
        pictures=_sweep_pictures(table, budget),
        measured=about.facts,
        command=_wrapped(about.command),
        note="The same command with the same folder continues; with a new folder it starts again.",
        widths=_all_widths(table),
    )


def _sweep_lede(table: pd.DataFrame, smallest: pd.Series[Any] | None, budget: Budget) -> str:
    if smallest is None:
        return "No network was measured to be within its budget."
    share = float(smallest["measured"] / smallest["dense"])
    text = (
        f"The smallest network that meets its budget has {percent(share)} of the dense {budget.title}, and "
        f"{percent(smallest['flops'] / table.attrs['dense']['flops'])} of the FLOPs."
    )
    dense = table.attrs["dense"]["accuracy"]
    if pd.isna(smallest["accuracy"]) or dense is None:
        return f"{text} Its accuracy is not known, because there are no labelled data."
    return f"{text} Its accuracy on the test images is {percent(smallest['accuracy'])}; dense {percent(dense)}."


def _sweep_cards(table: pd.DataFrame, smallest: pd.Series[Any] | None, budget: Budget) -> list[Card]:
    dense = table.attrs["dense"]
    accuracy = UNKNOWN if dense["accuracy"] is None else percent(dense["accuracy"])
    cards = [
        Card(
            "dense network",
            budget.format(float(table["dense"].iloc[0])),
            "measured" if table["low"].iloc[0] < table["high"].iloc[0] else "counted",
            "dense",
        )
    ]
    if smallest is not None:
        kept = UNKNOWN if pd.isna(smallest["accuracy"]) else percent(smallest["accuracy"])
        cards += [
            Card("smallest limit that is met", budget.format(smallest["limit"]), f"asked {smallest['asked']}"),
            Card("its network", budget.format(smallest["measured"]), _interval(smallest, budget), budget.key),
            Card("accuracy kept", kept, f"dense {accuracy}, {_drop(smallest['accuracy'], dense['accuracy'])}"),
            Card("its FLOPs", percent(smallest["flops"] / dense["flops"]), "of the dense network", "flops"),
        ]
    return cards


def _interval(row: pd.Series[Any], budget: Budget) -> str:
    if row["low"] == row["high"]:
        return "counted"
    return f"95% interval {budget.format(row['low'])} to {budget.format(row['high'])}"


def _drop(accuracy: float, dense: float | None) -> str:
    if dense is None or pd.isna(accuracy):
        return "no labelled data"
    return f"{100 * (accuracy - dense):+.1f} points"


def _points(table: pd.DataFrame, budget: Budget) -> Table:
    dense = table.attrs["dense"]
    rows = [
        [
            Cell(row["asked"], kind=budget.key),
            Cell(budget.format(row["limit"])),
            Cell(budget.format(row["measured"]), _interval(row, budget).removeprefix("95% interval ")),
            Cell(percent(row["utilisation"]) if math.isfinite(row["utilisation"]) else UNKNOWN),
            Cell(percent(row["flops"] / dense["flops"])),
            Cell(
                UNKNOWN if pd.isna(row["accuracy"]) else percent(row["accuracy"]),
                "" if pd.isna(row["accuracy"]) else _drop(row["accuracy"], dense["accuracy"]),
            ),
            Cell(row["verdict"], mark=verdict_mark(Verdict(row["verdict"]))),
        ]
        for _, row in table.iterrows()
    ]
    rows += [
        [Cell(name, kind=budget.key), *(Cell(UNKNOWN) for _ in range(5)), Cell("cannot be met", mark="worse")]
        for name in table.attrs["infeasible"]
    ]
    head = [Cell("asked"), Cell("limit"), Cell("measured", "95% interval")]
    head += [Cell("used"), Cell("FLOPs", "of dense"), Cell("accuracy", "against dense"), Cell("verdict")]
    return Table("Asked and got", head, rows)


def _sweep_pictures(table: pd.DataFrame, budget: Budget) -> list[Picture]:
    first, last = table.iloc[0], table.iloc[-1]
    used = table["utilisation"]
    said = f"{percent(used.min())} to {percent(used.max())}" if len(table) > 1 else percent(used.iloc[0])
    limits = f"The measured networks use {said} of their limits"
    found = [_picture(limits, plots.used_limits(table), "used", "Left of the dashed line a budget is met.")]
    if table["accuracy"].notna().all():
        fall = 100 * float(first["accuracy"] - last["accuracy"])
        title = f"From {first['asked']} to {last['asked']} the accuracy falls by {fall:.1f} points"
        if fall <= 0:
            title = f"From {first['asked']} to {last['asked']} the accuracy does not fall ({-fall:+.1f} points)"
        unit = "s" if budget.dimension == "time" else budget.dimension
        caption = "Every point is a network with a certificate; bars are 95% intervals."
        found.insert(0, _picture(title, plots.front(table, budget.title, unit), "front", caption))
    ratios = _ratios(table)
    least = str(ratios.mean(axis=1).idxmin())
    kept = percent(float(ratios[ratios.columns[-1]][least]), 0)
    title = f"{least} loses the most: it keeps {kept} of its channels under the budget of {last['asked']}"
    caption = "Kept channels of every channel group: the stronger the colour, the more."
    found.append(_picture(title, plots.kept_by_budget(ratios), "kept", caption))
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

    most, drop = quality.max_drop or 0.0, quality.drop
    got = f"{cost.format(entry.measured)}, {percent(share)} of dense"
    lost = UNKNOWN if drop is None else say(drop.value)
    title = f"{percent(share)} of the dense {cost.title} is the least whose drop is within {say(most)}"
    front_picture = _picture(
        title, plots.drops(front, most, cost.title, as_points=as_points), "drops",
        "Every point is a network that was tried, judged on the validation data; bars are confidence intervals.",
    )  # fmt: skip
    return render_page(
        "result.html",
        title=f"{about.model}: lowest {cost.title}",
        version=about.version,
        date=about.date,
        where=" · ".join((about.model, about.target, about.date)),
        headline=f"Asked: the lowest {cost.title} with a drop of at most {say(most)}. Got: {got}.",
        verdict=str(certificate.verdict),
        lede=f"{quality} The network has {percent(flops)} of the dense FLOPs.",
        warnings=[e.doubt for e in certificate.entries if e.doubt],
        cards=[
            Card("dense network", cost.format(entry.dense), "", "dense"),
            Card("found", cost.format(entry.measured), f"{percent(share)} of dense", cost.key),
            quality_card(quality),
            Card("drop", lost, "" if drop is None else f"interval {say(drop.low)} to {say(drop.high)}"),
            Card("its FLOPs", percent(flops), "of the dense network", "flops"),
        ],
        table=_trials(front, cost, say),
        pictures=[front_picture, *allocation_pictures(result)],
        measured=[*_limits(result), *about.facts, *facts(certificate, result.recovery)],
        command=_wrapped(about.command),
        note="The same command with the same folder continues; with a new folder it starts again.",
        widths=widths_table(result),
    )


def _limits(result: Allocation) -> list[tuple[str, str]]:
    """Return a line for each budget of the certificate."""
    return [(f"budget {row[0].text}", f"{row[3].text}, {row[5].text}") for row in budgets_table(result).rows]


def _trials(front: pd.DataFrame, cost: Budget, say: Callable[[float], str]) -> Table:
    rows = [
        [
            Cell(row["asked"], kind=cost.key),
            Cell(cost.format(row["measured"]), percent(row["measured"] / row["dense"]) + " of dense"),
            Cell(say(row["drop"]), f"{say(row['drop_low'])} to {say(row['drop_high'])}"),
            Cell(f"{row['epochs']:g} epochs" if row["epochs"] else "none"),
            Cell("yes" if row["passes"] else "no", mark="better" if row["passes"] else "worse"),
        ]
        for _, row in front.iterrows()
    ]
    head = ("asked", "measured", "drop", "fine-tuning", "within the drop")
    return Table("Networks that were tried", [Cell(text) for text in head], rows)


def _picture(title: str, figure: Any, name: str, caption: str) -> Picture:
    return Picture(title, Markup(plots.as_svg(figure, name, f"{title}. {caption}")), caption)


def _wrapped(command: str) -> str:
    """Return the command with one option per line, as a shell accepts it."""
    return command.replace(" --", " \\\n  --")
