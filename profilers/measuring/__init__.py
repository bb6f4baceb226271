"""Measure loaded networks: benches, statistics, reference, environment."""
