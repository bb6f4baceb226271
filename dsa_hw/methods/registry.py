"""Methods by name.

A method is a function from a `dsa_hw.methods.problem.Problem` to a `dsa_hw.methods.problem.Proposal`. DSA is one,
the baselines in `dsa_hw.methods.baselines` are others; a user registers more with `register_method`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from dsa_hw.errors import DsaError
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.utils.text import unknown_name

__all__ = ["METHODS", "Method", "available_methods", "check_method", "register_method", "solve"]

Method = Callable[[Problem], Proposal]
METHODS: dict[str, Method] = {}
"""Name -> method; `available_methods` fills it."""
# Modules that register methods when imported. Imported late, because they import this module.
_HOMES = ("dsa_hw.methods.dsa.method", "dsa_hw.methods.baselines")


def register_method(name: str) -> Callable[[Method], Method]:
    """Register a method under ``name``, as in ``dsa_hw.allocate(..., method=name)``."""

    def register(function: Method) -> Method:
        METHODS[name] = function
        return function

    return register


def available_methods() -> tuple[str, ...]:
    """Return the names of all methods: "dsa" first, the others in alphabetical order."""
    for home in _HOMES:
        importlib.import_module(home)
    return tuple(sorted(METHODS, key=lambda name: (name != "dsa", name)))


def check_method(name: str) -> None:
    """Check that a method is registered.

    Raises:
        DsaError: There is no method of that name.
    """
    if name not in available_methods():
        raise DsaError(unknown_name("method", name, METHODS))


def solve(problem: Problem, name: str = "dsa") -> Proposal:
    """Return the proposal of the method called ``name``."""
    check_method(name)
    return METHODS[name](problem)
