"""ADMM for keep ratios under one or more budgets (Eqs. 7-9 of the DSA paper).

    minimise L(alpha)  subject to  F_j(alpha) <= B_j,  alpha = sigmoid(theta),  theta = z,  F_j(sigmoid(z)) <= B_j

Every cost is divided by its value at alpha = 1, so the result does not depend on its unit. One step is

    theta = z - (u2 + dL/dtheta) / rho2                       a gradient step of size 1/rho2 on Eq. (8), line 1
    z     = the point of {F_j <= B_j} nearest to theta + u2/rho2                                        line 2
    u2    = u2 + rho2 (theta - z)                                                                       line 3

so that z moves by projected gradient descent (theta + u2/rho2 = z - (dL/dtheta)/rho2). dL/dtheta is taken at theta = z,
which is within the budget in force; the iterate theta may be far from it in short allocations. rho2 is a vector: its
profile over the groups is the metric of the projection, its size follows from how far theta may travel. During the
first ``pace`` steps B_j falls linearly from the cost at the start, so that the loss has an effect before the budget is
reached. Derivations: docs/development/mathematics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from dsa_hw.errors import BudgetError, DsaError, WidthError
from dsa_hw.methods.costs import Cost, CostSet
from dsa_hw.methods.dsa.projection import Box, cost_metric, project_logits, slope_of, use_up
from dsa_hw.utils.arrays import Bools, Floats

__all__ = ["Admm", "AdmmState", "ShadowPrice"]

# Curvature of the penalty over that of the proximal term in the paper's inner problem (Eq. 9).
_STIFFNESS = 10.0


@dataclass(frozen=True)
class ShadowPrice:
    """One budget at the present keep ratios.

    Attributes:
        index: Index of the budget.
        used: Cost over limit.
        binding: Whether the limit is used up.
        price: The loss that one more unit of the cost would save; 0 for a budget that is not binding.
    """

    index: int
    used: float
    binding: bool
    price: float


@dataclass
class AdmmState:
    """Everything that changes: theta, z, u2 and the smoothed dL/dalpha (K,), u1 (J,), and the number of steps done."""

    theta: Floats
    z: Floats
    u1: Floats
    u2: Floats
    gradient: Floats
    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and an int, for ``torch.save``."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in named.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of the same groups and budgets.

        Raises:
            WidthError: The state has other fields or shapes; nothing is changed.
        """
        wanted = {field.name for field in fields(self)}
        if set(state) != wanted:
            raise WidthError(f"An allocation state has the fields {sorted(wanted)}; got {sorted(state)}.")
        tensors = {k: torch.as_tensor(v, dtype=torch.float64) for k, v in state.items() if k != "step"}
        arrays = {k: v.numpy(force=True).copy() for k, v in tensors.items()}
        for name, array in arrays.items():
            here = getattr(self, name).shape
            if array.shape != here:
                raise WidthError(f"`{name}` of the state must have the shape {here}; got {array.shape}.")
        for name, array in arrays.items():
            setattr(self, name, array)
        self.step = int(state["step"])


