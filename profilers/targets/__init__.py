"""Runtimes on which networks are measured, registered by name."""

from __future__ import annotations

from profilers.targets.base import Loaded, Target, from_title, register, resolve, runtimes

__all__ = ["Loaded", "Target", "from_title", "register", "resolve", "runtimes"]
