"""Render the result of one allocation as an HTML page: asked, got, verdict, what is left, and the widths."""

from __future__ import annotations

import math
from pathlib import Path

from markupsafe import Markup

from budgets.budget import BUDGETS
from dsa_hw.experiments.report import plots
from dsa_hw.experiments.report.templating import Card, Cell, Picture, Table, render_page
from dsa_hw.pipeline.certificate import Certificate, Entry
from dsa_hw.pipeline.quality import METRIC, Quality
from dsa_hw.pipeline.reading import Verdict
from dsa_hw.pipeline.result import Allocation
from dsa_hw.units import format_magnitude
from dsa_hw.utils.files import write_text
from dsa_hw.utils.text import percent

__all__ = [
    "UNKNOWN",
    "allocation_pictures",
    "budgets_table",
    "facts",
    "quality_card",
    "render_allocation",
    "verdict_mark",
    "widths_table",
    "write_allocation",
]

UNKNOWN = "\N{EN DASH}"
_VERDICTS = {
    Verdict.MET: "All budgets are met",
    Verdict.NOT_MET: "A budget is not met",
    Verdict.INCONCLUSIVE: "The measurement cannot tell whether the budgets are met",
}


def write_allocation(result: Allocation, path: Path, *, model: str, command: str = "") -> Path:
    """Write the page of a result to ``path``, whole or not at all; arguments as for `render_allocation`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, render_allocation(result, model=model, command=command))
    return path


def render_allocation(result: Allocation, *, model: str, command: str = "") -> str:
    """Return the page of a result as text.

    Args:
        result: The result.
        model: Name of the network.
        command: The command that verifies the result.
    """
    certificate = result.certificate
    entries = certificate.entries
    first = entries[0]
    shapes = ", ".join("x".join(map(str, shape)) for shape in result.plan.inputs)
    targets = ", ".join(dict.fromkeys(e.target for e in entries))
    verdict = certificate.verdict
    return render_page(
        "result.html",
        title=f"{model}: {first.asked}",
        version=certificate.versions.get("dsa_hw", ""),
        date=certificate.date,
        where=f"{model} · {shapes} · {targets} · {certificate.date}",
        headline=_headline(first),
        verdict=str(verdict),
        lede=f"{_VERDICTS[verdict]}. {certificate.quality}",
        warnings=[entry.doubt for entry in entries if entry.doubt],
        cards=_cards(result),
        table=budgets_table(result),
        pictures=allocation_pictures(result),
        measured=facts(certificate, result.recovery),
        command=command,
        note="Verify measures the network again and says whether the certificate still holds.",
        widths=widths_table(result),
    )


def facts(certificate: Certificate, recovery: str = "") -> list[tuple[str, str]]:
    """Return how the networks were measured, and with what; ``recovery``: what was done to the weights."""
    environment = {name: value for entry in certificate.entries for name, value in entry.environment.items()}
    return [
        ("networks measured", str(certificate.measurements)),
        *([("weights", recovery)] if recovery else []),
        *sorted((environment | dict(certificate.versions)).items()),
    ]


def _kind(entry: Entry) -> str:
    """Return the key of a budget, which has a colour."""
    return next((key for key, cls in BUDGETS.items() if cls.__name__ == entry.budget["kind"]), "")


def _headline(entry: Entry) -> str:
    """Return what was asked and what came out, in one sentence."""

    def say(value: float) -> str:
        return format_magnitude(value, entry.dimension)

    got = say(entry.measured) if math.isfinite(entry.measured) else "nothing that could be measured"
    return f"Asked: {entry.asked}, that is {say(entry.limit)}. Got: {got}."


def _cards(result: Allocation) -> list[Card]:
    entry, quality = result.certificate.entries[0], result.quality

    def say(value: float) -> str:
        return format_magnitude(value, entry.dimension) if math.isfinite(value) else UNKNOWN

    how = entry.estimated or ("measured" if entry.runs else "counted")
    interval = f"95% interval {say(entry.low)} to {say(entry.high)}" if entry.runs and not entry.estimated else how
    kept, total = int(result.widths.sum()), sum(result.plan.sizes)
    return [
        Card("dense network", say(entry.dense), how, "dense"),
        Card("limit", say(entry.limit), entry.asked),
        Card("pruned network", say(entry.measured), interval, _kind(entry)),
        quality_card(quality),
        Card("channels kept", percent(kept / total), f"{kept} of {total} in {len(result.widths)} groups"),
    ]


def quality_card(quality: Quality) -> Card:
    """Return the accuracy of the pruned network, or what is known instead."""
    if quality.value is None:
        return Card("quality", UNKNOWN, quality.reason or "not measured")

    def say(value: float) -> str:
        return f"{value:.4g}" if quality.measure == METRIC else percent(value)

    where = f"{quality.inputs} inputs: {quality.source}"
    if quality.dense is not None:
        where = f"dense {say(quality.dense.value)}; {where}"
    return Card(quality.name or quality.measure, say(quality.value.value), where)


def verdict_mark(verdict: Verdict) -> str:
    """Return the mark of a cell with a verdict."""
    return {Verdict.MET: "better", Verdict.NOT_MET: "worse"}.get(verdict, "")


def budgets_table(result: Allocation) -> Table:
    """Return a row for each budget."""
    rows = []
    for entry in result.certificate.entries:

        def say(value: float, dimension: str = entry.dimension) -> str:
            return format_magnitude(value, dimension) if math.isfinite(value) else UNKNOWN

        mark = verdict_mark(entry.verdict)
        used = percent(entry.utilisation) if math.isfinite(entry.utilisation) else UNKNOWN
        span = f"{percent(entry.least_used)} to {percent(entry.most_used)}" if entry.runs else ""
        rows.append(
            [
                Cell(entry.asked, entry.target, kind=_kind(entry)),
                Cell(say(entry.limit)),
                Cell(say(entry.predicted)),
                Cell(say(entry.measured), f"{say(entry.low)} to {say(entry.high)}" if entry.runs else "counted"),
                Cell(used, span),
                Cell(str(entry.verdict), f"{percent(entry.confidence, 0)} confidence" if entry.runs else "", mark=mark),
            ]
        )
    head = [Cell(t) for t in ("budget", "limit", "predicted", "measured", "used", "verdict")]
    return Table("Budgets", head, rows)


def allocation_pictures(result: Allocation) -> list[Picture]:
    """Return what is kept of each channel group, and the steps of the allocation."""
    least = str(result.keep_ratios.idxmin())
    title = f"{least} keeps the least: {percent(float(result.keep_ratios.min()), 0)} of its channels"
    caption = "Kept channels of every channel group, in the order of the network."
    figure = plots.kept_channels(result.keep_ratios)
    found = [Picture(title, Markup(plots.as_svg(figure, "kept", f"{title}. {caption}")), caption)]
    if (steps := plots.steps(result.history)) is not None:
        last = float(result.history["cost"].iloc[-1])
        title = f"The allocation ends at {percent(last)} of the dense cost"
        caption = "The limit (dotted) falls to the budget during the allocation, so that the loss can steer."
        found.append(Picture(title, Markup(plots.as_svg(steps, "steps", f"{title}. {caption}")), caption))
    return found


def widths_table(result: Allocation) -> Table:
    """Return the width of each channel group."""
    rows = [
        [
            Cell(str(name)),
            Cell(str(size)),
            Cell(str(int(width))),
            Cell(percent(width / size), sort=round(float(width / size), 6)),
        ]
        for (name, width), size in zip(result.widths.items(), result.plan.sizes, strict=True)
    ]
    return Table("Widths per channel group", [Cell(t) for t in ("channel group", "dense", "kept", "share")], rows)
