"""Reports: what came out, in one sentence, tables and pictures, on one page by itself."""

from __future__ import annotations

from dsa_hw.experiments.report.allocation import flops_share, render_allocation, write_allocation
from dsa_hw.experiments.report.findings import Findings
from dsa_hw.experiments.report.fronts import render_minimum, render_sweep, write_minimum, write_sweep
from dsa_hw.experiments.report.page import render, write
from dsa_hw.experiments.report.templating import About

__all__ = [
    "About",
    "Findings",
    "flops_share",
    "render",
    "render_allocation",
    "render_minimum",
    "render_sweep",
    "write",
    "write_allocation",
    "write_minimum",
    "write_sweep",
]
