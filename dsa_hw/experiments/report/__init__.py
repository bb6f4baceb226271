"""Reports: what came out, in one sentence, tables and pictures, on one page by itself."""

from __future__ import annotations

from dsa_hw.experiments.report.allocation import render_allocation, write_allocation
from dsa_hw.experiments.report.findings import Findings
from dsa_hw.experiments.report.page import render, write

__all__ = ["Findings", "render", "render_allocation", "write", "write_allocation"]
