"""Profiles of networks: grid, choice of configurations, measurements."""
