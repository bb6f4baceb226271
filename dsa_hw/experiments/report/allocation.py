"""Render the result of one allocation as an HTML page: asked, got, verdict, what is left, and the widths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from budgets import flops
from budgets.budget import BUDGETS, MeasuredBudget
from dsa_hw.channels import ChannelGroups
from dsa_hw.experiments.report import plots
from dsa_hw.experiments.report.templating import About, Card, Cell, Picture, Table, render_result
from dsa_hw.pipeline.certificate import Certificate, Entry
from dsa_hw.pipeline.quality import ACCURACY, METRIC, Quality
from dsa_hw.pipeline.reading import Verdict, worst_verdict
from dsa_hw.pipeline.result import Allocation
from dsa_hw.units import format_magnitude
from dsa_hw.utils.files import write_text
from dsa_hw.utils.text import percent

__all__ = [
    "UNKNOWN",
    "allocation_pictures",
    "budgets_table",
    "environment_facts",
    "facts",
    "flops_share",
    "quality_card",
    "quality_sentence",
    "render_allocation",
    "verdict_mark",
    "widths_summary",
    "widths_table",
    "write_allocation",
]

UNKNOWN = "\N{EN DASH}"
_VERDICTS = {
    Verdict.MET: ("The budget is met.", "All budgets are met."),
    Verdict.NOT_MET: ("The budget is not met.", "Not all budgets are met."),
    Verdict.INCONCLUSIVE: (
        "Inconclusive: the measurement cannot tell whether the budget is met.",
        "Inconclusive: the measurements cannot tell whether all budgets are met.",
    ),
}
_NOT_VISIBLE = "not visible"


def write_allocation(
    result: Allocation,
    path: Path,
    *,
    model: str,
    command: str = "",
    flops: float | None = None,
    warnings: Sequence[str] = (),
) -> Path:
    """Write the page of a result to ``path``, whole or not at all; arguments as for `render_allocation`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, render_allocation(result, model=model, command=command, flops=flops, warnings=warnings))
    return path


def render_allocation(
    result: Allocation, *, model: str, command: str = "", flops: float | None = None, warnings: Sequence[str] = ()
) -> str:
    """Return the page of a result as text.

    Args:
        result: The result.
        model: Name of the network.
        command: The command that verifies the result.
        flops: FLOPs of the network, as a share of the dense one's; None if they are not known.
        warnings: What a reader must know before the numbers, e.g. that the weights are random.
    """
    certificate = result.certificate
    entries = certificate.entries
    shapes = ", ".join("x".join(map(str, shape)) for shape in result.plan.inputs)
    about = About(
        model,
        " · ".join([shapes, *dict.fromkeys(e.target for e in entries if e.target != "counted")]),
        certificate.date,
        certificate.versions.get("dsa_hw", ""),
        command,
        facts(certificate, result.recovery),
    )
    lede = [_VERDICTS[worst_verdict([e.verdict for e in entries])][len(entries) > 1], quality_sentence(certificate)]
    return render_result(
        about,
        title=", ".join(entry.asked for entry in entries),
        note="Verify measures the network again and says whether the certificate still holds.",
        headline=_headline(entries),
        verdict=str(certificate.verdict),
        lede=" ".join(lede + _contrast(entries, flops)),
        warnings=[*warnings, *(entry.doubt for entry in entries if entry.doubt)],
        cards=_cards(result, flops),
        table=budgets_table(result),
        table_note=_budgets_note(entries),
        pictures=allocation_pictures(result),
        widths=widths_table(result),
        widths_summary=widths_summary(result),
    )


def facts(certificate: Certificate, recovery: str = "") -> list[tuple[str, str]]:
    """Return how the networks were measured, and with what; ``recovery``: what was done to the weights."""
    return [
        ("networks measured", str(certificate.measurements)),
        *[(f"runs for {e.asked}", f"{e.runs}; {e.statistic}") for e in certificate.entries if e.runs],
        *([("weights", recovery)] if recovery else []),
        *[("int8", str(calibration)) for calibration in certificate.int8],
        *environment_facts(certificate),
    ]


def environment_facts(certificate: Certificate) -> list[tuple[str, str]]:
    """Return the machine, its settings and the versions of a certificate."""
    environment = {name: value for entry in certificate.entries for name, value in entry.environment.items()}
    hidden = sorted(name for name, value in environment.items() if value == _NOT_VISIBLE)
    shown = {name: value for name, value in environment.items() if value != _NOT_VISIBLE}
    return [
        *sorted((shown | dict(certificate.versions)).items()),
        *([("not visible to this program", ", ".join(hidden))] if hidden else []),
    ]


def flops_share(groups: ChannelGroups, widths: pd.Series[int]) -> float:
    """Return the FLOPs of a network as a share of the dense one's.

    Args:
        groups: The channel groups of the dense network.
        widths: Channels that each group keeps.
    """
    cost = flops(groups)
    return float(cost(widths.to_numpy(float) / groups.sizes) / cost.dense)


def _kind(entry: Entry) -> str:
    """Return the key of a budget, which has a colour."""
    return next((key for key, cls in BUDGETS.items() if cls.__name__ == entry.budget["kind"]), "")


def _headline(entries: Sequence[Entry]) -> str:
    """Return what was asked and what came out."""

    def got(entry: Entry) -> str:
        if not math.isfinite(entry.measured):
            return "nothing that could be measured"
        return format_magnitude(entry.measured, entry.dimension)

    first = entries[0]
    if len(entries) > 1:
        return f"Asked: {'; '.join(e.asked for e in entries)}. Got: {'; '.join(map(got, entries))}."
    limit = format_magnitude(first.limit, first.dimension)
    that_is = f", that is {limit}" if _is_relative(first) and math.isfinite(first.limit) else ""
    return f"Asked: {first.asked}{that_is}. Got: {got(first)}."


