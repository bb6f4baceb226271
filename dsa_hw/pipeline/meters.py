"""Meters: how one cost of real networks is read, by counting or on a device.

A meter reads several networks in one go, so that a device can interleave them: a network and the dense one are compared
within one run and not across days.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import nn

from budgets.budget import Budget, CountedBudget, EstimatedEnergyBudget, MeasuredBudget
from dsa_hw.channels import find_groups
from dsa_hw.errors import BudgetError
from dsa_hw.pipeline.reading import Reading
from profilers import MeasuringRules
from profilers.measuring.environment import environment
from profilers.measuring.statistics import STATISTICS
from profilers.networks.builder import load_module
from profilers.profiling.job import bench_for
from profilers.targets import Target

__all__ = ["DENSE", "CountMeter", "Decided", "DeviceMeter", "Meter", "Seen", "meter_for", "rules_for"]

DENSE = "dense"
_PRECISION = 0.005  # half-width of an interval: what it covers of the budget cannot be used

Seen = Callable[[str, float], None]
"""Called with the name of the network just visited and the share of networks that are finished."""
Decided = Callable[[Mapping[str, Reading]], bool]
"""Whether the readings so far are enough; where they are not, reading goes on until the time limit."""


class Meter(Protocol):
    """Reads one cost of networks.

    Attributes:
        title: The target in full; "counted" where there is none.
        environment: Versions and settings that the readings depend on.
        exact: Whether predictions at real widths are the readings themselves.
    """

    title: str
    environment: Mapping[str, str]
    exact: bool

    def read(
        self,
        networks: Mapping[str, nn.Module],
        limit: float,
        seen: Seen | None = None,
        decided: Decided | None = None,
    ) -> dict[str, Reading]:
        """Read the cost of each network.

        Args:
            networks: The networks by name.
            limit: About how many seconds reading may take.
            seen: Called after each visit of a network.
            decided: Asked whether the readings are enough.

        Returns:
            A reading for each name.
        """


def meter_for(
    budget: Budget, target: Target | None, inputs: tuple[Any, ...], rules: MeasuringRules | None = None, seed: int = 0
) -> Meter:
    """Return the meter of a budget.

    Args:
        budget: A counted or measured budget.
        target: Where a measured budget holds.
        inputs: Example inputs of the networks.
        rules: How to measure; the statistic is the budget's.
        seed: Seed of the order of runs.

    Returns:
        A `CountMeter` or a `DeviceMeter`.

    Raises:
        BudgetError: A measured budget without a target.
    """
    if isinstance(budget, CountedBudget):
        return CountMeter(budget, inputs)
    if not isinstance(budget, MeasuredBudget) or target is None:
        raise BudgetError(f"{budget}: the budget needs a target, for example target='onnxruntime/cpu'.")
    return DeviceMeter.of(budget, target, inputs, rules_for(budget, rules), seed)


def rules_for(budget: Budget, rules: MeasuringRules | None = None) -> MeasuringRules:
    """Return the measuring rules with the statistic that the budget names.

    Raises:
        BudgetError: The quantile of the budget is not one that is measured.
    """
    rules = rules or MeasuringRules()
    quantile = getattr(budget, "quantile", None)
    if quantile is None:
        return rules
    by_order = {order: name for name, order in STATISTICS.items()}
    if quantile not in by_order:
        known = ", ".join(f"{order:g} ({name})" for order, name in sorted(by_order.items()))
        raise BudgetError(f"{budget}: the quantile must be one of {known}; got {quantile:g}.")
    return replace(rules, statistic=by_order[quantile])


class CountMeter:
    """Counts a cost on the network itself, from its own graph; nothing is run."""

    exact = True

    def __init__(self, budget: CountedBudget, inputs: tuple[Any, ...]) -> None:
        self.title = "paper" if isinstance(budget, EstimatedEnergyBudget) else "counted"
        self.environment: Mapping[str, str] = {}
        self._budget, self._inputs = budget, inputs

    def read(
        self,
        networks: Mapping[str, nn.Module],
        limit: float = 0.0,
        seen: Seen | None = None,
        decided: Decided | None = None,
    ) -> dict[str, Reading]:
        """Count the cost of each network; see `Meter.read`."""
        found = {}
        for name, model in networks.items():
            cost = self._budget.cost(find_groups(model, self._inputs))
            value = float(cost.dense)
            found[name] = Reading(value, value, value, estimated=getattr(cost, "estimated", None))
        return found


class DeviceMeter:
    """Measures networks on a target in interleaved rounds.

    A network stays loaded while its name is asked for again with the same module, so the dense one is loaded once.
    """

    exact = False

    def __init__(
        self,
        target: Target,
        inputs: tuple[Any, ...],
        rules: MeasuringRules,
        seed: int = 0,
        *,
        quantity: str = "latency",
        counter: Any = None,
    ) -> None:
        """Prepare to measure.

        Args:
            target: Where to measure.
            inputs: Example inputs of the networks.
            rules: How to measure; the precision is at least that of a certificate.
            seed: Seed of the order of runs.
            quantity: "latency" or "energy".
            counter: The energy counter; None finds the device's own.
        """
        self.target, self.title, self.quantity = target, target.title, quantity
        self.rules = replace(rules, precision=min(rules.precision, _PRECISION))
        self._inputs, self._seed, self._counter = inputs, seed, counter
        self._bench: Any = None
        self._loaded: dict[str, tuple[nn.Module, Any]] = {}
        # A missing energy counter must be found before anything is profiled; a clock is always there.
        self.environment: Mapping[str, str] = environment(target) if quantity == "latency" else self._made().environment

    @classmethod
    def of(
        cls, budget: MeasuredBudget, target: Target, inputs: tuple[Any, ...], rules: MeasuringRules, seed: int = 0
    ) -> DeviceMeter:
        """Return the meter for the quantity and the counter that a budget names."""
        return cls(target, inputs, rules, seed, quantity=budget.key, counter=getattr(budget, "counter", None))

    def read(
        self,
        networks: Mapping[str, nn.Module],
        limit: float,
        seen: Seen | None = None,
        decided: Decided | None = None,
    ) -> dict[str, Reading]:
        """Measure seconds or joules of each network; see `Meter.read`.

        Where ``decided`` says no, the precision that is aimed at is halved and measuring goes on with the runs so far.
        Each halving takes about four times the runs, so that there are few looks at the data.
        """
        kept = {name: pair for name, pair in self._loaded.items() if networks.get(name) is pair[0]}
        for name, model in networks.items():
            if name not in kept:
                kept[name] = (model, load_module(model, self._inputs, self.target))
        self._loaded = kept
        loaded = {name: kept[name][1] for name in networks}
        bench = self._made()
        finished: set[str] = set()

        def visited(name: str, _: Any, measurement: Any) -> None:
            if measurement.finished:
                finished.add(name)
            if seen is not None:
                seen(name, len(finished) / len(loaded))

        # An energy counter that is updated ten times a second needs minutes, whatever the limit.
        longest = max(limit, bench.least_seconds(len(loaded)))
        end = bench.now() + longest
        found = bench.measure(loaded, limit=longest, on_visit=visited)
        readings = _readings(found)
        while decided is not None and not decided(readings) and (left := end - bench.now()) > 0:
            widest = max(m.halfwidth for m in found.values())
            if not widest > 0:
                break  # estimated, not measured: a repetition gives the same
            rules = replace(self.rules, precision=min(widest, self.rules.precision) / 2)
            earlier = {name: m.samples for name, m in found.items()}
            found = bench.measure(loaded, limit=left, earlier=earlier, on_visit=visited, rules=rules)
            readings = _readings(found)
        return readings

    def _made(self) -> Any:
        if self._bench is None:
            options = {"rules": self.rules, "seed": self._seed}
            self._bench = bench_for(self.quantity, self.target, counter=self._counter, **options)
        return self._bench


def _readings(found: Mapping[str, Any]) -> dict[str, Reading]:
    return {
        name: Reading(
            m.value, m.low, m.high, m.runs, m.rules.statistic, m.doubt, m.estimated,
            None if m.flaw else m.own, m.rules.worst,
        )
        for name, m in found.items()
    }  # fmt: skip
