"""Measurements of loaded networks: rules, benches, interference, statistics, references, environments."""