def _is_relative(entry: Entry) -> bool:
    """Return whether a budget is a share of the dense cost."""
    return str(entry.budget.get("amount", "")).rstrip().endswith("%")


def _contrast(entries: Sequence[Entry], flops: float | None) -> list[str]:
    """Return how FLOPs and the measured cost differ, as a sentence; nothing where the cost is not measured."""
    entry = entries[0]
    measured = issubclass(BUDGETS.get(_kind(entry), object), MeasuredBudget)
    if flops is None or not measured or not math.isfinite(entry.measured / entry.dense):
        return []
    title = BUDGETS[_kind(entry)].title
    share = percent(entry.measured / entry.dense)
    return [f"The pruned network has {percent(flops)} of the dense FLOPs and {share} of the dense {title}."]


def _cards(result: Allocation, flops: float | None) -> list[Card]:
    entries, quality = result.certificate.entries, result.quality
    entry = entries[0]

    def say(value: float) -> str:
        return format_magnitude(value, entry.dimension) if math.isfinite(value) else UNKNOWN

    how = entry.estimated or ("measured" if entry.runs else "counted")
    used = f"{percent(entry.utilisation)} of the limit" if math.isfinite(entry.utilisation) else how
    if entry.runs and not entry.estimated:
        used += f", {_used_interval(entry)}"
    kept, total = int(result.widths.sum()), sum(result.plan.sizes)
    last = Card("channels kept", percent(kept / total), f"{kept} of {total} in {len(result.widths)} groups")
    if flops is not None and all(_kind(e) != "flops" for e in entries):
        last = Card("its FLOPs", percent(flops), "of the dense network", "flops")
    return [
        Card("dense network", say(entry.dense), how, "dense"),
        Card("limit", say(entry.limit), entry.asked),
        Card("pruned network", say(entry.measured), used, _kind(entry)),
        quality_card(quality),
        last,
    ]


def _used_interval(entry: Entry) -> str:
    most = percent(entry.most_used) if math.isfinite(entry.most_used) else "unbounded"
    return f"{percent(entry.confidence, 0)} interval {percent(entry.least_used)} to {most}"


def _budgets_note(entries: Sequence[Entry]) -> str:
    """Return why a verdict can be clear although the interval of the time contains the limit."""
    if not any(e.runs and not e.estimated and _is_relative(e) for e in entries):
        return ""
    return (
        "The interval of the used share decides the verdict. It comes from runs side by side with the dense network, "
        "so that it is narrower than the interval of the absolute value."
    )


def quality_sentence(certificate: Certificate) -> str:
    """Return the accuracy beside the dense network's, or what is known instead."""
    found = certificate.quality
    if found.measure != ACCURACY or found.value is None or found.dense is None or found.drop is None:
        return str(found)
    ends = f"{-100 * found.drop.high:+.1f} to {-100 * found.drop.low:+.1f}"
    text = (
        f"Accuracy is {percent(found.value.value)} on {found.inputs} inputs ({found.source}), against "
        f"{percent(found.dense.value)} of the dense network: {-100 * found.drop.value:+.1f} points, "
        f"{100 * found.confidence:.3g}% interval {ends}."
    )
    return f"{text} Fine-tune before use." if found.needs_training else text


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
    return {Verdict.MET: "better", Verdict.NOT_MET: "worse", Verdict.INCONCLUSIVE: "unsure"}[verdict]


def budgets_table(result: Allocation) -> Table:
    """Return a row for each budget."""
    rows = []
    for entry in result.certificate.entries:

        def say(value: float, dimension: str = entry.dimension) -> str:
            return format_magnitude(value, dimension) if math.isfinite(value) else UNKNOWN

        used = percent(entry.utilisation) if math.isfinite(entry.utilisation) else UNKNOWN
        run = bool(entry.runs) and not entry.estimated
        span = f"95% interval {say(entry.low)} to {say(entry.high)}" if run else entry.estimated or "counted"
        rows.append(
            [
                Cell(entry.asked, entry.target, kind=_kind(entry)),
                Cell(str(entry.verdict), mark=verdict_mark(entry.verdict)),
                Cell(used, _used_interval(entry) if run else ""),
                Cell(say(entry.measured), span),
                Cell(say(entry.limit)),
                Cell(say(entry.predicted)),
            ]
        )
    head = [Cell(t) for t in ("budget", "verdict", "used share of the limit", "measured", "limit", "predicted")]
    return Table("Budgets", head, rows)


def allocation_pictures(result: Allocation) -> list[Picture]:
    """Return what is kept of each channel group, and the steps of the allocation."""
    ratios = result.keep_ratios
    title = f"{ratios.idxmin()} keeps the least: {percent(float(ratios.min()), 0)} of its channels"
    if ratios.min() == ratios.max():
        title = f"Every channel group keeps {percent(float(ratios.min()), 0)} of its channels"
    shown = plots.shown_groups(len(ratios))
    found = [plots.picture(title, plots.kept_channels(ratios), "kept", f"Kept channels of {shown}.")]
    if (steps := plots.steps(result.history)) is not None:
        last = float(result.history["cost"].iloc[-1])
        title = f"The allocation ends at {percent(last)} of the dense cost"
        caption = "The limit (dotted) falls to the budget during the allocation, so that the loss can steer."
        found.append(plots.picture(title, steps, "steps", caption))
    return found


def widths_summary(result: Allocation) -> str:
    """Return how many channels are kept."""
    kept, total = int(result.widths.sum()), sum(result.plan.sizes)
    return f"{kept} of {total} channels are kept, in {len(result.widths)} channel groups"


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
