"""Meters: how one cost of real networks is read, by counting or on a device.

A meter reads several networks in one go, so that a device can interleave them: a network is compared with the dense
one in runs next to each other, and not across days.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import nn

from budgets.budget import Budget, CountedBudget, EstimatedEnergyBudget, MeasuredBudget
from dsa_hw.channels import ChannelGroups, find_groups
from dsa_hw.errors import BudgetError
from dsa_hw.pipeline.reading import Reading
from dsa_hw.utils.arrays import Ints
from profilers import MeasuringRules
from profilers.measuring.bench import DENSE, Bench
from profilers.measuring.environment import environment
from profilers.measuring.measurement import Measurement, Samples
from profilers.measuring.sittings import anchor_widths
from profilers.measuring.statistics import STATISTICS
from profilers.networks.builder import ConfigurationBuilder, loadable_module
from profilers.networks.loaded import Loadable
from profilers.profiling.job import bench_for, described
from profilers.targets import Target

__all__ = ["DENSE", "CountMeter", "Decided", "DeviceMeter", "Kept", "Meter", "Seen", "meter_for", "rules_for"]

_ANCHOR = "anchor"
_PIECE = 12.0  # seconds after which a reading is looked at, if it is not precise enough before
_FINE = 0.003  # half-width of a ratio's interval within a sitting that is precise enough
_LAST_LOOK = 1  # the number of the last of several looks: half of the error rate is its share
_SHARE = 0.25  # of the variance between sittings: below it, a longer sitting tells no more

Seen = Callable[[str, float], None]
"""Called with the name of the network just visited and the share of networks that are finished."""
Decided = Callable[[Mapping[str, Reading]], bool]
"""Whether the readings so far are enough; where they are not, reading goes on until the time limit."""
Kept = Mapping[str, Sequence[Ints]]
"""The channels that a network keeps of each group, by the name of the network."""


class Meter(Protocol):
    """Reads one cost of networks.

    Attributes:
        title: The target in full; "counted" where there is none.
        specification: The target as a user names it, with its options; "" where there is none.
        environment: Versions and settings that the readings depend on.
        exact: Whether predictions at real widths are the readings themselves.
    """

    title: str
    specification: str
    environment: Mapping[str, str]
    exact: bool

    def read(
        self,
        networks: Mapping[str, nn.Module],
        limit: float,
        seen: Seen | None = None,
        decided: Decided | None = None,
        kept: Kept | None = None,
    ) -> dict[str, Reading]:
        """Read the cost of each network.

        Args:
            networks: The networks by name.
            limit: About how many seconds reading may take.
            seen: Called after each visit of a network.
            decided: Asked whether the readings are enough.
            kept: Which channels of the network called `DENSE` the others keep, by name, where that is known. Their
                graphs are then narrowed from its graph, which takes a fraction of the time of an export.

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
    specification = ""

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
        kept: Kept | None = None,
    ) -> dict[str, Reading]:
        """Count the cost of each network; see `Meter.read`."""
        found = {}
        for name, model in networks.items():
            cost = self._budget.cost(find_groups(model, self._inputs))
            value = float(cost.dense)
            found[name] = Reading(value, value, value, estimated=getattr(cost, "estimated", None))
        return found


