"""Measure on other devices: the agent that runs there, the connection to it, and its failures."""
