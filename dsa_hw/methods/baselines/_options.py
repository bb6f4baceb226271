"""Settings of a rival: a frozen dataclass of its own, filled from ``problem.options``; unknown names are refused."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import TypeVar

from dsa_hw.errors import DsaError
from dsa_hw.methods.problem import Problem

__all__ = ["Compute", "Evaluation", "Nothing", "Training", "read"]


@dataclass(frozen=True)
class Nothing:
    """No setting."""


@dataclass(frozen=True)
class Compute:
    """How the network runs: ``precision`` "fp32" or "bf16" (autocast), and the channels-last memory format."""

    precision: str = "fp32"
    channels_last: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        if self.precision not in ("fp32", "bf16"):
            raise DsaError(f"precision must be 'fp32' or 'bf16'; found {self.precision!r}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not value >= 0:
                raise DsaError(f"option {field.name!r} must not be negative; found {value}")


@dataclass(frozen=True)
class Training(Compute):
    """SGD at a constant learning rate."""

    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4


@dataclass(frozen=True)
class Evaluation(Compute):
    """Loss of the masked network on the first ``batches`` batches.

    ``statistics``: batch norms use those of each "batch", which stands in for a recalibration after pruning and is what
    DSA does with frozen weights, or the "stored" ones of the dense network.
    """

    batches: int = 4
    statistics: str = "batch"

    def __post_init__(self) -> None:
        """Refuse what cannot be evaluated."""
        super().__post_init__()
        if self.statistics not in ("stored", "batch") or self.batches < 1:
            raise DsaError(
                f"statistics must be 'stored' or 'batch' and batches at least 1; found {self.statistics!r} and "
                f"{self.batches}"
            )


_Options = TypeVar("_Options")


def read(problem: Problem, kind: type[_Options], method: str) -> _Options:
    """``problem.options`` as an object of ``kind``, a dataclass with a default for each field."""
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in problem.options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise DsaError(f"method {method!r} has no option {name!r}; it has {', '.join(known) or 'none'}.{hint}")
    return kind(**problem.options)
