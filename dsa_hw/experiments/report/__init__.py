"""Reports: what came out, in one sentence, tables and pictures, on one page by itself."""

from __future__ import annotations

from dsa_hw.experiments.report.allocation import render_allocation, write_allocation
from dsa_hw.experiments.report.findings import Findings
from dsa_hw.experiments.report.fronts import About, render_minimum, render_sweep, write_minimum, write_sweep
from dsa_hw.experiments.report.page import render, write

__all__ = [
    "About",
    "Findings",
    "render",
    "render_allocation",
    "render_minimum",
    "render_sweep",
    "write",
    "write_allocation",
    "write_minimum",
    "write_sweep",
]
