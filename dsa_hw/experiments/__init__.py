"""Experiments built on the pipeline: comparisons, sweeps and their reports."""
