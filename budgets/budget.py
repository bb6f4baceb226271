"""Budgets: an upper limit on one cost of a network.

A budget is counted (`CountedBudget`: FLOPs, parameters, memory, estimated energy) or measured on a target
(`MeasuredBudget`: latency, energy). `BUDGETS` lists the classes by their key, the name used on the command line and in
tables.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import budgets  # the costs (torch, pandas) are loaded when a cost is computed
from budgets.quantities import parse
from budgets.technologies import TECHNOLOGIES, Technology, technology
from dsa_hw.errors import BudgetError
from dsa_hw.units import BASE_UNITS, Quantity, format_magnitude

if TYPE_CHECKING:
    import pandas as pd

    from budgets.analytic import AnalyticCost, PeakCost
    from budgets.analytic_energy import EstimatedEnergy
    from budgets.cost_model import CostModel
    from budgets.microcontroller import ArenaCost
    from dsa_hw.channels import ChannelGroups
    from dsa_hw.profiles import Profile

__all__ = [
    "BUDGETS",
    "Budget",
    "CountedBudget",
    "EnergyBudget",
    "EstimatedEnergyBudget",
    "FlopsBudget",
    "LatencyBudget",
    "MeasuredBudget",
    "MemoryBudget",
    "ParamsBudget",
]


@dataclass(frozen=True)
class Budget:
    """Upper limit on one cost, absolute or as a share of the dense network.

    This class is abstract; use one of its subclasses.

    Args:
        amount: A string with a unit (``"5ms"``), a share (``"50%"``) or a ``dsa_hw.units`` quantity (``5 * ms``).

    Raises:
        BudgetError: The amount has no unit, a unit of another dimension, or is not positive.
    """

    amount: Any
    quantity: Quantity = field(init=False, repr=False)

    #: Name on the command line and in tables.
    key: ClassVar[str]
    #: What is limited, in words.
    title: ClassVar[str]
    #: Dimension of the cost in ``dsa_hw.units``.
    dimension: ClassVar[str]
    #: Options that `to_dict` writes and `from_dict` accepts, each with its allowed values (None: any text or number).
    file_options: ClassVar[Mapping[str, Collection[str] | None]] = {}
    #: Options that may hold code or a path: they come from the user, never from a file.
    user_options: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Parse the amount, so that a wrong budget fails where it is written."""
        if not hasattr(type(self), "key"):
            names = ", ".join(cls.__name__ for cls in BUDGETS.values())
            raise BudgetError(f"{type(self).__name__} is abstract. Use one of {names}.")
        object.__setattr__(self, "quantity", parse(self.amount, self.dimension, type(self).__name__))

    @property
    def relative(self) -> bool:
        """Whether the budget is a share of the dense network."""
        return self.quantity.dimension == "fraction"

    def limit(self, dense: float) -> float:
        """Return the limit in base units, given the dense network's cost.

        >>> FlopsBudget("50%").limit(dense=3e9)
        1500000000.0

        Raises:
            BudgetError: ``dense`` is not positive, or the limit is above it.
        """
        if not dense > 0:
            raise BudgetError(f"{self}: the dense network's {self.title} must be positive; got {dense!r}.")
        if self.relative:
            return self.quantity.magnitude * dense
        if self.quantity.magnitude > dense:
            name = type(self).__name__
            half = format_magnitude(0.5 * dense, self.dimension, 3).replace(" ", "")
            raise BudgetError(
                f"{self} is above the dense network's {self.format(dense)}: there is nothing to prune. Use a smaller "
                f"limit, e.g. {name}({half!r}) or {name}('50%')."
            )
        return self.quantity.magnitude

    def format(self, value: float) -> str:
        """Return a cost of this kind in a readable unit.

        >>> LatencyBudget("5ms").format(0.00493)
        '4.93 ms'
        """
        return format_magnitude(value, self.dimension)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data from which `from_dict` makes an equal budget.

        Code and files (an energy counter, a technology of the user's own) are not written: ``"own"`` lists their names.
        A profile is left out.
        """
        quantity = self.quantity
        if self.relative:
            amount = f"{100 * quantity.magnitude!r}%"
        else:
            amount = f"{quantity.magnitude!r} {BASE_UNITS[quantity.dimension]}"
        own = [name for name in self.user_options if not self._is_plain(name)]
        options = {name: getattr(self, name) for name in self.file_options if name not in own}
        content = {name: value for name, value in options.items() if value is not None}
        return {"kind": type(self).__name__, "amount": amount, **content, **({"own": own} if own else {})}

    @staticmethod
    def from_dict(content: Mapping[str, Any], **own: Any) -> Budget:
        """Make the budget that `to_dict` wrote, from a file that need not be trusted.

        The class and its options come from a fixed list, so that a file chooses neither code nor a path.

        >>> Budget.from_dict(FlopsBudget("50%").to_dict())
        FlopsBudget(amount='50.0%', convention='counted')

        Args:
            content: What `to_dict` returned.
            own: ``counter`` and ``technology`` as the user gave them; required where ``content["own"]`` names them,
                ignored by a budget without that option.

        Raises:
            BudgetError: ``content`` does not describe a budget, or a value of the user's own is missing.
        """
        classes = {cls.__name__: cls for cls in BUDGETS.values()}
        kind = content.get("kind")
        cls = classes.get(kind) if isinstance(kind, str) else None
        if cls is None:
            raise BudgetError(f"Unknown kind of budget {kind!r}. Known kinds: {', '.join(classes)}.")
        needed = content.get("own", [])
        if not isinstance(needed, list) or not all(isinstance(n, str) and n in cls.user_options for n in needed):
            raise BudgetError(f"{kind}: 'own' may list {', '.join(cls.user_options) or 'nothing'}; got {needed!r}.")
        options = {name: value for name, value in content.items() if name not in ("kind", "own")}
        for name, value in options.items():
            if name != "amount" and (name not in cls.file_options or name in needed):
                allowed = ", ".join(n for n in cls.file_options if n not in needed) or "the amount only"
                raise BudgetError(f"{kind}: a file cannot set the option {name!r}; it can set {allowed}.")
            if isinstance(value, bool) or not isinstance(value, (str, int, float)):
                raise BudgetError(f"{kind}: {name} must be text or a number; got {value!r}.")
            if isinstance(value, str) and not value.isprintable():
                raise BudgetError(f"{kind}: {name} must not have control characters; got {value!r}.")
            if (choices := cls.file_options.get(name)) is not None and value not in choices:
                raise BudgetError(f"{kind}: a file can set {name} to {', '.join(choices)}; got {value!r}.")
        if missing := [name for name in needed if own.get(name) is None]:
            name = missing[0]
            raise BudgetError(
                f"{kind} was made with a {name} of the user's own, which a file cannot choose. Give it with --{name} "
                f"({name}= in Python)."
            )
        taken = [name for name in cls.user_options if name not in options and own.get(name) is not None]
        amount = options.pop("amount", None)
        try:
            return cls(amount, **options, **{name: own[name] for name in taken})
        except TypeError as error:
            raise BudgetError(f"{kind}: {dict(content)!r} does not describe a budget ({error}).") from error

    def _is_plain(self, name: str) -> bool:
        """Whether the option can be written to a file."""
        value, choices = getattr(self, name), self.file_options.get(name)
        return value is None or (choices is not None and isinstance(value, str) and value in choices)

    def __str__(self) -> str:
        """Return, for example, ``latency <= 5 ms``."""
        share = " of the dense network" if self.relative else ""
        return f"{self.title} <= {self.quantity}{share}"


@dataclass(frozen=True)
class CountedBudget(Budget):
    """A budget on a cost that is computed from the channel groups."""

    def cost(self, groups: ChannelGroups) -> AnalyticCost | PeakCost | ArenaCost:
        """Return the cost as a function of the keep ratios."""
        raise NotImplementedError


@dataclass(frozen=True)
class FlopsBudget(CountedBudget):
    """Floating-point operations of one inference, two for each multiply-add.

    >>> print(FlopsBudget("600 MMACs"))
    FLOPs <= 1.2 GFLOPs

    Args:
        amount: ``"50%"``, ``"1.2G"``, ``"600 MMACs"``, ...
        convention: ``"counted"``, or ``"paper"`` for convolutions only, as in DSA's tables; see ``budgets.flops``.
    """

    convention: str = field(default="counted", kw_only=True)

    key: ClassVar[str] = "flops"
    title: ClassVar[str] = "FLOPs"
    dimension: ClassVar[str] = "flops"
    file_options: ClassVar[Mapping[str, Collection[str] | None]] = {"convention": ("counted", "paper")}

    def cost(self, groups: ChannelGroups) -> AnalyticCost:
        """Return the FLOPs as a function of the keep ratios."""
        return budgets.flops(groups, self.convention)


@dataclass(frozen=True)
class ParamsBudget(CountedBudget):
    """Number of parameters: ``"2M"``, ``"850k"``, ``"50%"``.

    >>> print(ParamsBudget("850k"))
    parameters <= 850 kparams
    """

    key: ClassVar[str] = "params"
    title: ClassVar[str] = "parameters"
    dimension: ClassVar[str] = "params"

    def cost(self, groups: ChannelGroups) -> AnalyticCost:
        """Return the number of parameters as a function of the keep ratios."""
        return budgets.params(groups)


@dataclass(frozen=True)
class MemoryBudget(CountedBudget):
    """Memory of one inference: ``"64MiB"``, ``"50MB"``, ``"60%"``.

    >>> print(MemoryBudget("64MiB"))
    activation memory <= 64 MiB
    >>> print(MemoryBudget("256KiB", part="sram"))
    SRAM (int8 arena, vela) <= 256 KiB

    Args:
        amount: See `Budget`.
        part: ``"activations"`` for the peak of live activations in their own type. On a microcontroller, in int8,
            ``"sram"`` for the arena and ``"flash"`` for weights, biases and scales; see ``budgets.microcontroller``.
        planner: Who lays out ``"sram"`` and ``"flash"``: ``"vela"`` (Arm Ethos-U) or ``"tflite-micro"``.
    """

    part: str = field(default="activations", kw_only=True)
    planner: str = field(default="vela", kw_only=True)

    key: ClassVar[str] = "memory"
    title: ClassVar[str] = "activation memory"
    dimension: ClassVar[str] = "memory"
    file_options: ClassVar[Mapping[str, Collection[str] | None]] = {
        "part": ("activations", "sram", "flash"),
        "planner": ("vela", "tflite-micro"),
    }

    def __post_init__(self) -> None:
        """Parse and check."""
        super().__post_init__()
        for name, known in self.file_options.items():
            if getattr(self, name) not in (known or ()):
                names = ", ".join(map(repr, known or ()))
                raise BudgetError(f"MemoryBudget: `{name}` must be one of {names}; got {getattr(self, name)!r}.")
        if self.part != "activations":
            words = "SRAM (int8 arena" if self.part == "sram" else "flash (int8 weights"
            object.__setattr__(self, "title", f"{words}, {self.planner})")

    def cost(self, groups: ChannelGroups) -> AnalyticCost | PeakCost | ArenaCost:
        """Return the bytes as a function of the keep ratios."""
        if self.part == "activations":
            return budgets.activation_memory(groups)
        count = budgets.arena if self.part == "sram" else budgets.flash
        return count(groups, self.planner)  # type: ignore[arg-type]


@dataclass(frozen=True)
class EstimatedEnergyBudget(CountedBudget):
    """Energy of one inference, estimated from counted work.

    >>> print(EstimatedEnergyBudget("40uJ", technology="7nm-int8"))
    estimated energy <= 40 uJ

    Args:
        amount: ``"40mJ"``, ``"60%"``, ``40 * mJ``, ...
        technology: ``"45nm"``, ``"7nm-int8"``, ..., or your own: a mapping or a JSON file, see
            ``budgets.technologies.technology``.
    """

    technology: str | Path | Mapping[str, Any] | Technology = field(default="45nm", kw_only=True, hash=False)

    key: ClassVar[str] = "estimated_energy"
    title: ClassVar[str] = "estimated energy"
    dimension: ClassVar[str] = "energy"
    file_options: ClassVar[Mapping[str, Collection[str] | None]] = {"technology": TECHNOLOGIES}
    user_options: ClassVar[tuple[str, ...]] = ("technology",)

    def __post_init__(self) -> None:
        """Parse and check."""
        super().__post_init__()
        technology(self.technology)

    def cost(self, groups: ChannelGroups) -> EstimatedEnergy:
        """Return the estimated energy as a function of the keep ratios."""
        return budgets.estimated_energy(groups, self.technology)


@dataclass(frozen=True)
class MeasuredBudget(Budget):
    """A budget on a cost that is measured on a target.

    Args:
        amount: See `Budget`.
        target: Runtime and device, e.g. ``"onnxruntime/cpu"``; None lets the caller choose.
        confidence: None compares the prediction with the limit; 0.9 compares an upper bound that holds for 9 of 10
            configurations.
        profile: A profile, its store, or a fitted cost model (its path or the object) to use instead of measuring.
    """

    target: str | None = field(default=None, kw_only=True)
    confidence: float | None = field(default=None, kw_only=True)
    profile: str | Path | Profile | pd.DataFrame | CostModel | None = field(default=None, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        """Parse and check."""
        super().__post_init__()
        name = type(self).__name__
        if self.confidence is not None and not 0 < self.confidence < 1:
            raise BudgetError(
                f"{name}: `confidence` must lie strictly between 0 and 1, e.g. 0.9; got {self.confidence!r}."
            )
        if self.target is not None and not (isinstance(self.target, str) and self.target.strip()):
            raise BudgetError(f"{name}: `target` must name a target, e.g. 'onnxruntime/cpu'; got {self.target!r}.")

    def __str__(self) -> str:
        """Return, for example, ``latency <= 5 ms on onnxruntime/cpu``."""
        where = f" on {self.target}" if self.target else ""
        sure = f" with {100 * self.confidence:g}% confidence" if self.confidence else ""
        return f"{super().__str__()}{where}{sure}"


@dataclass(frozen=True)
class LatencyBudget(MeasuredBudget):
    """Time of one inference on a target.

    >>> print(LatencyBudget("5ms", target="onnxruntime/cpu", quantile=0.95))
    latency <= 5 ms on onnxruntime/cpu in 95% of runs

    Args:
        amount: ``"5ms"``, ``"60%"``, ``5 * ms``, ...
        target: See `MeasuredBudget`.
        confidence: See `MeasuredBudget`.
        profile: See `MeasuredBudget`.
        quantile: Which time of the runs: 0.5 is the median, 0.95 the time that one run in twenty exceeds.
    """

    quantile: float = field(default=0.5, kw_only=True)

    key: ClassVar[str] = "latency"
    title: ClassVar[str] = "latency"
    dimension: ClassVar[str] = "time"
    file_options: ClassVar[Mapping[str, Collection[str] | None]] = dict.fromkeys(("target", "confidence", "quantile"))

    def __post_init__(self) -> None:
        """Parse and check."""
        super().__post_init__()
        if not (isinstance(self.quantile, (int, float)) and 0 < self.quantile < 1):
            raise BudgetError(
                "LatencyBudget: `quantile` must lie strictly between 0 and 1 (0.5 is the median run, 0.95 the tail); "
                f"got {self.quantile!r}."
            )

    def __str__(self) -> str:
        """Return, for example, ``latency <= 5 ms on onnxruntime/cpu``."""
        tail = "" if self.quantile == 0.5 else f" in {100 * self.quantile:g}% of runs"
        return super().__str__() + tail


@dataclass(frozen=True)
class EnergyBudget(MeasuredBudget):
    """Energy of one inference on a target, measured; idle power is included.

    >>> print(EnergyBudget("40mJ", target="torch/cuda"))
    energy <= 40 mJ on torch/cuda

    Args:
        amount: ``"40mJ"``, ``"60%"``, ``40 * mJ``, ...
        target: See `MeasuredBudget`.
        confidence: See `MeasuredBudget`.
        profile: See `MeasuredBudget`.
        counter: The energy meter, as ``profilers.measuring.counters.Counter.of`` takes it: a function that returns
            joules, or ``"package.module:function"``; None uses the device's own.
    """

    counter: Any = field(default=None, kw_only=True, compare=False)

    key: ClassVar[str] = "energy"
    title: ClassVar[str] = "energy"
    dimension: ClassVar[str] = "energy"
    file_options: ClassVar[Mapping[str, Collection[str] | None]] = dict.fromkeys(("target", "confidence"))
    user_options: ClassVar[tuple[str, ...]] = ("counter",)


BUDGETS: Final[dict[str, type[Budget]]] = {
    cls.key: cls
    for cls in (LatencyBudget, EnergyBudget, EstimatedEnergyBudget, FlopsBudget, ParamsBudget, MemoryBudget)
}
"""Key -> class of every budget: the only list of budgets in the project."""
