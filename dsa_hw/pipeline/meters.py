"""Gauges: how one cost of real networks is read, on a device or by counting.

A gauge reads several networks in one go, so that a device can interleave them; the network and the dense one are
compared within one run and not across days. `gauge_for` chooses by the kind of budget; another kind of measurement
(energy) registers a maker with ``@gauge("EnergyBudget")``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from budgets.budget import CountedBudget, EstimatedEnergyBudget
from dsa_hw.errors import BudgetError
from dsa_hw.pipeline.certificate import Reading

if TYPE_CHECKING:
    from budgets import Budget
    from profilers import MeasuringRules
    from profilers.targets import Target

__all__ = ["DENSE", "CountGauge", "DeviceGauge", "Gauge", "gauge", "gauge_for", "rules_for"]

DENSE = "dense"
_PRECISION = 0.005  # a certificate wants narrower intervals than a profile: what they cover cannot be used


class Gauge(Protocol):
    """Reads one cost of networks."""

    title: str
    """The target in full, "counted" where there is none."""
    environment: Mapping[str, str]
    """Versions and flags that the readings depend on."""
    exact: bool
    """Whether predictions at real widths are the readings themselves."""

    def read(
        self,
        networks: Mapping[str, nn.Module],
        limit: float,
        seen: Seen | None = None,
        decided: Decided | None = None,
    ) -> dict[str, Reading]:
        """Read each network, within about ``limit`` seconds.

        Args:
            networks: by name.
            limit: seconds.
            seen: called with the name of the network just visited and the share that is finished.
            decided: whether the readings so far are enough; where they are not, reading goes on until ``limit``.
        """


Seen = Callable[[str, float], None]
Decided = Callable[[Mapping[str, Reading]], bool]
Maker = Callable[["Budget", "Target", tuple[Any, ...], "MeasuringRules", int], Gauge]
_MAKERS: dict[str, Maker] = {}


def gauge(kind: str) -> Callable[[Maker], Maker]:
    """Register ``maker(budget, target, inputs, rules, seed)`` for budgets of this class name."""

    def register(maker: Maker) -> Maker:
        _MAKERS[kind] = maker
        return maker

    return register


def gauge_for(
    budget: Budget, target: Target | None, inputs: tuple[Any, ...], rules: MeasuringRules | None = None, seed: int = 0
) -> Gauge:
    """The gauge for a budget: counting where the cost is counted, else what is registered for it."""
    if isinstance(budget, CountedBudget):
        return CountGauge(budget, inputs)
    kind = type(budget).__name__
    if kind not in _MAKERS or target is None:
        raise BudgetError(f"{budget}: {budget.title} cannot be measured here; known are {', '.join(_MAKERS)}")
    return _MAKERS[kind](budget, target, inputs, rules_for(budget, rules), seed)


def rules_for(budget: Any, rules: MeasuringRules | None = None) -> MeasuringRules:
    """The rules of measuring with the statistic that the budget names: its quantile of the undisturbed runs."""
    from profilers import MeasuringRules
    from profilers.measuring.statistics import STATISTICS

    rules = rules or MeasuringRules()
    quantile = getattr(budget, "quantile", None)
    if quantile is None:
        return rules
    by_order = {order: name for name, order in STATISTICS.items()}
    if quantile not in by_order:
        known = ", ".join(f"{order:g} ({name})" for order, name in sorted(by_order.items()))
        raise BudgetError(f"{budget}: quantile {quantile:g} is not one that is measured; choose from {known}")
    return replace(rules, statistic=by_order[quantile])


class CountGauge:
    """Counts a cost on the really smaller network, from its own graph; an estimate made of counts says that it is."""

    exact = True

    def __init__(self, budget: Any, inputs: tuple[Any, ...]) -> None:
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
        """Counts; nothing is run."""
        from dsa_hw.channels import find_groups

        found = {}
        for name, model in networks.items():
            cost = self._budget.cost(find_groups(model, self._inputs))
            value = float(cost.dense)
            found[name] = Reading(value, value, value, estimated=getattr(cost, "estimated", None))
        return found


@gauge("LatencyBudget")
def _latency(budget: Any, target: Target, inputs: tuple[Any, ...], rules: MeasuringRules, seed: int) -> Gauge:
    return DeviceGauge(target, inputs, rules, seed)


@gauge("EnergyBudget")
def _energy(budget: Any, target: Target, inputs: tuple[Any, ...], rules: MeasuringRules, seed: int) -> Gauge:
    return DeviceGauge(target, inputs, rules, seed, quantity="energy", counter=getattr(budget, "counter", None))


class DeviceGauge:
    """Measures networks on a target in interleaved rounds, with the profiler's rules of trust.

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
        from profilers.measuring.environment import environment

        self.target, self.title, self.quantity = target, target.title, quantity
        self.rules = replace(rules, precision=min(rules.precision, _PRECISION))
        self._inputs, self._seed, self._counter = inputs, seed, counter
        self._bench: Any = None
        self._loaded: dict[str, tuple[nn.Module, Any]] = {}
        # Whether there is an energy counter shows before anything is profiled; a clock is always there.
        self.environment: Mapping[str, str] = environment(target) if quantity == "latency" else self._made().environment

    def _made(self) -> Any:
        from profilers.profiling.job import bench_for

        if self._bench is None:
            options = {"rules": self.rules, "seed": self._seed}
            self._bench = bench_for(self.quantity, self.target, counter=self._counter, **options)
        return self._bench

    def read(
        self,
        networks: Mapping[str, nn.Module],
        limit: float,
        seen: Seen | None = None,
        decided: Decided | None = None,
    ) -> dict[str, Reading]:
        """Seconds or joules of each network.

        Where ``decided`` says no, the precision that is aimed at is halved and measuring goes on with the runs so far.
        Each halving takes about four times the runs, so that there are few looks at the data.
        """
        from profilers.networks.builder import load_module

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

        # An energy counter that ticks ten times a second needs minutes, whatever was planned.
        longest = max(limit, bench.least_seconds(len(loaded)))
        end = bench.now() + longest
        found = bench.measure(loaded, limit=longest, on_visit=visited)
        readings = _readings(found)
        while decided is not None and not decided(readings) and (left := end - bench.now()) > 0:
            widest = max(m.halfwidth for m in found.values())
            if not widest > 0:
                break  # computed, not measured: more of the same
            rules = replace(self.rules, precision=min(widest, self.rules.precision) / 2)
            earlier = {name: m.samples for name, m in found.items()}
            found = bench.measure(loaded, limit=left, earlier=earlier, on_visit=visited, rules=rules)
            readings = _readings(found)
        return readings


def _readings(found: Mapping[str, Any]) -> dict[str, Reading]:
    return {
        name: Reading(
            m.value, m.low, m.high, m.runs, m.rules.statistic, m.doubt, m.estimated,
            None if m.flaw else m.own, m.rules.worst,
        )
        for name, m in found.items()
    }  # fmt: skip