class DeviceMeter:
    """Measures networks on a target in interleaved rounds, as ratios to the dense network.

    A network is exported once, as long as its name is asked for again with the same module.
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
        builder: Callable[[], ConfigurationBuilder] | None = None,
    ) -> None:
        """Prepare to measure.

        Args:
            target: Where to measure.
            inputs: Example inputs of the networks.
            rules: How to measure.
            seed: Seed of the order of runs.
            quantity: "latency" or "energy".
            counter: The energy counter; None finds the device's own.
            builder: Returns what builds configurations of the dense network; None exports it.
        """
        self._make_builder = builder
        self.target, self.title, self.quantity = target, target.title, quantity
        self.specification = target.name
        self.rules = rules
        self._inputs, self._seed, self._counter = inputs, seed, counter
        self._benches: dict[str, Bench] = {}
        self._prepared: dict[str, tuple[nn.Module, Loadable]] = {}
        # A missing energy counter must be found before anything is profiled; a clock is always there.
        self.environment: Mapping[str, str] = (
            environment(target) if quantity == "latency" else self._bench(None).environment
        )

    @classmethod
    def of(
        cls,
        budget: MeasuredBudget,
        target: Target,
        inputs: tuple[Any, ...],
        rules: MeasuringRules,
        seed: int = 0,
        builder: Callable[[], ConfigurationBuilder] | None = None,
    ) -> DeviceMeter:
        """Return the meter for the quantity and the counter that a budget names."""
        counter = getattr(budget, "counter", None)
        return cls(target, inputs, rules, seed, quantity=budget.key, counter=counter, builder=builder)

    def read(
        self,
        networks: Mapping[str, nn.Module],
        limit: float,
        seen: Seen | None = None,
        decided: Decided | None = None,
        kept: Kept | None = None,
    ) -> dict[str, Reading]:
        """Measure seconds or joules of each network; see `Meter.read`.

        The network that is called `DENSE`, or else the last one, is what the others are compared with. Reading goes on
        in pieces of a sitting until the ratios are known so well that the scatter between sittings is most of their
        error: more of the same sitting would not decide. Before that, ``decided`` is asked after 1, 2, 4, ... pieces.
        Half of the error rate is kept for the last look, and these looks share the other half. Where the first look is
        the last, it has all.
        """
        names = [*networks]
        pivot = DENSE if DENSE in networks else names[-1]
        groups = self._prepare_dense(networks[DENSE]) if pivot == DENSE and self.target.estimated is None else None
        for name, model in networks.items():
            if name not in self._prepared or self._prepared[name][0] is not model:
                if groups is not None and kept is not None and name in kept:
                    loadable = self._builder.loadable_kept(kept[name])
                else:
                    loadable = loadable_module(model, self._inputs, self.target)
                self._prepared[name] = (model, loadable)
        self._prepared = {name: self._prepared[name] for name in self._prepared if name in networks or name == _ANCHOR}
        others = {name: self._prepared[name][1] for name in names if name != pivot}
        if groups is not None:
            others[_ANCHOR] = self._prepared[_ANCHOR][1]
        bench = self._bench(groups)
        rules = bench.rules
        if self.quantity == "latency":  # few networks are measured: more of each
            rules = replace(rules, least_seconds=max(rules.least_seconds, 0.5), least_blocks=max(rules.least_blocks, 3))

        def enough(found: Mapping[str, Measurement]) -> bool:
            return all(_fine(m) for name, m in found.items() if name != DENSE)

        # An energy counter that is updated ten times a second needs minutes, whatever the limit.
        longest = max(limit, bench.least_seconds(len(others)))
        begin = bench.now()
        runs: dict[str, Samples] = {}
        pieces = 0
        while True:
            left = longest - (bench.now() - begin)
            part = bench.measure(
                others,
                self._prepared[pivot][1],
                limit=min(left, max(_PIECE, bench.least_seconds(len(others)))),
                on_round=lambda new: seen(next(iter(new)), min((bench.now() - begin) / longest, 1.0)) if seen else None,
                enough=enough,
                rules=rules,
            )
            pieces += 1
            if _ANCHOR in part:
                bench.record(part[_ANCHOR])
            for name, m in part.items():
                runs[name] = Samples.joined([runs[name], m.samples]) if name in runs else m.samples
            found = bench.judged(runs, rules)
            over = decided is None or self.target.estimated is not None or bench.now() - begin >= longest
            last = over or enough(found)
            if last or pieces & (pieces - 1) == 0:
                look = (0 if pieces == 1 else _LAST_LOOK) if last else _LAST_LOOK + pieces.bit_length()
                found = bench.judged(runs, rules, look)
                readings = {name: _reading(found[DENSE if name == pivot else name]) for name in names}
                if last or (decided is not None and decided(readings)):
                    return readings

    @property
    def dimension(self) -> str:
        """Dimension of what is measured: "time" or "energy"."""
        return "time" if self.quantity == "latency" else "energy"

    def side_by_side(
        self, networks: Mapping[tuple[str, str], nn.Module], limit: float
    ) -> dict[tuple[str, str], tuple[Reading, int]]:
        """Measure networks in different precisions, in runs next to each other.

        Args:
            networks: Networks by name and precision: "fp32", or "int8" for a `QuantisedNetwork`.
            limit: About how many seconds measuring may take.

        Returns:
            The reading of each network, and the size of its ONNX file in bytes.
        """
        targets = {"fp32": self.target.at("fp32"), "int8": self.target}
        ready = {key: loadable_module(model, self._inputs, targets[key[1]]) for key, model in networks.items()}
        pivot, *others = ready
        bench = self._bench(None)
        found = bench.measure({" ".join(key): ready[key] for key in others}, ready[pivot], limit=limit)
        names = {key: " ".join(key) if key != pivot else DENSE for key in ready}
        return {key: (_reading(found[names[key]]), ready[key].size) for key in ready}

    def _prepare_dense(self, dense: nn.Module) -> ChannelGroups:
        """Export the dense network once, for itself and for its anchor, and return its groups."""
        if _ANCHOR not in self._prepared or self._prepared[_ANCHOR][0] is not dense:
            self._builder = self._builder_of(dense)
            sizes = self._builder.groups.sizes
            self._prepared[DENSE] = (dense, self._builder.loadable(sizes.tolist()))
            self._prepared[_ANCHOR] = (dense, self._builder.loadable(anchor_widths(sizes)))
        return self._builder.groups

    def _builder_of(self, dense: nn.Module) -> ConfigurationBuilder:
        if self._make_builder is not None:
            return self._make_builder()
        return ConfigurationBuilder(dense, find_groups(dense, self._inputs), self._inputs, self.target)

    def _bench(self, groups: ChannelGroups | None) -> Bench:
        key = groups.fingerprint if groups is not None else ""
        if key not in self._benches:
            network = (key, described(self._inputs)) if key else None
            options = {"rules": self.rules, "seed": self._seed, "network": network}
            self._benches[key] = bench_for(self.quantity, self.target, counter=self._counter, **options)
        return self._benches[key]


def _fine(m: Measurement) -> bool:
    """Return whether a longer sitting would not make the interval noticeably narrower."""
    if not m.rules.paired:
        return m.finished
    return m.within.variance <= _SHARE * m.scatter.ratio or m.within.halfwidth() <= _FINE


def _reading(m: Measurement) -> Reading:
    return Reading(
        m.value, m.low, m.high, m.runs, m.rules.statistic, m.doubt, m.estimated,
        cost=m.absolute if m.runs else None, share=m.ratio if m.runs else None, look=m.look,
    )  # fmt: skip
