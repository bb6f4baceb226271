"""Budgets -> costs, limits and gauges: what an allocation needs before it begins.

The order is the cheapest first: what can be counted is checked before anything is measured, and what is measured is
checked before anything is trained. A budget that cannot be kept is refused here, with the smallest one that can.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import nn

from dsa_hw.errors import BudgetError, ProfileError
from dsa_hw.methods.costs import Cost, CostSet, infeasible_budget, measured_cost
from dsa_hw.methods.rounding import narrowest
from dsa_hw.pipeline.meters import Gauge, gauge_for, rules_for
from dsa_hw.profiles import Profile

if TYPE_CHECKING:
    from budgets import Budget, CostModel
    from dsa_hw.channels import ChannelGroups
    from profilers import MeasuringRules
    from profilers.targets import Target

__all__ = ["Line", "Source", "Work", "common_grid", "learn", "prepare"]

_log = logging.getLogger(__name__)

Source = "str | Path | pd.DataFrame | CostModel | None"
"""Where a cost model comes from: a store, a table, a fitted model or its file; None measures."""


@dataclass(frozen=True, eq=False)
class Line:
    """One budget made concrete: F, its limit, the grid that F was learnt on and how F is read on a real network.

    ``dense`` is the dense network's cost as far as it is known beforehand, ``limit`` follows from it.
    """

    budget: Budget
    cost: Cost
    dense: float
    limit: float
    gauge: Gauge
    grid: NDArray[np.int64] | None = None
    model: CostModel | None = None


@dataclass(frozen=True, eq=False)
class Work:
    """What profiling needs besides the budgets; ``store`` is continued where it exists.

    ``force`` takes a fitted model of another network, target or runtime version all the same.
    """

    model: nn.Module
    groups: ChannelGroups
    inputs: tuple[Any, ...]
    store: Path | None = None
    rules: MeasuringRules | None = None
    samples: int = 40
    holdout: int = 10
    grid: str | int = "auto"
    time_limit: float = 600.0
    seed: int = 0
    minimum: float = 0.05
    name: str | None = None
    force: bool = False
    listener: Callable[[Any], None] | None = None


def prepare(budgets: Sequence[Budget], work: Work, target: str | Target | None, profile: Any = None) -> list[Line]:
    """Every budget as a `Line`, feasible as far as is known; ``profile`` is a `Source` or one for each target name."""
    lines: dict[int, Line] = {}
    waiting: list[tuple[int, Any, Target, Gauge]] = []
    for i, budget in enumerate(budgets):
        counted: Any = getattr(budget, "cost", None)
        if counted is not None:
            cost = counted(work.groups)
            lines[i] = Line(budget, cost, cost.dense, budget.limit(cost.dense), gauge_for(budget, None, work.inputs))
        else:
            found = _target(budget, target)
            waiting.append((i, budget, found, gauge_for(budget, found, work.inputs, work.rules, work.seed)))
    _check(list(lines.values()), work)
    models: dict[tuple[str, str, str], CostModel] = {}
    for i, budget, found, gauge in waiting:
        rules = rules_for(budget, work.rules)
        source = budget.profile if budget.profile is not None else _named(profile, found)
        key = (found.title, budget.key, rules.statistic)
        if key not in models or source is not None:
            models[key] = learn(source, work, found, rules, budget.key, getattr(budget, "counter", None))
        model = models[key]
        dense = model.provenance.dense or model.dense
        names = work.groups.names
        grid = np.array([int(model.provenance.grid.get(name, 1)) for name in names], np.int64)
        cost = measured_cost(model, budget)
        lines[i] = Line(budget, cost, dense, budget.limit(dense), gauge, grid, model)
    ordered = [lines[i] for i in range(len(budgets))]
    _check(ordered, work)
    return ordered


def learn(
    source: Any, work: Work, target: Target, rules: MeasuringRules, quantity: str = "latency", counter: Any = None
) -> CostModel:
    """The cost model of the network on ``target``, from ``source`` or by profiling (energy with ``counter``)."""
    import budgets
    from budgets import CostModel

    groups = work.groups
    if isinstance(source, CostModel):
        if source.names != groups.names or source.sizes.tolist() != groups.sizes.tolist():
            raise ProfileError(
                f"the given cost model has {len(source.names)} channel groups of another network than this one with "
                f"{len(groups)}; fit one to a profile of this network"
            )
        _same_target(source.provenance.target, target)
        return source
    table: Profile | pd.DataFrame
    if isinstance(source, (Profile, pd.DataFrame)):
        table = source
    elif source is not None and Path(source).suffix == ".json":
        return budgets.load_cost_model(
            source, groups, target=target.title, environment=target.describe(), force=work.force
        )
    elif source is not None:
        table = _stored(Path(source), groups, target, rules, quantity)
    else:
        table = _profile(work, target, rules, quantity, counter)
    if isinstance(table, Profile):
        _same_target(table.target, target)
        return budgets.fit(table, groups)
    _same_target(str(table.attrs.get("target", target.title)), target)
    return budgets.fit(table, groups, target=None if "target" in table.attrs else target.title)


def _profile(work: Work, target: Target, rules: MeasuringRules, quantity: str, counter: Any) -> pd.DataFrame:
    import profilers
    from budgets.profile_rows import MINIMUM

    # The dense network and a repetition are not among the ones to train on.
    if work.samples < MINIMUM + 2:
        raise ProfileError(
            f"{work.samples} samples asked for; a cost model needs at least {MINIMUM + 2}, and 40 for a good one"
        )
    return profilers.profile(
        work.model,
        work.inputs,
        target,
        samples=work.samples,
        holdout=work.holdout,
        grid=work.grid,
        out=work.store,
        time_limit=work.time_limit,
        rules=rules,
        seed=work.seed,
        name=work.name,
        groups=work.groups,
        listener=work.listener,
        quantity=quantity,
        counter=counter,
    )


def _stored(path: Path, groups: ChannelGroups, target: Target, rules: MeasuringRules, quantity: str) -> pd.DataFrame:
    import profilers

    profiles = profilers.load_tables(path, rules=rules).profiles
    fitting = [t for t in profiles.values() if t.attrs["fingerprint"] == groups.fingerprint]
    here = [t for t in fitting if (t.attrs["target"], t.attrs["quantity"]) == (target.title, quantity)]
    if not here:
        held = sorted({f"{name} on {where}" for name, where, _ in profiles})
        raise ProfileError(
            f"{path} has no {quantity} profile of this network on {target.title}; it has {'; '.join(held)}. "
            "Profile it, or leave profile out"
        )
    if len(here) > 1:
        # The same target in several environments: other versions, or unlike boards of a fleet.
        from profilers.measuring.environment import environment

        now = dict(environment(target))
        same = [t for t in here if dict(t.attrs["environment"]) == now]
        if len(same) != 1:
            raise ProfileError(
                f"{path} has {len(here)} profiles of this network on {target.title}, in different environments; give "
                f"one of profilers.load_tables({str(path)!r}).profiles as profile="
            )
        here = same
    return here[0]


def _same_target(found: str, target: Target) -> None:
    if found not in (target.title, target.name):
        raise ProfileError(
            f"the profile is of {found}, and the budget is on {target.title}; profile that target, or name the other"
        )


def _target(budget: Any, given: str | Target | None) -> Target:
    from profilers.targets import resolve

    wanted: str | Target | None = budget.target or given
    if wanted is None:
        raise BudgetError(f"{budget}: name a target, such as target='onnxruntime/cpu'")
    return resolve(wanted)


def _named(profile: Any, target: Target) -> Any:
    """``profile`` itself, or its part for this target where it is a mapping from target names."""
    if isinstance(profile, Mapping):
        return profile.get(target.title, profile.get(target.name))
    return profile


def _check(lines: Sequence[Line], work: Work) -> None:
    """Costs do not fall with the keep ratios, so the narrowest network decides."""
    sizes = work.groups.sizes
    narrow = narrowest(sizes, common_grid(lines, len(sizes)), work.minimum)
    for line in lines:
        smallest = float(CostSet([line.cost], sizes).at_widths(narrow)[0])
        if smallest > line.limit:
            raise infeasible_budget(line.budget, line.limit, smallest, line.dense)


def common_grid(lines: Sequence[Line], groups: int) -> NDArray[np.int64]:
    """Widths that every target likes: the least common multiple of the steps, shape (K,)."""
    grid = np.ones(groups, np.int64)
    for line in lines:
        if line.grid is not None:
            grid = np.lcm(grid, line.grid)
    return grid
