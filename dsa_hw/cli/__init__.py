"""Subcommands of ``dsa-hw``, one module each."""
