"""Budgets: the limit that a person names, on the cost that they care about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from budgets.quantities import parse
from dsa_hw.errors import BudgetError
from dsa_hw.units import Quantity, format_magnitude

if TYPE_CHECKING:
    import pandas as pd

    from budgets.cost_model import CostModel
    from dsa_hw.channels import ChannelGroups

__all__ = ["Budget", "EnergyBudget", "FlopsBudget", "LatencyBudget", "MemoryBudget", "ParamsBudget"]


@dataclass(frozen=True)
class Budget:
    """A limit in base units (``FlopsBudget("1.2G")``), or as a share of the dense network (``FlopsBudget("50%")``).

    Args:
        amount: a string with a unit, a ``dsa_hw.units`` quantity or a pint quantity. Bare numbers are refused.
    """

    amount: Any
    quantity: Quantity = field(init=False, repr=False)

    #: what is limited, in words; and its dimension in ``dsa_hw.units``
    kind: ClassVar[str]
    dimension: ClassVar[str]

    def __post_init__(self) -> None:
        """Parse once, so that a bad budget fails where it is written."""
        if type(self) is Budget:
            raise BudgetError(
                "Budget is the common part; use LatencyBudget, EnergyBudget, FlopsBudget, ParamsBudget or MemoryBudget"
            )
        object.__setattr__(self, "quantity", parse(self.amount, self.dimension, type(self).__name__))

    @property
    def relative(self) -> bool:
        """Whether the budget is a share of the dense network."""
        return self.quantity.dimension == "fraction"

    def limit(self, dense: float) -> float:
        """The limit in base units (s, J, B, FLOPs, parameters), given the dense network's cost; refused above it."""
        if not dense > 0:
            raise BudgetError(
                f"{self}: the dense network's {self.kind} is {dense!r}, which is not a positive number; measure it "
                "first"
            )
        if self.relative:
            return self.quantity.magnitude * dense
        if self.quantity.magnitude > dense:
            name = type(self).__name__
            half = format_magnitude(0.5 * dense, self.dimension, 3).replace(" ", "")
            raise BudgetError(
                f"{self} is above the dense network's {self.format(dense)}, so there is nothing to prune; ask for "
                f"less, for example {name}({half!r}) or {name}('50%')"
            )
        return self.quantity.magnitude

    def format(self, value: float) -> str:
        """A cost of this kind in a readable unit: ``0.00493`` -> ``"4.93 ms"``."""
        return format_magnitude(value, self.dimension)

    def __str__(self) -> str:
        """``latency <= 5 ms``."""
        share = " of the dense network" if self.relative else ""
        return f"{self.kind} <= {self.quantity}{share}"


@dataclass(frozen=True)
class FlopsBudget(Budget):
    """Floating-point operations of one inference, two for each multiply-add: ``"50%"``, ``"1.2G"``, ``"600 MMACs"``.

    ``convention="paper"`` counts convolutions only, as DSA's tables do; see ``budgets.flops``.
    """

    convention: str = field(default="counted", kw_only=True)

    kind: ClassVar[str] = "FLOPs"
    dimension: ClassVar[str] = "flops"

    def cost(self, groups: ChannelGroups) -> Any:
        """The exact cost as a function of the keep ratios."""
        from budgets import analytic

        return analytic.flops(groups, self.convention)


@dataclass(frozen=True)
class ParamsBudget(Budget):
    """Number of parameters: ``"2M"``, ``"850k"``, ``"50%"``."""

    kind: ClassVar[str] = "parameters"
    dimension: ClassVar[str] = "params"

    def cost(self, groups: ChannelGroups) -> Any:
        """The exact cost as a function of the keep ratios."""
        from budgets import analytic

        return analytic.params(groups)


@dataclass(frozen=True)
class MemoryBudget(Budget):
    """Peak activation memory of one inference: ``"64MiB"``, ``"50MB"``, ``"60%"``."""

    kind: ClassVar[str] = "activation memory"
    dimension: ClassVar[str] = "memory"

    def cost(self, groups: ChannelGroups) -> Any:
        """The exact cost as a function of the keep ratios."""
        from budgets import analytic

        return analytic.activation_memory(groups)


