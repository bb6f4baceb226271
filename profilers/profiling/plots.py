"""Plots of the grid sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dsa_hw.errors import ProfileError
from dsa_hw.profiles import Profile
from dsa_hw.utils.files import write_figure
from profilers.profiling.grid import Evidence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_grid", "save_grid_plot"]


def save_grid_plot(profile: Profile, path: Path) -> None:
    """Write the plot of a profile's grid sweep to a file.

    Raises:
        ProfileError: The profile has no sweep, or the file cannot be written.
    """
    if not profile.grid_evidence:
        raise ProfileError("--plot shows the sweep of --grid auto, but no sweep was measured. Leave --grid out.")
    title = f"{profile.network} on {profile.target}"
    write_figure(path, plot_grid(profile.grid_evidence, profile.grid, title), ProfileError, dpi=150)


def plot_grid(evidence: Sequence[Evidence | Mapping[str, Any]], grid: Mapping[str, int], title: str) -> Figure:
    """Plot time against channels for every swept group, with widths on the grid marked.

    Args:
        evidence: The measured points.
        grid: The grid by group.
        title: Title of the figure.
    """
    from matplotlib.figure import Figure

    rows = [asdict(e) if isinstance(e, Evidence) else dict(e) for e in evidence]
    names = list(dict.fromkeys(r["group"] for r in rows))
    figure = Figure(figsize=(4.5 * max(len(names), 1), 3.6), layout="constrained")
    for i, name in enumerate(names):
        axis = figure.add_subplot(1, len(names), i + 1)
        points = sorted((r for r in rows if r["group"] == name), key=lambda r: r["channels"])
        x = np.asarray([p["channels"] for p in points])
        y, low, high = (1e3 * np.asarray([p[key] for p in points]) for key in ("seconds", "low", "high"))
        axis.plot(x, y, color="0.6", linewidth=1, zorder=1)
        axis.errorbar(x, y, yerr=[np.maximum(y - low, 0), np.maximum(high - y, 0)], fmt="none", ecolor="0.6", zorder=1)
        on = np.asarray([p["width"] % grid.get(name, 1) == 0 for p in points])
        axis.scatter(x[~on], y[~on], s=22, facecolors="white", edgecolors="#b03a2e", label="off the grid", zorder=2)
        axis.scatter(x[on], y[on], s=26, color="#1f618d", label=f"multiples of {grid.get(name, 1)}", zorder=3)
        axis.set(title=name, xlabel="channels", ylabel="ms" if i == 0 else "")
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure
