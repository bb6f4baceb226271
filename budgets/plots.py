"""Plot of a cost model: fit and bound, candidates, and cost by channel group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dsa_hw.errors import ProfileError
from dsa_hw.profiles import QUANTITIES
from dsa_hw.units import UNITS
from dsa_hw.utils.files import write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from budgets.cost_model import CostModel

__all__ = ["plot_cost_model"]

_BLUE, _ORANGE, _GREY, _GREEN = "#2b6cb0", "#dd6b20", "#a0aec0", "#2f855a"


def plot_cost_model(model: CostModel, path: str | Path, confidence: float = 0.9) -> Path:
    """Draw fit and bound, candidates, cost by group and cost against FLOPs.

    Args:
        model: The fitted model.
        path: The file to write: .png, .svg or .pdf.
        confidence: Of the bounds that are drawn.

    Returns:
        The path.

    Raises:
        ProfileError: The file cannot be written, or its format is unknown.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if model.fitted is None or model.fitted.empty:
        raise ProfileError("The cost model has no measured configurations to draw. Fit it again.")
    figure = Figure(figsize=(12.5, 9.5), layout="constrained")
    FigureCanvasAgg(figure)
    ((a, b), (c, d)) = figure.subplots(2, 2)
    _predicted_against_measured(a, model, confidence)
    _candidates(b, model)
    _shares(c, model)
    _flops_against_cost(d, model)
    p = model.provenance
    figure.suptitle(f"{p.quantity} on {p.target}: {model.name}, {p.configurations} configurations", fontsize=14)
    path = Path(path)
    write_figure(path, figure, ProfileError, dpi=130)
    return path


def _unit(model: CostModel) -> tuple[str, float]:
    """A readable unit for the axis and what to divide by."""
    symbols = [prefix + QUANTITIES[model.provenance.quantity].unit for prefix in ("u", "m", "")]
    chosen = symbols[0]
    for symbol in symbols:
        if model.dense >= UNITS[symbol].factor:
            chosen = symbol
    return chosen, UNITS[chosen].factor


def _predicted_against_measured(axes: Axes, model: CostModel, confidence: float) -> None:
    assert model.fitted is not None
    unit, scale = _unit(model)
    frame = model.fitted
    points = frame[list(model.names)].to_numpy(np.float64) / model.sizes
    upper, lower = model.upper(points, confidence) / scale, model.lower(points, confidence) / scale
    predicted, measured = frame["predicted"].to_numpy(np.float64) / scale, frame["cost"].to_numpy(np.float64) / scale
    order = np.argsort(predicted)
    axes.fill_between(
        predicted[order],
        _running(lower[order] / predicted[order]) * predicted[order],
        _running(upper[order] / predicted[order]) * predicted[order],
        color=_BLUE,
        alpha=0.15,
        lw=0,
        label=f"{100 * confidence:g}% bounds ({model.calibration.method})",
    )
    ends = [0.97 * min(predicted.min(), measured.min()), 1.03 * max(predicted.max(), measured.max())]
    axes.plot(ends, ends, color="black", lw=0.8)
    for split, colour, label in (("train", _BLUE, "cross-validated"), ("holdout", _ORANGE, "held out")):
        rows = (frame["split"] == split).to_numpy()
        if rows.any():
            error = np.abs(predicted[rows] / measured[rows] - 1).mean()
            axes.scatter(
                predicted[rows], measured[rows], s=20, color=colour, edgecolor="white", lw=0.4, zorder=3,
                label=f"{label}: {rows.sum()}, mean error {100 * error:.1f}%",
            )  # fmt: skip
    axes.set(xlabel=f"predicted [{unit}]", ylabel=f"measured [{unit}]", title="Predicted against measured")
    axes.legend(loc="upper left", fontsize=9, frameon=False)


def _running(values: Any, width: int = 7) -> Any:
    """Return the running median.

    The bound depends on the whole configuration, and the axis shows only its cost.
    """
    half = width // 2
    return np.array([np.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))])


def _candidates(axes: Axes, model: CostModel) -> None:
    report = model.report.sort_values("mape", ascending=False)
    place = np.arange(len(report))
    colours = [_GREEN if name == model.name else _GREY for name in report.index]
    axes.barh(
        place, 100 * report["mape"], xerr=100 * report["se"], color=colours, height=0.65, ecolor="black", capsize=2
    )
    if "holdout_mape" in report:
        axes.scatter(100 * report["holdout_mape"], place, marker="D", s=22, color=_ORANGE, zorder=3, label="held out")
        axes.legend(loc="lower right", fontsize=9, frameon=False)
    axes.set_yticks(place, [f"{name}" + (" (chosen)" if name == model.name else "") for name in report.index])
    axes.set(xlabel="mean absolute error, cross-validated [%]", title="Candidates")
    # A candidate with a very large error would hide the differences between the others.
    axes.set_xlim(
        0, min(1.15 * 100 * float((report["mape"] + report["se"]).max()), 12 * 100 * float(report["mape"].min()))
    )


def _shares(axes: Axes, model: CostModel, most: int = 20) -> None:
    shares = model.shares().sort_values(ascending=False)
    shown = shares.head(most)[::-1]
    axes.barh(np.arange(len(shown)), 100 * shown, color=_BLUE, height=0.7)
    axes.set_yticks(np.arange(len(shown)), [_short(name) for name in shown.index], fontsize=7)
    left_out = len(shares) - len(shown)
    title = "Share of the cost by channel group" + (f" (largest {len(shown)} of {len(shares)})" if left_out > 0 else "")
    axes.set(xlabel=f"share of {model.provenance.quantity} [%]", title=title)


def _flops_against_cost(axes: Axes, model: CostModel, named: int = 6) -> None:
    if model.flops_shares is None:
        text = "no channel groups given:\nFLOPs are not known"
        axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    cost = 100 * model.shares()
    flops = 100 * np.array([model.flops_shares[name] for name in cost.index])
    ends = [0.0, 1.08 * max(float(cost.max()), float(flops.max()))]
    axes.plot(ends, ends, color="black", lw=0.8)
    axes.scatter(
        flops, cost, s=26, color=[_ORANGE if y > x else _BLUE for x, y in zip(flops, cost, strict=True)], zorder=3
    )
    for k in np.argsort(-np.abs(cost.to_numpy() - flops))[:named]:
        left = flops[k] > 0.6 * ends[1]
        axes.annotate(
            _short(str(cost.index[k])),
            (flops[k], cost.iloc[k]),
            xytext=(-5 if left else 5, 3),
            ha="right" if left else "left",
            textcoords="offset points",
            fontsize=7,
        )
    misplaced = 0.5 * float(np.abs(cost.to_numpy() - flops).sum())
    axes.set(
        xlim=ends,
        ylim=ends,
        xlabel="share of FLOPs [%]",
        ylabel=f"share of {model.provenance.quantity} [%]",
        title=f"FLOPs put {misplaced:.0f}% of the {model.provenance.quantity} in the wrong group",
    )


def _short(name: str, length: int = 28) -> str:
    return name if len(name) <= length else "..." + name[3 - length :]
