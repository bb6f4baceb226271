"""Budgets made concrete: a cost, its limit, and how the cost is read on a real network.

The cheapest checks come first: counted budgets are checked before anything is measured, and measured budgets before
anything is trained. An infeasible budget is refused here, with the smallest one that can be met.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from budgets import Budget, CostModel
from budgets.budget import CountedBudget, MeasuredBudget
from dsa_hw.errors import BudgetError
from dsa_hw.methods.costs import Cost, CostSet, measured_cost
from dsa_hw.methods.rounding import narrowest
from dsa_hw.pipeline.cost_models import Task, fit_cost_model
from dsa_hw.pipeline.meters import DeviceMeter, Meter, meter_for, rules_for
from dsa_hw.utils.arrays import Ints
from profilers.profiling.schemes import resolve_for

if TYPE_CHECKING:
    from profilers.targets import Target

__all__ = ["Constraint", "common_grid", "cost_set", "resolve_budgets"]


@dataclass(frozen=True, eq=False)
class Constraint:
    """One budget made concrete.

    Attributes:
        budget: The budget.
        cost: F(alpha).
        dense: The cost of the dense network as far as it is known beforehand.
        limit: The limit that follows from ``dense``.
        meter: How the cost is read on a real network.
        grid: Step of the widths (K,) that the target runs efficiently; None where every width is as good.
        model: The fitted cost model; None where the cost is counted.
    """

    budget: Budget
    cost: Cost
    dense: float
    limit: float
    meter: Meter
    grid: Ints | None = None
    model: CostModel | None = None


def resolve_budgets(budgets: Sequence[Budget], task: Task, target: str | Target | None) -> list[Constraint]:
    """Make budgets concrete: count, load or fit their costs, and check that each can be met.

    Args:
        budgets: Counted and measured budgets.
        task: The network and the options of profiling.
        target: Where measured budgets hold that name no target themselves.

    Returns:
        A constraint for each budget, in order. Budgets on the same target and quantity share a cost model and a meter.

    Raises:
        InfeasibleBudgetError: A budget cannot be met.
        BudgetError: A measured budget has no target.
    """
    found: dict[int, Constraint] = {}
    waiting: list[tuple[int, MeasuredBudget, Target, DeviceMeter]] = []
    meters: dict[tuple[str, str, str], DeviceMeter] = {}
    for i, budget in enumerate(budgets):
        if isinstance(budget, CountedBudget):
            cost = budget.cost(task.groups)
            meter = meter_for(budget, None, task.inputs)
            found[i] = Constraint(budget, cost, cost.dense, budget.limit(cost.dense), meter)
        elif isinstance(budget, MeasuredBudget):
            place = _target(budget, target, task)
            rules = rules_for(budget, task.profiling.rules)
            key = (place.title, budget.key, rules.statistic)
            if key not in meters:
                builder = functools.partial(task.builder, place)
                meters[key] = DeviceMeter.of(budget, place, task.inputs, rules, task.seed, builder)
            waiting.append((i, budget, place, meters[key]))
    _check(found, task)
    models: dict[tuple[str, str, str], CostModel] = {}
    for i, budget, place, meter in waiting:
        rules = rules_for(budget, task.profiling.rules)
        source = task.profiling.source if budget.profile is None else budget.profile
        key = (place.title, budget.key, rules.statistic)
        if key not in models or source is not None:
            models[key] = fit_cost_model(
                task, place, rules, source=source, quantity=budget.key, counter=getattr(budget, "counter", None)
            )
        model = models[key]
        dense = model.provenance.dense or model.dense
        grid = np.array([int(model.provenance.grid.get(name, 1)) for name in task.groups.names], np.int64)
        found[i] = Constraint(budget, measured_cost(model, budget), dense, budget.limit(dense), meter, grid, model)
    _check(found, task)
    return [found[i] for i in range(len(budgets))]


def common_grid(constraints: Sequence[Constraint], groups: int) -> Ints:
    """Return the steps (K,) that suit every target: the least common multiples."""
    grid = np.ones(groups, np.int64)
    for constraint in constraints:
        if constraint.grid is not None:
            grid = np.lcm(grid, constraint.grid)
    return grid


def cost_set(constraints: Sequence[Constraint], sizes: Ints) -> CostSet[Cost]:
    """Return the costs of the constraints with their limits."""
    return CostSet(
        [c.cost for c in constraints], sizes, [c.limit for c in constraints], [c.budget for c in constraints]
    )


def _target(budget: MeasuredBudget, given: str | Target | None, task: Task) -> Target:
    wanted = budget.target or given
    if wanted is None:
        raise BudgetError(f"{budget}: the budget needs a target, for example target='onnxruntime/cpu'.")
    return resolve_for(task.model, task.inputs, wanted)


def _check(found: dict[int, Constraint], task: Task) -> None:
    """Check that the narrowest network is within every limit; costs do not fall with the keep ratios."""
    constraints, sizes = list(found.values()), task.groups.sizes
    if constraints:
        narrow = narrowest(sizes, common_grid(constraints, len(sizes)), task.minimum)
        cost_set(constraints, sizes).check_feasible(narrow / sizes)
