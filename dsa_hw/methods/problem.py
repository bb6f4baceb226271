"""The interface of all methods: a `Problem` in, a `Proposal` out, and `realise` from a proposal to a network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor, nn

from dsa_hw.channels import ChannelGroups, select_channels, shrink
from dsa_hw.channels.importance import Importance
from dsa_hw.errors import TrainingError, WidthError
from dsa_hw.methods.costs import Cost, CostSet
from dsa_hw.methods.rounding import narrowest, round_widths
from dsa_hw.utils.arrays import Floats, Ints
from dsa_hw.utils.numbers import check_number, check_seed, check_share
from dsa_hw.utils.records import Log

__all__ = ["Batches", "Loss", "Problem", "Proposal", "Realised", "realise"]

Loss = Callable[[Any, Any], Tensor]
Batches = Iterable[Any]


@dataclass(frozen=True)
class Problem:
    """A network, budgets and the data that guide the choice of keep ratios.

    Attributes:
        model: The dense network; methods do not change it.
        groups: Its K channel groups.
        costs: J costs with their limits.
        example_inputs: Inputs of the network, for methods that need to run it without data.
        grid: Step of the widths (K,) that suit the target; None allows every width.
        train: Loader of (inputs, targets) for the weights. Can be iterated any number of times.
        val: Loader of (inputs, targets) for the keep ratios. With neither loader, methods generate inputs and use the
            outputs of the dense network as targets.
        loss: ``loss(outputs, targets)``, a scalar.
        importance: Which channels matter most: a name, a function, or "auto" for the choice of the method. That is
            |gamma| as in the paper; for DSA with frozen weights and a ``val`` loader the Fisher information while it
            allocates, and the order of elimination for the channels of the result.
        minimum: Smallest keep ratio.
        epochs: How long a method may train on ``train``; None for the default of the method.
        seed: Seed of everything random.
        progress: Whether to show progress bars.
        folder: A folder for this problem only, where a method that trains keeps its unfinished work and resumes it.
        options: Further settings of the method by name; a method refuses unknown names.
        log: Called with a dict for each step, by methods that make steps.
    """

    model: nn.Module
    groups: ChannelGroups
    costs: CostSet[Cost]
    example_inputs: tuple[Any, ...] = ()
    grid: Ints | None = None
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
    log: Log | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            WidthError: ``minimum`` is not in [0, 1].
            TrainingError: ``epochs`` is not a number from 0.
            DsaError: ``seed`` is not a whole number from 0.
        """
        check_share(self.minimum, "minimum", WidthError)
        check_seed(self.seed)
        if self.epochs is not None:
            check_number(self.epochs, "epochs", TrainingError)

    @property
    def least(self) -> Floats:
        """Keep ratios (K,) of the narrowest network that ``grid`` and ``minimum`` allow.

        No network exists below them, so a method must not propose smaller keep ratios.
        """
        sizes = self.groups.sizes
        return np.asarray(narrowest(sizes, self.grid, self.minimum) / sizes, np.float64)


@dataclass(frozen=True, eq=False)
class Proposal:
    """Keep ratios within every budget, and the network whose weights they were chosen for.

    Attributes:
        alpha: Keep ratios (K,).
        model: A network of the dense shapes: the model of the problem, or a copy with adapted weights.
        importance: K arrays (C_k,) that rank the channels of each group; None uses the importance of the problem.
        history: A row per step of the method.
    """

    alpha: Floats
    model: nn.Module
    importance: Sequence[Floats] | None = None
    history: pd.DataFrame = field(default_factory=pd.DataFrame)


@dataclass(frozen=True, eq=False)
class Realised:
    """A proposal as a network: widths (K,), kept channels of each group, and the smaller network."""

    widths: Ints
    kept: list[Ints]
    model: nn.Module


def realise(problem: Problem, proposal: Proposal, widths: Ints | None = None) -> Realised:
    """Select the most important channels of each group and remove all others.

    Args:
        problem: What the proposal solves.
        proposal: The weights, the keep ratios and, where it has scores, the ranking of the channels.
        widths: How many channels each group keeps (K,). None rounds the keep ratios to widths within every budget.

    Returns:
        The smaller network; ``proposal.model`` is not changed.
    """
    if widths is None:
        widths = round_widths(proposal.alpha, problem.costs, problem.grid, minimum=problem.minimum)
    scores = proposal.importance
    ranking = problem.importance if scores is None else lambda *_: scores
    kept = select_channels(proposal.model, problem.groups, widths, ranking)
    return Realised(widths, kept, shrink(proposal.model, problem.groups, kept))
