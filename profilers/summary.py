"""Profiles and self-checks as text and as plain data for JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsa_hw.utils.text import percent

if TYPE_CHECKING:
    from dsa_hw.profiles import Profile
    from profilers.profiling.api import SelfCheck

__all__ = ["profile_data", "profile_text", "self_check_data", "self_check_text"]

_MILLI = {"latency": "ms", "energy": "mJ"}


def profile_text(profile: Profile, out: Path) -> str:
    """Return the summary of a profile, a line per fact.

    Args:
        profile: The profile.
        out: The store that contains it.
    """
    unit = _MILLI[profile.quantity]
    values = 1e3 * profile.table[profile.column]
    rows = [("network", f"{profile.network}, {len(profile.names)} channel groups"), ("target", profile.target)]
    if profile.estimated:
        rows.append(("estimated", f"not measured: {profile.estimated}"))
    for _, dense in profile.table[profile.table["split"] == "dense"].iterrows():
        text = f"{1e3 * dense[profile.column]:.4g} {unit}"
        if not profile.estimated:
            text += f", 95% CI [{1e3 * dense['low']:.4g}, {1e3 * dense['high']:.4g}] {unit} ({profile.statistic})"
        if profile.quantity == "energy":
            text += f", net of idling {1e3 * dense['net']:.4g} {unit} at {dense['watts']:.4g} W"
        rows.append(("dense", text))
    rows.append(("range", f"{values.min():.4g} to {values.max():.4g} {unit}"))
    counts = profile.table["split"].value_counts()
    rows.append(("configurations", ", ".join(f"{n} {split}" for split, n in counts.items())))
    rows.append(("grid", _grid_text(profile)))
    if not profile.estimated:
        precision = f"+/-{percent(profile.interval)} of the ratio to the dense network (median of the 95% intervals)"
        rows.append(("precision", f"{precision}; spread of the runs {percent(profile.noise)}"))
    if profile.untrusted:
        rows.append(("left out", f"{profile.untrusted} configurations that are less precise than required"))
    agreement = f", outputs agree to {profile.agreement:.0e}" if profile.agreement else ""
    rows.append(("networks", profile.prepared + agreement))
    spent = profile.breakdown
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in spent.items())
    rows.append(("time", f"{sum(spent.values()):.0f} s: {stages}"))
    rows.append(("store", str(out)))
    width = max(len(name) for name, _ in rows)
    return "\n".join([*(f"{name:<{width}}  {text}" for name, text in rows), f"next: dsa-hw fit {out}"])


def profile_data(profile: Profile, out: Path) -> dict[str, Any]:
    """Return a profile as plain data; arguments as for `profile_text`."""
    names = (
        "target", "network", "statistic", "quantity", "unit", "grid", "grid_evidence", "noise", "interval",
        "estimated", "untrusted", "breakdown", "prepared", "agreement", "environment",
    )  # fmt: skip
    return {
        **{name: getattr(profile, name) for name in names},
        "configurations": profile.table.to_dict("records"),
        "out": str(out),
        "next": f"dsa-hw fit {out}",
    }


def _grid_text(profile: Profile) -> str:
    steps = list(profile.grid.values())
    text = ", ".join(f"{step} ({steps.count(step)} groups)" for step in sorted(set(steps)))
    off = [e for e in profile.grid_evidence if e["width"] % profile.grid.get(e["group"], 1)]
    if off:
        worst = max(off, key=lambda e: e["excess"])
        where = f"{worst['channels']} channels of {worst['group']}"
        text += f"; off the grid up to {percent(worst['excess'], 0)} slower ({where})"
    return text


def self_check_text(check: SelfCheck, quantity: str) -> str:
    """Return the result of a self-check, a line per configuration."""
    unit = _MILLI[quantity]
    lines = [
        f"Self-check on {check.target}: {len(check.table)} configurations, each measured twice.",
        f"  first {unit}  second {unit}  difference  of the ratio to the dense network",
    ]
    for _, row in check.table.iterrows():
        apart = f"{100 * row['difference']:+9.2f}%  {100 * row['ratio_difference']:+9.2f}%"
        lines.append(f"  {1e3 * row['first']:8.4g}  {1e3 * row['second']:9.4g}  {apart}")
    lines.append(f"Difference of the ratios: median {percent(check.median, 2)}, largest {percent(check.largest, 2)}.")
    return "\n".join(lines)


def self_check_data(check: SelfCheck) -> dict[str, Any]:
    """Return the result of a self-check as plain data."""
    facts = {"target": check.target, "median": check.median, "largest": check.largest}
    return {**facts, "configurations": check.table.to_dict("records")}
