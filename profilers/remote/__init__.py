"""Measuring on a device over a connection: the agent that runs there, and the channel to it."""