@dataclass(frozen=True)
class MeasuredBudget(Budget):
    """A budget on something that has to be measured on a target.

    Args:
        amount: see ``Budget``.
        target: runtime and device, for example ``"onnxruntime/cpu"``; None lets the caller choose.
        confidence: None compares the prediction with the limit; 0.9 compares a bound that 9 of 10 configurations keep.
        profile: a profile store, a fitted model (its path or the object) or a profile table to use instead of
            measuring.
    """

    target: str | None = field(default=None, kw_only=True)
    confidence: float | None = field(default=None, kw_only=True)
    profile: str | Path | pd.DataFrame | CostModel | None = field(default=None, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        """Parse and check."""
        super().__post_init__()
        name = type(self).__name__
        if self.confidence is not None and not 0 < self.confidence < 1:
            raise BudgetError(
                f"{name}(confidence={self.confidence!r}): must lie strictly between 0 and 1, for example 0.9"
            )
        if self.target is not None and not (isinstance(self.target, str) and self.target.strip()):
            raise BudgetError(f"{name}(target={self.target!r}): name a target such as 'onnxruntime/cpu'")

    def __str__(self) -> str:
        """``latency <= 5 ms on onnxruntime/cpu``."""
        where = f" on {self.target}" if self.target else ""
        sure = f" with {100 * self.confidence:g} % confidence" if self.confidence else ""
        return f"{super().__str__()}{where}{sure}"


@dataclass(frozen=True)
class LatencyBudget(MeasuredBudget):
    """Time of one inference on a target: ``"5ms"``, ``"60%"``, ``5 * ms``.

    ``quantile`` says which time: 0.5 the median run, 0.95 the run that only one of twenty exceeds (tail latency).
    """

    quantile: float = field(default=0.5, kw_only=True)

    kind: ClassVar[str] = "latency"
    dimension: ClassVar[str] = "time"

    def __post_init__(self) -> None:
        """Parse and check."""
        super().__post_init__()
        if not (isinstance(self.quantile, (int, float)) and 0 < self.quantile < 1):
            raise BudgetError(
                f"LatencyBudget(quantile={self.quantile!r}): must lie strictly between 0 and 1; 0.5 is the median run, "
                "0.95 the tail"
            )

    def __str__(self) -> str:
        """``latency <= 5 ms on onnxruntime/cpu``, with the quantile where it is not the median."""
        tail = "" if self.quantile == 0.5 else f" in {100 * self.quantile:g} % of runs"
        return super().__str__() + tail


@dataclass(frozen=True)
class EnergyBudget(MeasuredBudget):
    """Energy of one inference on a target: ``"40mJ"``, ``"60%"``, ``40 * mJ``; gross, idling included.

    Args:
        amount: see ``Budget``.
        counter: the energy meter, as ``profilers.measuring.counters.Counter.of`` takes it: a function that returns
        joules, or
            ``"package.module:function"``; None uses the device's own.
        model: ``"analytic"`` estimates from counted work instead of measuring; then ``cost(groups)`` is there, as for
            budgets that are counted.
        technology: of the estimate: ``"45nm"``, ``"7nm-int8"``, ..., or your own, see
        ``budgets.analytic_energy.technology``.
    """

    counter: Any = field(default=None, kw_only=True, compare=False)
    model: str | None = field(default=None, kw_only=True)
    technology: str | Path | Mapping[str, Any] | None = field(default=None, kw_only=True, hash=False)

    kind: ClassVar[str] = "energy"
    dimension: ClassVar[str] = "energy"

    def __post_init__(self) -> None:
        """Parse and check."""
        super().__post_init__()
        if self.model is None:
            if self.technology is not None:
                raise BudgetError("EnergyBudget(technology=...) is for estimates: add model='analytic'")
            return
        if self.model != "analytic":
            raise BudgetError(f"EnergyBudget(model={self.model!r}): only 'analytic' is known; leave it out to measure")
        if self.target is not None or self.counter is not None or self.profile is not None:
            raise BudgetError(
                "EnergyBudget(model='analytic') estimates and measures nothing: leave out target, counter and profile, "
                "or leave out model"
            )
        from budgets.analytic_energy import technology

        technology(self._technology)
        object.__setattr__(self, "kind", "estimated energy")  # in every message and in the certificate

    @property
    def _technology(self) -> str | Path | Mapping[str, Any]:
        return "45nm" if self.technology is None else self.technology

    @property
    def cost(self) -> Callable[[ChannelGroups], Any]:
        """The estimate as a function of the keep ratios, given channel groups; absent where energy is measured."""
        if self.model is None:
            raise AttributeError(f"{self} is measured, not counted: it has no cost of its own")
        from budgets.analytic_energy import estimated_energy

        return lambda groups: estimated_energy(groups, self._technology)
