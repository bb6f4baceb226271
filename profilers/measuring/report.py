"""Measurements as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dsa_hw.utils.text import percent

if TYPE_CHECKING:
    from profilers.measuring.energy_bench import EnergyMeasurement
    from profilers.measuring.measurement import Measurement

__all__ = ["energy", "latency"]


def latency(m: Measurement) -> str:
    """Return the report of a latency measurement: value with interval, percentiles, runs and warnings."""
    unit, scale = ("s", 1.0) if m.value >= 1 else ("ms", 1e3)
    if m.estimated:
        return f"{m.what} on {m.target}: {scale * m.value:.4g} {unit} ({m.estimated})"
    percentiles = (("median", m.median), ("p90", m.p90), ("p95", m.p95), ("p99", m.p99))
    return _with_warning(
        m,
        f"{m.what} on {m.target}: {scale * m.value:.4g} {unit}, "
        f"95% CI [{scale * m.low:.4g}, {scale * m.high:.4g}] {unit} ({m.rules.statistic})",
        f"  {'  '.join(f'{name} {scale * value:.4g}' for name, value in percentiles)} {unit}; {m.runs} runs in "
        f"{m.samples.blocks} blocks, spread {percent(m.spread)}",
    )


def energy(m: EnergyMeasurement) -> str:
    """Return the report of an energy measurement: gross and net joules, power, windows and warnings."""
    unit, scale = ("J", 1.0) if m.joules >= 1 else ("mJ", 1e3)
    temperature = f", {m.temperature:.0f} degrees Celsius" if math.isfinite(m.temperature) else ""
    return _with_warning(
        m,
        f"{m.what} on {m.target}: {scale * m.joules:.4g} {unit} per inference, "
        f"95% CI [{scale * m.low:.4g}, {scale * m.high:.4g}] {unit} ({m.rules.statistic}), "
        f"net of idling {scale * m.net:.4g} {unit}",
        f"  {m.watts:.4g} W while running, {m.idle_watts:.4g} W idle{temperature}; {m.runs} windows; "
        f"counter {m.environment.get('counter', 'unknown')}",
    )


def _with_warning(m: Measurement, *lines: str) -> str:
    return "\n".join((*lines, f"  WARNING: do not use this value: {m.doubt}") if m.doubt else lines)
