"""Measure on other devices, through an agent that runs there."""
