"""ADMM for keep ratios under one or more budgets (Eqs. 7-9 of the DSA paper).

    minimise L(alpha)  subject to  F_j(alpha) <= B_j,  alpha = sigmoid(theta),  theta = z,  F_j(sigmoid(z)) <= B_j

Every cost is divided by its value at alpha = 1, so nothing depends on its unit. One step is

    theta = z - (u2 + dL/dtheta) / rho2                       a gradient step of size 1/rho2 on Eq. (8), line 1
    z     = the point of {F_j <= B_j} nearest to theta + u2/rho2                                        line 2
    u2    = u2 + rho2 (theta - z)                                                                       line 3

so that z moves by projected gradient descent (theta + u2/rho2 = z - (dL/dtheta)/rho2). rho2 is a vector: its profile
over the groups is the *metric* that says what "nearest" means, its size follows from how far theta may travel.
During the first ``pace`` steps B_j falls linearly from the cost at the start, so that the loss can speak before the
budget is reached. Derivations, and why the projection is done in steps of at most 1: docs/development/mathematics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls
from scipy.special import expit, logit

from dsa_hw.errors import BudgetError, DsaError, WidthError
from dsa_hw.methods.costs import Cost, CostSet, last_feasible

__all__ = ["Admm", "AdmmState", "ShadowPrice"]

_Array = NDArray[np.float64]
# Keep ratios live in [1e-6, 1 - 1e-6]: no group of this world has a million channels.
_EDGE = 1e-6
# A group that turned round so often in a projection stands at an edge of its cost.
_TURNS = 4
# Curvature of the penalty over that of the proximal term in the paper's inner problem (Eq. 9).
_STIFFNESS = 10.0


@dataclass(frozen=True)
class ShadowPrice:
    """One budget at the present keep ratios.

    ``used`` is cost / limit. ``price`` is the loss that one more unit of the cost would save, 0 where the budget
    does not bind.
    """

    index: int
    used: float
    binding: bool
    price: float


@dataclass
class AdmmState:
    """All that changes: theta, z, u2 and the smoothed dL/dalpha (K,), u1 (J,), and the number of steps done."""

    theta: _Array
    z: _Array
    u1: _Array
    u2: _Array
    gradient: _Array
    step: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Tensors and an int, for ``torch.save``."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in named.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of the same groups and budgets; refuses another shape and changes nothing then."""
        wanted = {field.name for field in fields(self)}
        if set(state) != wanted:
            raise WidthError(f"An allocation state has {sorted(wanted)}; found {sorted(state)}.")
        arrays = {k: np.array(v, dtype=np.float64) for k, v in state.items() if k != "step"}
        for name, array in arrays.items():
            here = getattr(self, name).shape
            if array.shape != here:
                raise WidthError(f"The state's {name} has shape {array.shape}; these groups and budgets need {here}.")
        for name, array in arrays.items():
            setattr(self, name, array)
        self.step = int(state["step"])


