"""Costs of a network as functions of its keep ratios, and the limits on them.

A configuration of a network with K channel groups is a vector of keep ratios (K,) or, times the sizes of the groups,
of widths (K,). A `CostSet` evaluates J costs for any number of configurations at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from budgets.budget import Budget, CountedBudget, MeasuredBudget
from budgets.cost_model import CostModel
from budgets.notation import BudgetLike, as_budgets
from dsa_hw.errors import BudgetError, InfeasibleBudgetError, ProfileError
from dsa_hw.utils.arrays import Bools, Floats, Ints
from dsa_hw.utils.text import percent

if TYPE_CHECKING:
    from dsa_hw.channels import ChannelGroups

__all__ = ["Cost", "CostSet", "Valued", "check_network", "infeasible_budget", "last_feasible", "measured_cost"]


class Valued(Protocol):
    """A function of the keep ratios."""

    def value(self, alpha: Tensor) -> Tensor:
        """Return the values (...) at keep ratios (..., K)."""


class Cost(Valued, Protocol):
    """A non-decreasing function of the keep ratios, with its gradient."""

    def gradient(self, alpha: Floats) -> Floats:
        """Return the gradients (..., K) at keep ratios (..., K)."""


AnyCost = TypeVar("AnyCost", bound=Valued, covariant=True)
T = TypeVar("T")


class CostSet(Generic[AnyCost]):
    """J costs of a network with K channel groups, each with a limit in its own unit.

    Attributes:
        costs: The J costs.
        sizes: Widths (K,) of the channel groups of the dense network.
        limits: Limits (J,); infinite where none was given.
        dense: Costs (J,) of the dense network.
        budgets: The budgets that the limits come from; they name the costs in messages. May be empty.
    """

    def __init__(
        self,
        costs: Sequence[AnyCost],
        sizes: ArrayLike,
        limits: ArrayLike | None = None,
        budgets: Sequence[Budget] = (),
    ) -> None:
        """Store the costs and evaluate the dense network.

        Args:
            costs: J costs.
            sizes: Widths (K,) of the channel groups of the dense network.
            limits: One finite limit per cost, in the unit of the cost. None sets no limit.
            budgets: The budgets (J,), for messages only.

        Raises:
            BudgetError: There is no cost, the number of limits differs, a limit is not finite, or a cost of the dense
                network is not positive and finite.
        """
        given = np.full(len(costs), np.inf) if limits is None else np.asarray(limits, np.float64)
        if not costs or given.shape != (len(costs),):
            raise BudgetError(f"Each budget needs a cost and a limit; got {len(costs)} costs and {given.size} limits.")
        if limits is not None and not np.isfinite(given).all():
            raise BudgetError(f"Each limit must be a finite number; got {given.tolist()}.")
        self.costs = tuple(costs)
        self.sizes: Ints = np.asarray(sizes, np.int64)
        self.limits: Floats = given
        self.budgets = tuple(budgets)
        self.dense: Floats = self.at_ratios(np.ones(self.sizes.shape))
        if not (np.isfinite(self.dense) & (self.dense > 0.0)).all():
            raise BudgetError(f"Costs of the dense network must be positive and finite; got {self.dense.tolist()}.")

    @classmethod
    def of(cls, budgets: BudgetLike | Sequence[BudgetLike], groups: ChannelGroups) -> CostSet[Cost]:
        """Resolve budgets to costs and limits.

        A counted budget computes its cost from the channel groups. A measured one needs a fitted cost model as its
        ``profile``.

        >>> import dsa_hw, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
        >>> groups = dsa_hw.find_groups(model, torch.zeros(1, 3, 8, 8))
        >>> costs = CostSet.of(dsa_hw.ParamsBudget("50%"), groups)
        >>> costs.at_widths(groups.sizes).tolist(), costs.limits.tolist()
        ([516.0], [258.0])

        Raises:
            BudgetError: A measured budget has no cost model.
            ProfileError: A cost model is of another network.
        """
        wanted = as_budgets(budgets)
        costs: list[Cost] = []
        limits = []
        for budget in wanted:
            if isinstance(budget, CountedBudget):
                counted = budget.cost(groups)
                costs.append(counted)
                limits.append(budget.limit(counted.dense))
            else:
                model = _cost_model(budget, groups)
                costs.append(measured_cost(model, budget))
                limits.append(budget.limit(model.provenance.dense or model.dense))
        return CostSet(costs, groups.sizes, limits, wanted)

    def __len__(self) -> int:
        return len(self.costs)

    def with_limits(self, limits: ArrayLike) -> CostSet[AnyCost]:
        """Return the same costs with other limits (J,)."""
        return CostSet(self.costs, self.sizes, limits, self.budgets)

    def at_ratios(self, alpha: Floats) -> Floats:
        """Return the costs (..., J) at keep ratios (..., K)."""
        point = torch.from_numpy(np.ascontiguousarray(alpha, np.float64))
        with torch.no_grad():
            return np.stack([np.asarray(cost.value(point), np.float64) for cost in self.costs], -1)

    def at_widths(self, widths: Ints) -> Floats:
        """Return the costs (..., J) at widths (..., K)."""
        return self.at_ratios(widths / self.sizes)

    def gradients(self: CostSet[Cost], alpha: Floats) -> Floats:
        """Return the gradients (J, K) at keep ratios (K,).

        Costs do not fall with the keep ratios, so negative entries, which a fitted cost may have, are set to 0.
        """
        return np.maximum(np.stack([np.asarray(cost.gradient(alpha), np.float64) for cost in self.costs]), 0.0)

    @property
    def share_limits(self) -> Floats:
        """Limits (J,) over the costs of the dense network."""
        return self.limits / self.dense

    def shares(self, alpha: Floats) -> Floats:
        """Return the costs (..., J) at keep ratios (..., K) over those of the dense network, without a unit."""
        return self.at_ratios(alpha) / self.dense

    def share_gradients(self: CostSet[Cost], alpha: Floats) -> Floats:
        """Return the gradients (J, K) of `shares` at keep ratios (K,)."""
        return self.gradients(alpha) / self.dense[:, None]

    def keeps(self, alpha: Floats) -> Bools:
        """Return whether keep ratios (..., K) are within every limit, shape (...)."""
        return np.asarray((self.at_ratios(alpha) <= self.limits).all(-1))

    def check_feasible(self, least: Floats) -> None:
        """Check that the smallest keep ratios (K,) are within every limit.

        Costs do not fall with the keep ratios, so this decides for all keep ratios.

        Raises:
            InfeasibleBudgetError: They exceed a limit; names the budget that is exceeded most.
        """
        smallest = self.at_ratios(least)
        if (smallest > self.limits).any():
            raise self.infeasible(smallest)

    def infeasible(self, smallest: Floats) -> InfeasibleBudgetError:
        """Build the error for the budget that the smallest reachable costs (J,) exceed most."""
        unit = np.maximum(np.abs(self.limits), np.finfo(float).tiny)
        j = int(np.argmax((smallest - self.limits) / unit))
        limit, value, dense = float(self.limits[j]), float(smallest[j]), float(self.dense[j])
        return infeasible_budget(self.budgets[j] if self.budgets else j, limit, value, dense)


def measured_cost(model: CostModel, budget: Budget) -> Cost:
    """Return what a budget limits: the prediction of its cost model, or an upper bound at its confidence."""
    confidence = budget.confidence if isinstance(budget, MeasuredBudget) else None
    return model if confidence is None else _UpperBound(model, confidence)


@dataclass(frozen=True, eq=False)
class _UpperBound:
    """The upper bound of a cost model at a confidence, as a cost."""

    model: CostModel
    confidence: float

    def value(self, alpha: Tensor) -> Tensor:
        return self.model.value(alpha, self.confidence)

    def gradient(self, alpha: Floats) -> Floats:
        return self.model.gradient(alpha, self.confidence)


def check_network(model: CostModel, groups: ChannelGroups) -> None:
    """Check that a cost model is of the network with these channel groups.

    Raises:
        ProfileError: It has other groups.
    """
    if model.names != groups.names or model.sizes.tolist() != groups.sizes.tolist():
        raise ProfileError(
            f"The cost model is of another network: it has {len(model.names)} channel groups, this one has "
            f"{len(groups)}, or their names or sizes differ. Fit one to a profile of this network."
        )


def _cost_model(budget: Budget, groups: ChannelGroups) -> CostModel:
    model = getattr(budget, "profile", None)
    if not isinstance(model, CostModel):
        name = type(budget).__name__
        raise BudgetError(
            f"'{budget}' needs a fitted cost model, such as {name}(..., profile=dsa_hw.load_cost_model('model.json')); "
            f"got profile={model!r}."
        )
    check_network(model, groups)
    return model


def infeasible_budget(budget: Budget | int, limit: float, smallest: float, dense: float) -> InfeasibleBudgetError:
    """Build the error for a budget that no allowed configuration meets.

    Args:
        budget: The budget, or its index where only a cost and a limit were given.
        limit: The limit, in the unit of the cost.
        smallest: The cost of the narrowest network that is allowed.
        dense: The cost of the dense network.

    Returns:
        The error, to be raised by the caller; its ``smallest`` is ``smallest``.
    """
    name, form = (str(budget), "{:.6g}".format) if isinstance(budget, int) else (f"'{budget}'", budget.format)
    return InfeasibleBudgetError(
        f"Budget {name} cannot be met: the limit is {form(limit)}, but the narrowest network allowed costs "
        f"{form(smallest)} ({percent(smallest / dense)} of the dense network). Ask for more than that, or allow "
        "narrower networks (a smaller minimum keep ratio, a finer grid).",
        smallest=smallest,
    )


def last_feasible(path: Callable[[float], T], keeps: Callable[[T], object], high: float = 1.0) -> T:
    """Return the last feasible point of a path, to 60 halvings of its length.

    Args:
        path: Maps a position in [0, ``high``] to a point. ``path(0)`` must be feasible.
        keeps: Tells whether a point is feasible. Points before a feasible one must be feasible.
        high: The end of the path.

    Returns:
        ``path(high)`` if it is feasible, else the feasible point of the largest position that bisection finds.
    """
    if keeps(end := path(high)):
        return end
    low = 0.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if keeps(path(middle)) else (low, middle)
    return path(low)
