"""Whether the packages ``budgets`` and ``profilers`` are the ones of this distribution.

Their names are ordinary words: a user's own ``budgets.py`` in the working folder would be imported in their place.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import dsa_hw

__all__ = ["OWN", "why_hidden"]

OWN = ("budgets", "profilers")


def why_hidden(package: str) -> str | None:
    """Return why ``package`` is not the one of this distribution; None where it is."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that a program put into sys.modules by hand
        spec = None
    ours = Path(dsa_hw.__file__).parents[1] / package / "__init__.py"
    if spec is None or spec.origin is None:
        return f"The package {package} was not found. Expected it at {ours}; install dsa-hw again."
    if Path(spec.origin).resolve() == ours.resolve():
        return None
    return f"{spec.origin} hides the package {package} of dsa-hw. Rename that file, or run in another folder."