class Admm:
    """One allocation of K keep ratios under J budgets. Deterministic.

    costs, limits    J costs and their limits in the same unit
    groups           K
    pace             steps during which the budget falls to its limit
    settle           further steps at the limit (default: half of ``pace``)
    minimum          smallest keep ratio, a number or one per group
    travel           how far the loss may move a typical theta in all steps together
    metric           "cost": dL is weighed against dF of each group, and without a loss all groups shrink alike;
                     "logit": the paper's Euclidean distance of theta
    subproblem       how z is found: "exact" projection, which meets the budget exactly and has no constants, or the
                     paper's "gradient" steps (Eq. 9), which end near it
    project_gradient set negative entries of the gradient of theta to 0, so that theta never grows; the paper does so
                     "to reach the budget faster"
    smoothing        weight of the past in the averaged gradient
    """

    def __init__(
        self,
        costs: Sequence[Cost],
        limits: Sequence[float],
        groups: int,
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
        if metric not in ("cost", "logit") or subproblem not in ("exact", "gradient"):
            raise BudgetError(
                f"metric must be 'cost' or 'logit' and subproblem 'exact' or 'gradient'; "
                f"found {metric!r} and {subproblem!r}."
            )
        if groups < 1 or pace < 1 or (settle is not None and settle < 0) or not 0.0 <= smoothing < 1.0 or travel <= 0:
            raise BudgetError(
                "An allocation needs groups >= 1, pace >= 1, settle >= 0, 0 <= smoothing < 1 and travel > 0; found "
                f"{groups}, {pace}, {settle}, {smoothing} and {travel}."
            )
        self.pace, self.settle = pace, pace // 2 if settle is None else settle
        self.metric, self.subproblem, self.project_gradient = metric, subproblem, project_gradient
        self.smoothing, self.rate = smoothing, travel / (self.pace + self.settle)
        self._costs = _NormalisedCosts(costs, limits, groups)
        least = np.broadcast_to(np.asarray(minimum, np.float64), (groups,))
        if not ((least >= 0.0) & (least <= 1.0)).all():
            raise BudgetError(f"minimum keep ratios must lie in [0, 1]; found {least.min()} to {least.max()}.")
        self._box = _Box(np.clip(least, _EDGE, 1.0))
        self._costs.raw.check_feasible(self._box.least)
        self._dense = self._costs.keeps(np.ones(groups))
        theta = self._box.clip(np.full(groups, float(start)))
        self._first = np.maximum(self._costs.values(self._box.alpha(theta)), self._costs.limits)
        zeros, duals = np.zeros(groups), np.zeros(len(limits))
        self.state = AdmmState(theta, theta.copy(), duals, zeros, zeros.copy())

    @property
    def alpha(self) -> _Array:
        """Keep ratios (K,) for the masks of the next step: sigmoid(theta)."""
        return np.ones_like(self.state.theta) if self._dense else self._box.alpha(self.state.theta)

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or none is needed because the dense network keeps the budgets."""
        return self._dense or self.state.step >= self.pace + self.settle

    @property
    def limits(self) -> _Array:
        """The limits (J,) in force at the present step, in the costs' units."""
        return self._paced() * self._costs.dense

    @property
    def keep_ratios(self) -> _Array:
        """Keep ratios (K,) that keep every budget and use one of them up; meant for the end, allowed any time."""
        if self._dense:
            return np.ones_like(self.state.z)
        z, _ = self._project(self.state.z, self._costs.limits)
        box, keeps = self._box, self._costs.keeps
        z = _bisect(z, box.low, lambda point: keeps(box.alpha(point)))
        # Unused budget is given back to all groups alike (the same shift of z), until a budget is used up.
        reach = np.array([(box.high - z).max()])
        shift = _bisect(reach, np.zeros(1), lambda shift: keeps(box.alpha(box.clip(z + shift))))
        return box.alpha(box.clip(z + shift))

    def step(self, gradient: ArrayLike) -> None:
        """One step with the task loss's gradient dL/dalpha (K,) at ``alpha``."""
        if self.finished:
            raise BudgetError(f"The allocation is finished after {self.state.step} steps; read keep_ratios.")
        state = self.state
        found = np.array(gradient, dtype=np.float64)
        if found.shape != state.theta.shape or not np.isfinite(found).all():
            raise DsaError(
                f"The loss's gradient must be {state.theta.size} finite numbers; found shape {found.shape} with "
                f"{int((~np.isfinite(found)).sum())} not finite. Check the loss; the allocation is unchanged."
            )
        state.step += 1
        state.gradient = self.smoothing * state.gradient + (1.0 - self.smoothing) * found
        slope = _slope(self._box.alpha(state.z))
        task = state.gradient / (1.0 - self.smoothing**state.step) * slope  # dL/dtheta, bias of the mean removed
        shape = self._weights(state.z)
        # The size of rho2: a typical group moves by ``rate`` (less and less while settling); none by over 5 times that.
        rate = self.rate * min(1.0, 1.0 - 0.9 * (state.step - self.pace) / max(self.settle, 1))
        typical = np.abs(task).sum() / shape.sum()
        rho2 = shape * (typical / rate if typical > 0.0 else 1.0)
        task = np.clip(task, -5.0 * rate * rho2, 5.0 * rate * rho2)
        total = task + state.u2 + rho2 * (state.theta - state.z)
        if self.project_gradient:
            total = np.maximum(total, 0.0)
        state.theta = self._box.clip(state.theta - total / rho2)
        limits = self._paced()
        if self.subproblem == "exact":
            # With project_gradient theta lags behind; the dual then only says so.
            state.z, mu = self._project(state.theta + state.u2 / rho2, limits)
            state.u1 = mu * float(np.mean(rho2 / shape))
        else:
            state.z, state.u1 = self._gradient_steps(rho2, limits)
        state.u2 = state.u2 + rho2 * (state.theta - state.z)

    def prices(self) -> tuple[ShadowPrice, ...]:
        """Use and shadow price of every budget at z.

        At an optimum dL/dalpha + sum_j lambda_j dF_j/dalpha = 0 with lambda_j >= 0 for the binding budgets; the
        lambda are the least-squares solution of that over the groups that are free to move.
        """
        alpha = self.alpha if self._dense else self._box.alpha(self.state.z)
        used = self._costs.values(alpha) / self._costs.limits
        binding = used >= 1.0 - 1e-3
        price = np.zeros(used.size)
        free = (self.state.z > self._box.low) & (self.state.z < self._box.high)
        if not self._dense and binding.any() and free.any() and self.state.step:
            task = self.state.gradient / (1.0 - self.smoothing**self.state.step)
            scale = _slope(alpha) / np.sqrt(self._weights(self.state.z))
            matrix = (self._costs.gradients(alpha)[binding] * scale)[:, free]
            price[binding] = nnls(matrix.T, -(task * scale)[free])[0]
        rows = zip(used, binding, price / self._costs.dense, strict=True)
        return tuple(ShadowPrice(j, float(u), bool(b), float(p)) for j, (u, b, p) in enumerate(rows))

    def state_dict(self) -> dict[str, Any]:
        """See ``AdmmState.state_dict``."""
        return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``AdmmState.load_state_dict``."""
        self.state.load_state_dict(state)

    def _paced(self) -> _Array:
        left = max(0.0, 1.0 - self.state.step / self.pace)
        return self._costs.limits + (self._first - self._costs.limits) * left

    def _weights(self, z: _Array) -> _Array:
        """Profile of rho2 over the groups (K,), positive."""
        if self.metric == "logit":
            return np.ones_like(z)
        # dF/dtheta, each cost in units of its limit. A group that costs nothing still gets some weight.
        alpha = self._box.alpha(z)
        weights: _Array = (self._costs.gradients(alpha) / self._costs.limits[:, None]).sum(0) * _slope(alpha)
        mean = float(weights.mean())
        return np.maximum(weights, 1e-3 * mean) if mean > 0.0 else np.ones_like(z)

    def _project(self, y: _Array, limits: _Array) -> tuple[_Array, _Array]:
        return _project(self._costs, y, limits, self._box, self._weights)

    def _gradient_steps(self, rho2: _Array, limits: _Array, steps: int = 50) -> tuple[_Array, _Array]:
        """Solve Eq. (9) for z and u1 by descent on z and ascent on u1, in 50 steps as in the paper.

        The step of z is one over the sum of the curvatures of Eq. (9), see ``_inner_gradient``.

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

    def _inner_gradient(self, z: _Array, u1: _Array, rho2: _Array, limits: _Array) -> tuple[_Array, _Array, _Array]:
        """Gradient (K,) of Eq. (9) by z, with [F(z) - B]_+ (J,) and rho1 (J,).

            u1 [F(z) - B]_+ + rho1/2 [F(z) - B]_+^2 + u2 (theta - z) + rho2/2 |theta - z|^2

        (The paper prints no "+" between the first two terms and no subscript at the square; its text derives both
        terms from the constraint [F(z) - B]_+ = 0.) Where a budget is kept both of its terms are 0, so u1 has no
        effect there.

        The paper's rho1 = 0.01 and its step 1e-3 belong to raw FLOPs. Here rho1 is ``_STIFFNESS`` times the value at
        which the penalty is as curved as the proximal term.
        """
        alpha = self._box.alpha(z)
        over = np.maximum(self._costs.values(alpha) - limits, 0.0)
        grads = self._costs.gradients(alpha) * _slope(alpha)
        rho1 = _STIFFNESS / np.maximum((grads**2 / rho2).sum(1), np.finfo(float).tiny)
        push = np.where(over > 0.0, u1 + rho1 * over, 0.0)
        return push @ grads - self.state.u2 - rho2 * (self.state.theta - z), over, rho1


def _slope(alpha: _Array) -> _Array:
    return alpha * (1.0 - alpha)


class _Box:
    """Bounds of theta and z, and the one place where they become keep ratios."""

    def __init__(self, least: _Array) -> None:
        self.least = least
        top = np.maximum(least, 1.0 - _EDGE)
        self.low, self.high = logit(np.minimum(least, 1.0 - _EDGE)), logit(np.minimum(top, 1.0 - _EDGE))

    def clip(self, z: _Array) -> _Array:
        return np.clip(z, self.low, self.high)

    def alpha(self, z: _Array) -> _Array:
        # At the bound exactly the smallest keep ratio, so that a budget equal to its cost is kept to the last bit.
        return np.where(z <= self.low, self.least, np.maximum(expit(z), self.least))


class _NormalisedCosts:
    """J costs in units of their own value at alpha = 1."""

    def __init__(self, costs: Sequence[Cost], limits: Sequence[float], groups: int) -> None:
        self.raw = CostSet(costs, np.ones(groups), limits)
        self.dense = self.raw.dense
        self.limits = self.raw.limits / self.dense

    def values(self, alpha: _Array) -> _Array:
        """Costs (..., J) at keep ratios (..., K), over their dense values."""
        return self.raw.at_ratios(alpha) / self.dense

    def gradients(self, alpha: _Array) -> _Array:
        """Gradients (J, K) at keep ratios (K,), over the dense values."""
        return self.raw.gradients(alpha) / self.dense[:, None]

    def keeps(self, alpha: _Array) -> bool:
        """Whether the costs keep the limits as they were asked, to the last bit of the costs' own units."""
        return bool(self.raw.keeps(alpha))


_Weights = Callable[[_Array], _Array]


def _project(costs: _NormalisedCosts, y: _Array, limits: _Array, box: _Box, weights: _Weights) -> tuple[_Array, _Array]:
    """z (K,) nearest to y with F_j(sigmoid z) <= limits, and its duals mu (J,), in units of ``weights``.

    Within a distance of 1 in every theta the projection is unique and found exactly. From farther away it is done in
    several such pieces, each with the metric of the point it starts from, and mu is the sum of theirs.
    """
    z = box.clip(y)
    mu = np.zeros(limits.size)
    # A limit at the very edge of what is feasible would be approached for ever, so there the way goes straight down.
    pieces = 40 if (costs.values(box.least) < (1.0 - 1e-6) * limits).all() else 0
    for _ in range(pieces):
        here = costs.values(box.alpha(z))
        if (here <= limits).all():
            return z, mu
        floor = np.maximum(box.low, z - 1.0)
        # Halfway to what can be reached in this piece, unless all of the way is in reach.
        target = np.maximum(limits, 0.5 * (here + costs.values(box.alpha(floor))))
        z, part = _project_near(costs, z, target, floor, box, weights(z))
        mu = mu + part
    return _bisect(z, box.low, lambda point: bool((costs.values(box.alpha(point)) <= limits).all())), mu


def _project_near(
    costs: _NormalisedCosts, y: _Array, limits: _Array, floor: _Array, box: _Box, weight: _Array
) -> tuple[_Array, _Array]:
    """The projection where floor <= z <= y, F(floor) <= limits and y - floor <= 1: see ``_project``.

    F is linearised in alpha, not in z: exact for a cost that is linear in alpha, and for quadratics with coefficients
    >= 0 the linear model is feasible whenever the budget is. Its projection is solved and F linearised there again.
    """
    z, mu, change, least = y, np.zeros(limits.size), np.inf, floor
    turns, last = np.zeros(y.size), np.zeros(y.size)
    for _ in range(30):
        alpha = box.alpha(z)
        grads = costs.gradients(alpha)
        room = limits - costs.values(alpha) + grads @ alpha
        new, mu = _dual_newton(grads, np.maximum(room, grads @ box.alpha(least)), y, weight, least, mu)
        step = new - z
        moved = float(np.abs(step).max())
        if moved < 1e-10:
            z = new
            break
        if moved >= 0.7 * change:
            # Relinearising does not contract: half a step, and less where a group turns round again and again, as at
            # an edge below which it costs nothing. After a few turns it stays there, and the others pay.
            turns += step * last < 0.0
            step = step * 0.5 ** np.maximum(turns, 1.0)
            least = np.where(turns >= _TURNS, np.maximum(least, z + step), least)
        z, last, change = z + step, step, moved
    # The last bits: the first point on the way to the floor that keeps the limits.
    return _bisect(z, floor, lambda point: bool((costs.values(box.alpha(point)) <= limits).all())), mu


def _dual_newton(
    grads: _Array, room: _Array, y: _Array, weight: _Array, floor: _Array, mu: _Array
) -> tuple[_Array, _Array]:
    """min sum_k weight_k (z_k - y_k)^2 / 2 subject to grads @ sigmoid(z) <= room, floor <= z <= y; and its duals.

    The J duals by Newton's method on the concave dual function, projected on mu >= 0.
    """

    def evaluate(mu: _Array) -> tuple[_Array, _Array, float]:
        z = _nearest(mu @ grads / weight, y, floor)
        over = grads @ expit(z) - room
        return z, over, float(0.5 * (weight * (z - y) ** 2).sum() + mu @ over)

    z, over, best = evaluate(mu)
    for _ in range(40):
        active = (mu > 0.0) | (over > 0.0)
        gap = float(np.abs(np.where(active, over, 0.0)).max())
        if gap <= 1e-13:
            break
        s = expit(z)
        slope = _slope(s)
        bend = 1.0 + (mu @ grads / weight) * slope * (1.0 - 2.0 * s)
        movable = np.where((z > floor) & (bend > 0.0), slope**2 / (weight * bend), 0.0)
        hessian = (grads[active] * movable) @ grads[active].T
        if not (np.diag(hessian) > 0.0).all():  # every group that this budget could move is at its floor
            break
        ridge = 1e-12 * float(np.trace(hessian))  # budgets on nearly the same thing make it nearly singular
        direction = np.zeros(mu.size)
        direction[active] = np.linalg.solve(hessian + ridge * np.eye(len(hessian)), over[active])
        size = 1.0
        while size > 1e-6:
            trial = np.maximum(mu + size * direction, 0.0)
            candidate = evaluate(trial)
            rest = float(np.abs(np.where((trial > 0.0) | (candidate[1] > 0.0), candidate[1], 0.0)).max())
            # The value rises; or, where its last digits cannot say, the residual halves.
            if rest <= 0.5 * gap or candidate[2] > best + 1e-4 * float(over @ (trial - mu)):
                break
            size *= 0.25
        else:
            break
        mu, (z, over, best) = trial, candidate
    return z, mu


def _nearest(pull: _Array, y: _Array, floor: _Array) -> _Array:
    """Root z in [floor, y] of z - y + pull * s'(z), s' = sigmoid(1 - sigmoid); ``floor`` where there is none.

    There is at most one: at a double root (y - z)(2 sigmoid(z) - 1) = 1, which y - z <= 1 excludes.
    """
    none = floor - y + pull * _slope(expit(floor)) >= 0.0
    low, high = floor, np.where(none, floor, y)
    z = np.clip(y - pull * _slope(expit(y)), low, high)
    for _ in range(60):
        s = expit(z)
        slope = _slope(s)
        value = z - y + pull * slope
        low, high = np.where(value > 0.0, low, z), np.where(value > 0.0, z, high)
        bend = 1.0 + pull * slope * (1.0 - 2.0 * s)
        new = z - value / np.where(bend > 1e-3, bend, 1e-3)
        new = np.where(none, floor, np.where((new >= low) & (new <= high), new, 0.5 * (low + high)))
        moved = float(np.abs(new - z).max())
        z = new
        if moved < 1e-13:
            break
    return z


def _bisect(wanted: _Array, safe: _Array, keeps: Callable[[_Array], bool]) -> _Array:
    """``wanted`` if it keeps the limits, else the last point before they break on the way to it from ``safe``."""
    return last_feasible(lambda share: wanted if share == 1.0 else safe + share * (wanted - safe), keeps)
