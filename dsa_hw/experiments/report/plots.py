"""Figures of the reports, in one style, with colours for colour-blind readers.

They are drawn for a width of about 310 points, so that they can be read on a phone. In the page they are inline SVG
with the colours of the page (``as_svg``), so that they follow a dark theme. A point or a bar has its numbers as a
tooltip.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from budgets.budget import BUDGETS
from dsa_hw.experiments.report.findings import Findings
from dsa_hw.experiments.report.templating import Picture
from dsa_hw.profiles import Profile
from dsa_hw.utils.files import write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "as_svg",
    "budget_title",
    "convergence",
    "drawn_histories",
    "drops",
    "front",
    "fronts",
    "keep_ratios",
    "kept_by_budget",
    "kept_channels",
    "picture",
    "prediction",
    "saw_tooth",
    "shown_groups",
    "steps",
    "used_limits",
]

# Okabe and Ito's palette. Every colour is used once, so that as_svg can replace it by the variable of the same name.
COLOURS = {
    "ink": "#1f2933", "muted": "#7b8794", "line": "#d9dee4", "paper": "#fffffe",
    "latency": "#0072b2", "flops": "#d55e00", "params": "#009e73", "memory": "#b5568d", "energy": "#b07d00",
    "estimated_energy": "#4f8fc0",
}  # fmt: skip
_MARKERS = ("o", "s", "^", "D", "v", "P")
_TIP = "tip:"  # begins the id of an artist whose rest is its tooltip
_MOST_GROUPS = 36


def budget_title(kind: str) -> str:
    """Return the words for a kind of budget, e.g. "FLOPs budget"."""
    return f"{BUDGETS[kind].title} budget"


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib as mpl

    ink, muted, line = COLOURS["ink"], COLOURS["muted"], COLOURS["line"]
    with mpl.rc_context(
        {
            "font.size": 8.5, "axes.titlesize": 9, "legend.fontsize": 8, "xtick.labelsize": 8, "ytick.labelsize": 8,
            "text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": line, "xtick.color": muted,
            "ytick.color": muted, "xtick.labelcolor": ink, "ytick.labelcolor": ink, "axes.spines.top": False,
            "axes.spines.right": False, "axes.grid": True, "grid.color": line, "grid.linewidth": 0.6,
            "axes.axisbelow": True, "xtick.major.size": 0, "ytick.major.size": 0, "legend.frameon": False,
            "lines.linewidth": 1.4, "svg.fonttype": "none", "svg.hashsalt": "dsa_hw", "figure.facecolor": "none",
            "axes.facecolor": "none", "savefig.facecolor": "none",
        }
    ):  # fmt: skip
        yield


def _figure(width: float = 4.3, height: float = 3.0) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def as_svg(figure: Figure, name: str, description: str) -> str:
    """Return a figure as inline SVG: no references, unique ids, colours and font of the page.

    Args:
        figure: The figure.
        name: Prefix of the ids.
        description: Text for screen readers.
    """
    buffer = io.StringIO()
    with _style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(rf'<g id="{_TIP}([^"]*)">', r"<g><title>\1</title>", text)
    text = re.sub(r"\s+xmlns(:\w+)?=\"[^\"]*\"", "", text).replace("xlink:href", "href")
    text = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--sans)", text)
    for colour, value in COLOURS.items():
        text = text.replace(value, f"var(--{colour})")
    label = html.escape(description, quote=True)
    return re.sub(
        r"<svg[^>]*?viewBox=(\"[^\"]*\")[^>]*>", rf'<svg role="img" aria-label="{label}" viewBox=\1>', text, count=1
    )


def picture(title: str, figure: Figure, name: str, caption: str, description: str = "") -> Picture:
    """Return a figure for a page.

    Args:
        title: Its conclusion, without a full stop.
        figure: The figure.
        name: Prefix of its ids; no two figures of a page have the same.
        caption: What it shows.
        description: For screen readers; empty is title and caption.
    """
    return Picture(title, Markup(as_svg(figure, name, description or f"{title}. {caption}")), caption)


def _dots(axes: Axes, x: Any, y: Any, tips: Sequence[str], label: str = "", **style: Any) -> None:
    """Draw points, each with its tooltip."""
    for i, (a, b, tip) in enumerate(zip(x, y, tips, strict=True)):
        axes.scatter([a], [b], label=label if i == 0 else "", **style).set_gid(_TIP + tip)


def _marker(findings: Findings, method: str) -> str:
    names = findings.methods()
    return _MARKERS[names.index(method) % len(_MARKERS)] if method in names else "o"


def fronts(findings: Findings) -> Figure:
    """Draw accuracy against measured latency: a line for each kind of budget and method."""
    with _style():
        figure, axes = _figure()
        rows, dense = findings.rows, findings.dense
        matched = rows["matches"].map(lambda m: isinstance(m, str) and bool(m))
        for (kind, method), part in rows[rows["kind"] != "dense"].groupby(["kind", "method"], sort=False):
            line = part.sort_values("seconds")
            x, y = 1e3 * line["seconds"], 100 * line["accuracy"]
            own = method == findings.methods()[0]
            colour = COLOURS[str(kind)]
            axes.plot(x, y, color=colour, linewidth=1.4 if own else 0.8, linestyle="-" if own else ":", zorder=2)
            error = [1e3 * (line["seconds"] - line["low"]), 1e3 * (line["high"] - line["seconds"])]
            axes.errorbar(x, y, xerr=np.maximum(error, 0), fmt="none", ecolor=colour, elinewidth=0.8, zorder=2)
            label = f"{budget_title(str(kind))}, {method}"
            tips = [f"{label}, asked {a}: {s:.3g} ms, {c:.1f}%" for a, s, c in zip(line["asked"], x, y, strict=True)]
            _dots(
                axes, x, y, tips, label, s=34 if own else 24, marker=_marker(findings, str(method)), zorder=3,
                linewidths=1.1, facecolors=colour if own else COLOURS["paper"], edgecolors=colour,
            )  # fmt: skip
        twins = rows[matched]
        if len(twins):
            axes.scatter(
                1e3 * twins["seconds"], 100 * twins["accuracy"], s=110, facecolors="none", linewidths=0.9,
                edgecolors=COLOURS["ink"], zorder=4, label="brought to equal latency",
            )  # fmt: skip
        at = 1e3 * dense["seconds"], 100 * dense["accuracy"]
        tip = f"dense: {at[0]:.3g} ms, {at[1]:.1f}%"
        _dots(axes, at[:1], at[1:], [tip], s=46, marker="*", color=COLOURS["ink"], zorder=3)
        axes.annotate(
            "dense", (1e3 * dense["seconds"], 100 * dense["accuracy"]), xytext=(-6, 0), textcoords="offset points",
            ha="right", va="center",
        )  # fmt: skip
        axes.set(xlabel="measured latency [ms]", ylabel="test accuracy [%]")
        _two_points_high(axes)
        _legend_below(figure, axes)
    return figure


def _two_points_high(axes: Axes) -> None:
    """Leave room around the data and show at least two points of accuracy, so that one test image does not fill it."""
    axes.margins(0.08, 0.12)
    low, high = axes.get_ylim()
    if axes.dataLim.height == 0 or high - low < 2:  # equal values would get five percent of room on both sides
        top = min((low + high) / 2 + 1, 100.2)  # nothing is above 100 %
        axes.set_ylim(top - 2, top)


def _legend_below(figure: Figure, axes: Axes, columns: int = 2) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    rows = -(-len(handles) // columns)
    figure.set_figheight(figure.get_figheight() + 0.19 * rows)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handletextpad=0.4, columnspacing=1.4)


def keep_ratios(findings: Findings, a: str, b: str) -> Figure:
    """Draw the keep ratio of every channel group in networks ``a`` and ``b``, joined by a line."""
    widths, sizes = findings.widths, findings.sizes
    names = list(widths.columns)
    first, second = (100 * widths.loc[id].to_numpy(float) / sizes for id in (a, b))
    shown = np.arange(len(names))
    if len(names) > _MOST_GROUPS:  # those on which the two differ most
        shown = np.sort(np.argsort(-np.abs(first - second), kind="stable")[:_MOST_GROUPS])
    place = np.arange(len(shown))[::-1]
    with _style():
        figure, axes = _figure(height=1.0 + 0.165 * len(shown))
        axes.hlines(
            place,
            np.minimum(first, second)[shown],
            np.maximum(first, second)[shown],
            color=COLOURS["muted"],
            lw=1.6,
            zorder=1,
        )
        for id, values, marker, size in ((a, first, "o", 70), (b, second, "D", 20)):
            row = findings.row(id)
            label = f"{budget_title(row['kind'])} {row['asked']}" + (", at equal latency" if row["matches"] else "")
            tips = [f"{names[k]}, {label}: {values[k]:.0f}% kept" for k in shown]
            style = {"s": size, "color": COLOURS[row["kind"]], "marker": marker, "zorder": 2}
            _dots(axes, values[shown], place, tips, label, **style)
        axes.set_yticks(place, [_short(names[k]) for k in shown])
        axes.set(xlabel="kept channels [%]", xlim=(0, 104), ylim=(-0.8, len(shown) - 0.2))
        axes.grid(axis="y", visible=False)
        _legend_below(figure, axes, 1)
    return figure


def prediction(findings: Findings, confidence: float = 0.9) -> Figure:
    """Draw predicted against measured latency with the calibrated bounds and the compared networks."""
    cost, rows = findings.cost, findings.rows
    if cost is None or cost.fitted is None:
        raise ValueError("there is no fitted cost model to draw")
    fitted = cost.fitted
    points = fitted[list(cost.names)].to_numpy(float) / cost.sizes
    predicted, measured = 1e3 * fitted["predicted"].to_numpy(float), 1e3 * fitted["cost"].to_numpy(float)
    relative = [bound(points, confidence) / np.asarray(cost(points)) for bound in (cost.lower, cost.upper)]
    low, high = (float(np.median(r)) for r in relative)
    with _style():
        figure, axes = _figure()
        every = np.concatenate([predicted, measured, 1e3 * rows["seconds"].to_numpy(float)])
        ends = np.array([0.95 * np.nanmin(every), 1.05 * np.nanmax(every)])
        axes.fill_between(
            ends,
            low * ends,
            high * ends,
            color=COLOURS["muted"],
            alpha=0.22,
            lw=0,
            zorder=0,
            label=f"{100 * confidence:g} % bounds",
        )
        axes.plot(ends, ends, color=COLOURS["muted"], lw=0.8, zorder=1)
        for split, face, label in (
            ("train", COLOURS["paper"], "cross-validated"),
            ("holdout", COLOURS["muted"], "held out"),
        ):
            part = (fitted["split"] == split).to_numpy()
            if part.any():
                axes.scatter(
                    predicted[part],
                    measured[part],
                    s=16,
                    facecolors=face,
                    edgecolors=COLOURS["muted"],
                    linewidths=0.8,
                    label=label,
                    zorder=2,
                )
        for kind, pruned in rows[rows["kind"] != "dense"].groupby("kind", sort=False):
            x, y = 1e3 * pruned["predicted"], 1e3 * pruned["seconds"]
            tips = [f"predicted {a:.3g} ms, measured {b:.3g} ms" for a, b in zip(x, y, strict=True)]
            _dots(axes, x, y, tips, f"{budget_title(str(kind))}s", s=34, color=COLOURS[str(kind)], zorder=3)
        axes.set(xlabel="predicted latency [ms]", ylabel="measured latency [ms]", xlim=ends, ylim=ends)
        _legend_below(figure, axes, 3)
    return figure


def saw_tooth(profile: Profile) -> tuple[Figure, str, float] | None:
    """Draw time against channels of the group with the largest excess off the grid.

    Returns:
        The figure, the group and its largest excess; None where the grid was not measured (``--grid N``).
    """
    evidence = pd.DataFrame(list(profile.grid_evidence))
    if evidence.empty:
        return None
    grid = profile.grid
    evidence = evidence.assign(
        on=[w % grid.get(g, 1) == 0 for g, w in zip(evidence["group"], evidence["width"], strict=True)]
    )
    off = evidence[~evidence["on"]]
    name = str((off if len(off) else evidence).sort_values("excess")["group"].iloc[-1])
    part = evidence[evidence["group"] == name].sort_values("channels")
    worst = float(off[off["group"] == name]["excess"].max()) if len(off) else 0.0
    x, y = part["channels"].to_numpy(float), 1e3 * part["seconds"].to_numpy(float)
    error = np.maximum([y - 1e3 * part["low"].to_numpy(float), 1e3 * part["high"].to_numpy(float) - y], 0)
    on = part["on"].to_numpy(bool)
    with _style():
        figure, axes = _figure()
        axes.plot(x, y, color=COLOURS["muted"], lw=0.9, zorder=1)
        axes.errorbar(x, y, yerr=error, fmt="none", ecolor=COLOURS["muted"], elinewidth=0.8, zorder=1)
        tips = np.array([f"{a:.0f} channels: {b:.3g} ms" for a, b in zip(x, y, strict=True)])
        label = f"multiples of {grid.get(name, 1)}"
        _dots(axes, x[on], y[on], tips[on], label, s=30, color=COLOURS["latency"], zorder=3)
        style = {"facecolors": COLOURS["paper"], "edgecolors": COLOURS["flops"], "marker": "D"}
        _dots(axes, x[~on], y[~on], tips[~on], "off the grid", s=24, zorder=2, **style)
        axes.set(xlabel=f"channels of {_short(name)}", ylabel="measured time [ms]")
        _legend_below(figure, axes)
    return figure, name, worst


def drawn_histories(findings: Findings) -> dict[str, pd.DataFrame]:
    """Return the histories of networks of the comparison that have costs and limits by step."""
    known = set(findings.rows["id"])
    return {
        id: history
        for id, history in findings.histories.items()
        if id in known and {"step", "cost", "limit"} <= set(history.columns) and not history.empty
    }


def convergence(findings: Findings) -> Figure | None:
    """Draw cost and limit of each allocation by step, as shares of the dense cost; None without histories."""
    with _style():
        figure, axes = _figure()
        drawn = 0
        for id, history in drawn_histories(findings).items():
            row = findings.row(id)
            colour = COLOURS[row["kind"]]
            label = f"{budget_title(row['kind'])} {row['asked']}" + (", equal latency" if row["matches"] else "")
            line = "--" if row["matches"] else "-"
            # Later lines are thinner: allocations often coincide.
            width = max(3.2 - 0.9 * drawn, 1.2)
            axes.plot(history["step"], 100 * history["cost"], color=colour, lw=width, ls=line, label=label, zorder=3)
            axes.plot(history["step"], 100 * history["limit"], color=colour, lw=0.8, ls=":", zorder=2)
            drawn += 1
        if not drawn:
            return None
        axes.plot([], [], color=COLOURS["muted"], lw=0.8, ls=":", label="limit in force")
        axes.set(xlabel="step", ylabel="cost [% of dense]")
        axes.set_ylim(bottom=0)
        _legend_below(figure, axes)
    return figure


def shown_groups(count: int) -> str:
    """Return which of ``count`` channel groups `kept_channels` and `kept_by_budget` draw."""
    if count <= _MOST_GROUPS:
        return "every channel group, in the order of the network"
    return f"the {_MOST_GROUPS} of {count} channel groups that keep the least, in the order of the network"


def kept_channels(ratios: pd.Series[float]) -> Figure:
    """Draw the keep ratio of every channel group as a bar, in the order of the network."""
    shown = ratios if len(ratios) <= _MOST_GROUPS else ratios[ratios.index.isin(ratios.nsmallest(_MOST_GROUPS).index)]
    place = np.arange(len(shown))[::-1]
    with _style():
        figure, axes = _figure(height=1.0 + 0.165 * len(shown))
        bars = axes.barh(place, 100 * shown.to_numpy(float), color=COLOURS["latency"], height=0.7)
        for bar, (name, ratio) in zip(bars, shown.items(), strict=True):
            bar.set_gid(f"{_TIP}{name}: {100 * ratio:.0f}% kept")
        axes.set_yticks(place, [_short(str(name)) for name in shown.index])
        axes.set(xlabel="kept channels [%]", xlim=(0, 104), ylim=(-0.8, len(shown) - 0.2))
        axes.grid(axis="y", visible=False)
    return figure


def steps(history: pd.DataFrame) -> Figure | None:
    """Draw cost and limit of one allocation by step, as shares of the dense cost; None without such a history."""
    if history.empty or not {"step", "cost", "limit"} <= set(history.columns):
        return None
    with _style():
        figure, axes = _figure()
        axes.plot(history["step"], 100 * history["cost"], color=COLOURS["latency"], label="cost", zorder=3)
        axes.plot(history["step"], 100 * history["limit"], color=COLOURS["muted"], lw=0.9, ls=":", label="limit")
        axes.set(xlabel="step", ylabel="cost [% of dense]")
        axes.set_ylim(bottom=0)
        _legend_below(figure, axes)
    return figure


def front(rows: pd.DataFrame, kind: str, unit: str, data: str = "test") -> Figure:
    """Draw a sweep: accuracy against cost, or requested against measured cost where accuracies are unknown.

    Args:
        rows: Columns asked, limit, measured, low, high and dense in ``unit``, and accuracy in [0, 1], NaN without data.
        kind: What is limited, in words.
        unit: Times in "s" are drawn in ms, everything else as a share of the dense network.
        data: What the accuracies were measured on.
    """
    scale = np.full(len(rows), 1e3) if unit == "s" else 100 / rows["dense"].to_numpy(float)
    title = f"measured {kind} [ms]" if unit == "s" else f"{kind} [% of dense]"
    with _style():
        figure, axes = _figure()
        x, low, high, asked = (scale * rows[name].to_numpy(float) for name in ("measured", "low", "high", "limit"))
        known = bool(rows["accuracy"].notna().all())
        y = 100 * rows["accuracy"].to_numpy(float) if known else asked
        error = np.maximum([x - low, high - x], 0)
        axes.errorbar(x, y, xerr=error, color=COLOURS["latency"], elinewidth=0.8)
        tips = [f"asked {a}: {b:.3g}, {c:.3g}%" for a, b, c in zip(rows["asked"], x, y, strict=True)]
        _dots(axes, x, y, tips, s=25, color=COLOURS["latency"], zorder=3)
        axes.set(xlabel=title, ylabel=f"{data} accuracy [%]" if known else title.replace("measured", "requested"))
        if known:
            _two_points_high(axes)
        else:
            ends = [min(x.min(), asked.min()), max(x.max(), asked.max())]
            axes.plot(ends, ends, color=COLOURS["muted"], lw=0.8)
            axes.margins(0.08, 0.12)
    return figure


def used_limits(rows: pd.DataFrame) -> Figure:
    """Draw the share of its limit that each network of a sweep uses, with the interval that decides the verdict.

    Args:
        rows: Columns asked, utilisation, least_used, most_used and verdict.
    """
    place = np.arange(len(rows))[::-1]
    used, low, high = (100 * rows[name].to_numpy(float) for name in ("utilisation", "least_used", "most_used"))
    low, high = (np.where(np.isfinite(end), end, used) for end in (low, high))
    with _style():
        figure, axes = _figure(height=1.0 + 0.24 * len(rows))
        axes.axvline(100, color=COLOURS["flops"], lw=1.2, ls="--", label="limit")
        error = np.maximum([used - low, high - used], 0)
        axes.errorbar(used, place, xerr=error, fmt="none", ecolor=COLOURS["latency"], elinewidth=1.2, zorder=2)
        tips = [
            f"asked {asked}: {u:.1f}% of the limit, interval {a:.1f}% to {b:.1f}%, {verdict}"
            for asked, u, a, b, verdict in zip(rows["asked"], used, low, high, rows["verdict"], strict=True)
        ]
        _dots(axes, used, place, tips, "used, with the interval that decides", s=30, color=COLOURS["latency"], zorder=3)
        axes.set_yticks(place, list(rows["asked"]))
        axes.set(xlabel="used share of the limit [%]", ylabel="asked", ylim=(-0.7, len(rows) - 0.3))
        least, most = np.nanmin([*low, 97.0]), np.nanmax([*high, 101.0])  # a counted cost uses 100% without an interval
        axes.set_xlim(least - 0.06 * (most - least), most + 0.06 * (most - least))
        axes.grid(axis="y", visible=False)
        _legend_below(figure, axes)
    return figure


def kept_by_budget(ratios: pd.DataFrame) -> Figure:
    """Draw keep ratios as shades: a row for each channel group, a column for each network of a sweep."""
    if len(ratios) > _MOST_GROUPS:  # those that lose most
        ratios = ratios.loc[ratios.index.isin(ratios.mean(axis=1).nsmallest(_MOST_GROUPS).index)]
    with _style():
        figure, axes = _figure(height=1.0 + 0.165 * len(ratios))
        for row, (group, values) in enumerate(ratios.iterrows()):
            for column, (asked, ratio) in enumerate(values.items()):
                cell = axes.barh(
                    len(ratios) - 1 - row, 0.94, 0.86, column - 0.47, color=COLOURS["latency"],
                    alpha=0.08 + 0.92 * float(ratio),
                )  # fmt: skip
                cell[0].set_gid(f"{_TIP}{group}, asked {asked}: {100 * float(ratio):.0f}% kept")
        axes.set_xticks(np.arange(ratios.shape[1]), [str(name) for name in ratios.columns])
        axes.set_yticks(np.arange(len(ratios))[::-1], [_short(str(name)) for name in ratios.index])
        axes.set(xlabel="asked", ylim=(-0.7, len(ratios) - 0.3))
        axes.grid(visible=False)
    return figure


def drops(rows: pd.DataFrame, max_drop: float, kind: str, *, as_points: bool = True) -> Figure:
    """Draw a minimisation: the drop of each network that was tried against its cost.

    Args:
        rows: Columns asked, measured, dense, drop, drop_low, drop_high and passes.
        max_drop: The largest drop that is accepted.
        kind: What is minimised, in words.
        as_points: Whether drops are shares, drawn in percentage points.
    """
    scale = 100.0 if as_points else 1.0
    cost = 100 * (rows["measured"] / rows["dense"]).to_numpy(float)
    drop, low, high = (scale * rows[name].to_numpy(float) for name in ("drop", "drop_low", "drop_high"))
    with _style():
        figure, axes = _figure()
        axes.axhline(scale * max_drop, color=COLOURS["flops"], lw=1.2, ls="--", label="largest drop that is accepted")
        error = np.nan_to_num(np.maximum([drop - low, high - drop], 0))
        axes.errorbar(cost, drop, yerr=error, fmt="none", ecolor=COLOURS["muted"], elinewidth=0.9, zorder=2)
        tips = np.array([
            f"{asked}: {kind} {c:.1f}% of dense, drop {d:.2f} [{a:.2f}, {b:.2f}]"
            for asked, c, d, a, b in zip(rows["asked"], cost, drop, low, high, strict=True)
        ])  # fmt: skip
        passes = rows["passes"].to_numpy(bool)
        for chosen, label, face in ((passes, "within the drop", "latency"), (~passes, "drop too large", "paper")):
            style = {"facecolors": COLOURS[face], "edgecolors": COLOURS["latency"], "linewidths": 1.1}
            _dots(axes, cost[chosen], drop[chosen], tips[chosen], label, s=34, zorder=3, **style)
        axes.set(xlabel=f"measured {kind} [% of dense]", ylabel=f"drop{' [points]' if as_points else ''}")
        axes.margins(0.08, 0.12)
        _legend_below(figure, axes)
    return figure


def save(figure: Figure, path: Any) -> None:
    """Write a figure to a file, on white.

    Raises:
        FileError: The file cannot be written.
    """
    with _style():
        write_figure(path, figure, dpi=150, facecolor="white")


def _short(name: str, length: int = 24) -> str:
    return name if len(name) <= length else "…" + name[1 - length :]