class Admm:
    """One allocation of K keep ratios under J budgets. Deterministic."""

    def __init__(
        self,
        costs: CostSet[Cost],
        *,
        pace: int,
        settle: int | None = None,
        minimum: ArrayLike = 0.0,
        start: float = 5.0,
        travel: float = 4.0,
        metric: str = "cost",
        subproblem: str = "exact",
        project_gradient: bool = False,
        smoothing: float = 0.9,
    ) -> None:
        """Check the settings and start near the dense network.

        Args:
            costs: J costs with their limits.
            pace: Steps during which the budget falls to its limit.
            settle: Further steps at the limit; half of ``pace`` if not given.
            minimum: Smallest keep ratio, a number or (K,).
            start: Logit of all keep ratios at the start.
            travel: How far the loss may move a typical theta in all steps together.
            metric: "cost" weighs dL against dF of each group; without a loss all groups shrink alike. "logit" is the
                paper's Euclidean distance of theta.
            subproblem: How z is found: "exact" projection, which meets the budget exactly and has no constants, or
                the paper's "gradient" steps (Eq. 9), which end near it or somewhat below.
            project_gradient: Set negative entries of the gradient of theta to 0, so that theta never grows. The paper
                does so "to reach the budget faster".
            smoothing: Weight of the past in the averaged gradient.

        Raises:
            BudgetError: A setting is out of range.
            InfeasibleBudgetError: The smallest keep ratios exceed a limit.
        """
        if metric not in ("cost", "logit") or subproblem not in ("exact", "gradient"):
            raise BudgetError(
                f"`metric` must be 'cost' or 'logit' and `subproblem` 'exact' or 'gradient'; got {metric!r} and "
                f"{subproblem!r}."
            )
        groups = costs.sizes.size
        if groups < 1 or pace < 1 or (settle is not None and settle < 0) or not 0.0 <= smoothing < 1.0 or travel <= 0:
            raise BudgetError(
                "An allocation needs groups >= 1, pace >= 1, settle >= 0, 0 <= smoothing < 1 and travel > 0; got "
                f"{groups}, {pace}, {settle}, {smoothing} and {travel}."
            )
        least = np.broadcast_to(np.asarray(minimum, np.float64), (groups,))
        if not ((least >= 0.0) & (least <= 1.0)).all():
            raise BudgetError(f"Minimum keep ratios must lie in [0, 1]; got {least.min()} to {least.max()}.")
        self.costs, self.pace, self.settle = costs, pace, pace // 2 if settle is None else settle
        self.subproblem, self.project_gradient = subproblem, project_gradient
        self.smoothing, self.rate = smoothing, travel / (self.pace + self.settle)
        self._box = Box(least)
        self._metric = cost_metric(costs, self._box) if metric == "cost" else np.ones_like
        costs.check_feasible(self._box.least)
        self._dense = bool(costs.keeps(np.ones(groups)))
        theta = self._box.clip(np.full(groups, float(start)))
        self._first = np.maximum(costs.shares(self._box.alpha(theta)), costs.share_limits)
        zeros, duals = np.zeros(groups), np.zeros(len(costs))
        self.state = AdmmState(theta, theta.copy(), duals, zeros, zeros.copy())

    @property
    def alpha(self) -> Floats:
        """Keep ratios (K,) for the masks of the next step: sigmoid(z)."""
        return np.ones_like(self.state.z) if self._dense else self._box.alpha(self.state.z)

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or none is needed because the dense network meets the budgets."""
        return self._dense or self.state.step >= self.pace + self.settle

    @property
    def limits(self) -> Floats:
        """The limits (J,) in force at the present step, in the units of the costs."""
        return self._share_limits() * self.costs.dense

    @property
    def keep_ratios(self) -> Floats:
        """Keep ratios (K,) that are within every budget and use one of them up; meant for the end, valid any time."""
        if self._dense:
            return np.ones_like(self.state.z)
        return use_up(self.costs, self.state.z, self._box, self._metric)

    def step(self, gradient: ArrayLike) -> None:
        """Make one step with the gradient dL/dalpha (K,) of the task loss at ``alpha``.

        Raises:
            BudgetError: All steps are done.
            DsaError: The gradient does not have K finite entries; nothing is changed.
        """
        if self.finished:
            raise BudgetError(f"The allocation is finished after {self.state.step} steps. Read `keep_ratios`.")
        state = self.state
        found = np.array(gradient, dtype=np.float64)
        if found.shape != state.theta.shape or not np.isfinite(found).all():
            raise DsaError(
                f"The gradient of the loss must have {state.theta.size} finite numbers; got shape {found.shape} with "
                f"{int((~np.isfinite(found)).sum())} not finite. Check the loss. The allocation is unchanged."
            )
        state.step += 1
        state.gradient = self.smoothing * state.gradient + (1.0 - self.smoothing) * found
        slope = slope_of(self.alpha)
        task = state.gradient / (1.0 - self.smoothing**state.step) * slope  # dL/dtheta, bias of the mean removed
        shape = self._metric(state.z)
        # The size of rho2: a typical group moves by ``rate`` (less and less while settling); none by over 5 times that.
        rate = self.rate * min(1.0, 1.0 - 0.9 * (state.step - self.pace) / max(self.settle, 1))
        typical = np.abs(task).sum() / shape.sum()
        rho2 = shape * (typical / rate if typical > 0.0 else 1.0)
        task = np.clip(task, -5.0 * rate * rho2, 5.0 * rate * rho2)
        total = task + state.u2 + rho2 * (state.theta - state.z)
        if self.project_gradient:
            total = np.maximum(total, 0.0)
        state.theta = self._box.clip(state.theta - total / rho2)
        limits = self._share_limits()
        if self.subproblem == "exact":
            # With project_gradient theta lags behind z, and u2 holds the difference.
            state.z, mu = project_logits(self.costs, state.theta + state.u2 / rho2, limits, self._box, self._metric)
            state.u1 = mu * float(np.mean(rho2 / shape))
        else:
            state.z, state.u1 = self._gradient_steps(rho2, limits)
        state.u2 = state.u2 + rho2 * (state.theta - state.z)

    def prices(self) -> tuple[ShadowPrice, ...]:
        """Return the use and the shadow price of every budget at z.

        At an optimum dL/dalpha + sum_j lambda_j dF_j/dalpha = 0 with lambda_j >= 0 for the binding budgets. The
        lambda are the least-squares solution of that over the groups that are free to move.
        """
        used, binding, price, _ = self._stationarity()
        rows = zip(used, binding, price / self.costs.dense, strict=True)
        return tuple(ShadowPrice(j, float(u), bool(b), float(p)) for j, (u, b, p) in enumerate(rows))

    @property
    def residual(self) -> float:
        """Share of dL/dz that the prices of the binding budgets do not balance, in the metric of the projection.

        It is 0 at a KKT point and 1 where no budget balances any of the loss. After the last step, a value above about
        0.3 says that more steps would help; a small one, that the objective is the limit.
        """
        return self._stationarity()[3]

    def _stationarity(self) -> tuple[Floats, Bools, Floats, float]:
        """Return use, whether it binds and price of each budget, and the residual of the KKT conditions."""
        costs, alpha = self.costs, self.alpha
        used = costs.shares(alpha) / costs.share_limits
        binding = used >= 1.0 - 1e-3
        price, residual = np.zeros(used.size), 0.0
        free = (self.state.z > self._box.low) & (self.state.z < self._box.high)
        if not self._dense and free.any() and self.state.step:
            task = self.state.gradient / (1.0 - self.smoothing**self.state.step)
            scale = slope_of(alpha) / np.sqrt(self._metric(self.state.z))
            wanted = -(task * scale)[free]
            size = left = float(np.linalg.norm(wanted))
            if binding.any():
                matrix = (costs.share_gradients(alpha)[binding] * scale)[:, free]
                price[binding], left = nnls(matrix.T, wanted)
            residual = float(left) / size if size > 0.0 else 0.0
        return used, binding, price, residual

    def state_dict(self) -> dict[str, Any]:
        """Return the state; see `AdmmState.state_dict`."""
        return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state; see `AdmmState.load_state_dict`."""
        self.state.load_state_dict(state)

    def _share_limits(self) -> Floats:
        """Limits (J,) in force at the present step, over the dense costs."""
        left = max(0.0, 1.0 - self.state.step / self.pace)
        return self.costs.share_limits + (self._first - self.costs.share_limits) * left

    def _gradient_steps(self, rho2: Floats, limits: Floats, steps: int = 50) -> tuple[Floats, Floats]:
        """Solve Eq. (9) for z and u1 by descent on z and ascent on u1, in 50 steps as in the paper.

        The step of z is one over the sum of the curvatures of Eq. (9), see `_inner_gradient`.

        The ascent u1 = u1 + rho1 [F(z) - B]_+ uses F(z), because [F(z) - B]_+ is the derivative of Eq. (9) by u1. The
        paper writes F(theta). But theta does not change in these steps, so u1 would grow by the same amount in each
        of them, whether or not z already keeps the budget.
        """
        z, u1 = self.state.z, self.state.u1
        for _ in range(steps):
            total, over, rho1 = self._inner_gradient(z, u1, rho2, limits)
            z = self._box.clip(z - total / (rho2 * (1.0 + _STIFFNESS * over.size)))
            u1 = u1 + rho1 * over
        return z, u1

    def _inner_gradient(self, z: Floats, u1: Floats, rho2: Floats, limits: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the gradient (K,) of Eq. (9) by z, with [F(z) - B]_+ (J,) and rho1 (J,).

            u1 [F(z) - B]_+ + rho1/2 [F(z) - B]_+^2 + u2 (theta - z) + rho2/2 |theta - z|^2

        (The paper prints no "+" between the first two terms and no subscript at the square; its text derives both
        terms from the constraint [F(z) - B]_+ = 0.) Where a budget is kept both of its terms are 0, so u1 has no
        effect there.

        The paper's rho1 = 0.01 and its step 1e-3 belong to raw FLOPs. Here rho1 is ``_STIFFNESS`` times the value at
        which the penalty is as curved as the proximal term.
        """
        alpha = self._box.alpha(z)
        over = np.maximum(self.costs.shares(alpha) - limits, 0.0)
        grads = self.costs.share_gradients(alpha) * slope_of(alpha)
        rho1 = _STIFFNESS / np.maximum((grads**2 / rho2).sum(1), np.finfo(float).tiny)
        push = np.where(over > 0.0, u1 + rho1 * over, 0.0)
        return push @ grads - self.state.u2 - rho2 * (self.state.theta - z), over, rho1
