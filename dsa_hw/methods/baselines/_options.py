"""Options of the baselines: a frozen dataclass for each, filled from ``problem.options``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TypeVar

from dsa_hw.errors import DsaError
from dsa_hw.methods.baselines._limits import Limits, dense_proposal
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.methods.registry import Method, register_method
from dsa_hw.utils.text import unknown_name

__all__ = ["Compute", "Evaluation", "NoOptions", "Training", "baseline", "read_options"]


@dataclass(frozen=True)
class NoOptions:
    """No options."""


@dataclass(frozen=True)
class Compute:
    """How the network runs.

    Attributes:
        precision: "fp32" or "bf16" (autocast).
        channels_last: Whether to use the channels-last memory format.
    """

    precision: str = "fp32"
    channels_last: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        if self.precision not in ("fp32", "bf16"):
            raise DsaError(f"Option 'precision' must be 'fp32' or 'bf16'; got {self.precision!r}.")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not value >= 0:
                raise DsaError(f"Option {field.name!r} must not be negative; got {value}.")


@dataclass(frozen=True)
class Training(Compute):
    """SGD at a constant learning rate."""

    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4


@dataclass(frozen=True)
class Evaluation(Compute):
    """Loss of the masked network.

    Attributes:
        batches: How many batches to evaluate on, the first ones.
        statistics: Batch norms use those of each "batch", which replaces a recalibration after pruning and is what DSA
            does with frozen weights, or the "stored" ones of the dense network.
    """

    batches: int = 4
    statistics: str = "batch"

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.statistics not in ("stored", "batch") or self.batches < 1:
            raise DsaError(
                "Option 'statistics' must be 'stored' or 'batch' and 'batches' at least 1; got "
                f"{self.statistics!r} and {self.batches}."
            )


Options = TypeVar("Options")


def read_options(problem: Problem, kind: type[Options], method: str) -> Options:
    """Return ``problem.options`` as an object of ``kind``, a dataclass with a default for each field.

    Raises:
        DsaError: An option is unknown or out of range.
    """
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in problem.options:
        if not known:
            raise DsaError(f"Method {method!r} has no options; got {name!r}.")
        if name not in known:
            raise DsaError(unknown_name(f"{method} option", name, known))
    return kind(**problem.options)


def baseline(name: str, kind: type[Options]) -> Callable[[Callable[[Problem, Limits, Options], Proposal]], Method]:
    """Register a baseline that is called with the problem, its limits and its options.

    The options are read first. If the dense network meets the budgets, it is proposed and the baseline is not called.

    Args:
        name: Name of the method.
        kind: Class of its options.
    """

    def decorate(function: Callable[[Problem, Limits, Options], Proposal]) -> Method:
        @wraps(function)
        def method(problem: Problem) -> Proposal:
            options = read_options(problem, kind, name)
            limits = Limits(problem)
            return dense_proposal(problem) if limits.met else function(problem, limits, options)

        return register_method(name)(method)

    return decorate
