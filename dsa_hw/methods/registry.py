"""One question, many ways to answer it: how many units does each channel group keep under these budgets?

A *method* is a function from a `Problem` to a `Proposal`, registered by name. DSA is one of them, the rivals in
``dsa_hw.methods.baselines`` are the others; all get the same groups, costs and limits, and `realise` turns every
proposal into a network in the same way: widths on the target's grid, the most important units, surgery.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor, nn

from dsa_hw.channels import ChannelGroups, choose, shrink
from dsa_hw.channels.importance import Importance
from dsa_hw.errors import DsaError
from dsa_hw.methods.dsa.admm import Cost
from dsa_hw.methods.rounding import narrowest, round_widths

__all__ = ["Problem", "Proposal", "Realised", "method", "methods", "realise", "solve"]

Loss = Callable[[Any, Any], Tensor]
Batches = Iterable[Any]


@dataclass(frozen=True)
class Problem:
    """A network, budgets and what is there to guide the choice.

    ``model`` is never changed. ``costs`` and ``limits`` are J of each, in the same units. ``grid`` (K,) is the step of
    widths that the target likes. ``train`` and ``val`` yield (inputs, targets) and can be iterated again and again;
    with neither, inputs are made up and the dense network's own outputs are the target. ``loss(outputs, targets)`` is
    a scalar; cross-entropy by default. ``minimum`` is the smallest keep ratio. ``epochs`` is how long a method may
    train on ``train``; None is the method's own choice. ``importance``: "auto" is the method's own, which is |gamma|
    as in the paper, and for DSA with frozen weights and a ``val`` loader the `dsa_hw.methods.dsa.fisher` information.
    ``folder`` is for this problem alone: a method that trains may keep there what is unfinished, and go on from it.
    """

    model: nn.Module
    groups: ChannelGroups
    costs: Sequence[Cost]
    limits: Sequence[float]
    example_inputs: tuple[Any, ...] = ()
    grid: NDArray[np.int64] | None = None
    train: Batches | None = None
    val: Batches | None = None
    loss: Loss = nn.functional.cross_entropy
    importance: str | Importance = "auto"
    minimum: float = 0.05
    epochs: float | None = None
    seed: int = 0
    progress: bool = False
    folder: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Further settings of the method, by name; a method refuses what it does not know."""

    @property
    def least(self) -> NDArray[np.float64]:
        """Keep ratios (K,) of the narrowest network that the grid and ``minimum`` allow.

        Below these there is no network, only what a cost model makes up, and a method must not spend that.
        """
        sizes = self.groups.sizes
        return np.asarray(narrowest(sizes, self.grid, self.minimum) / sizes, np.float64)


@dataclass(frozen=True, eq=False)
class Proposal:
    """Keep ratios ``alpha`` (K,) within every budget, and the network whose weights they are meant for.

    ``model`` has the dense shapes (it may be ``problem.model`` itself, or a copy with adapted weights). ``importance``:
    K arrays (C_k,) that say which units to keep; None asks ``problem.importance`` of ``model``. ``history`` has a row
    for each step of the method.
    """

    alpha: NDArray[np.float64]
    model: nn.Module
    importance: Sequence[NDArray[np.float64]] | None = None
    history: pd.DataFrame = field(default_factory=pd.DataFrame)


@dataclass(frozen=True, eq=False)
class Realised:
    """A proposal as a network: widths (K,), kept units per group, and the really smaller module."""

    widths: NDArray[np.int64]
    kept: list[NDArray[np.int64]]
    model: nn.Module


Method = Callable[[Problem], Proposal]
_METHODS: dict[str, Method] = {}
# Modules that register methods when imported.
_HOMES = ("dsa_hw.methods.dsa.method", "dsa_hw.methods.baselines")


def method(name: str) -> Callable[[Method], Method]:
    """Register a method under ``name``, as in ``dsa_hw.allocate(..., method=name)``."""

    def register(function: Method) -> Method:
        _METHODS[name] = function
        return function

    return register


def methods() -> tuple[str, ...]:
    """Names of all methods, "dsa" first."""
    for home in _HOMES:
        importlib.import_module(home)
    return tuple(_METHODS)


def solve(problem: Problem, name: str = "dsa") -> Proposal:
    """The proposal of the method called ``name``."""
    known = methods()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise DsaError(f"there is no method {name!r}; there are {', '.join(known)}.{hint}")
    return _METHODS[name](problem)


def realise(problem: Problem, proposal: Proposal) -> Realised:
    """Round to widths that keep every budget, keep the most important units, and shrink."""
    groups = problem.groups
    widths = round_widths(
        proposal.alpha, groups.sizes, problem.costs, problem.limits, problem.grid, minimum=problem.minimum
    )
    scores = proposal.importance
    kept = choose(proposal.model, groups, widths, problem.importance if scores is None else lambda *_: scores)
    return Realised(widths, kept, shrink(proposal.model, groups, kept))
