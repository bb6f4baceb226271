"""Projection of keep ratios on budgets, in the logits z = logit(alpha).

    minimise sum_k w_k (z_k - y_k)^2 / 2   subject to   F_j(sigmoid z) <= B_j   and   z >= z_min

The weights w are a metric on the groups. In the `cost_metric` w_k is dF/dz_k, so that all groups shrink by about the
same factor. Costs are divided by their dense values, so that the result does not depend on their units. The constraints
are not convex in z; docs/development/mathematics.md derives why projecting in pieces of length 1 is unique.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.special import expit, logit

from dsa_hw.methods.costs import Cost, CostSet, last_feasible
from dsa_hw.utils.arrays import Floats

__all__ = ["Box", "cost_metric", "project", "project_logits", "slope_of", "use_up"]

# Keep ratios are clipped to [1e-6, 1 - 1e-6], so that their logits stay finite.
_EDGE = 1e-6
# Pieces of a projection; each covers at least half of what is left.
_PIECES = 40
# A group that changed direction this often in a projection is at a kink of its cost.
_TURNS = 4

Metric = Callable[[Floats], Floats]
"""Logits (K,) -> positive weights (K,)."""


def project(alpha: Floats, costs: CostSet[Cost], least: Floats) -> Floats:
    """Return the keep ratios nearest to ``alpha`` that are within every limit and use up one of them.

    Args:
        alpha: Keep ratios (K,).
        costs: J costs with their limits.
        least: Smallest keep ratios (K,).

    Returns:
        Keep ratios (K,); all 1 if the dense network is within the limits.

    Raises:
        InfeasibleBudgetError: The smallest keep ratios exceed a limit.
    """
    box = Box(least)
    costs.check_feasible(box.least)
    if costs.keeps(np.ones(alpha.size)):
        return np.ones(alpha.size)
    z = logit(np.clip(alpha, np.maximum(least, _EDGE), 1 - _EDGE))
    return use_up(costs, z, box, cost_metric(costs, box))


def use_up(costs: CostSet[Cost], z: Floats, box: Box, metric: Metric) -> Floats:
    """Return the keep ratios nearest to sigmoid(z) that are within every limit and use up one of them.

    Args:
        costs: J costs with their limits.
        z: Logits (K,).
        box: Bounds of the logits.
        metric: See `project_logits`.
    """
    z, _ = project_logits(costs, z, costs.share_limits, box, metric)
    z = _last_on_line(box.low, z, lambda point: costs.keeps(box.alpha(point)))
    # Budget that is left goes to all groups alike (the same shift of z), until one of the limits is used up.
    top = float((box.high - z).max())
    return last_feasible(lambda share: box.alpha(box.clip(z + share * top)), costs.keeps)


def slope_of(alpha: Floats) -> Floats:
    """Return dalpha/dz of alpha = sigmoid(z)."""
    return alpha * (1.0 - alpha)


class Box:
    """Bounds of the logits, and the only conversion of logits to keep ratios."""

    def __init__(self, least: Floats) -> None:
        """Store the smallest keep ratios (K,), in [0, 1]."""
        self.least = np.clip(least, _EDGE, 1.0)
        top = np.maximum(self.least, 1.0 - _EDGE)
        self.low, self.high = logit(np.minimum(self.least, 1.0 - _EDGE)), logit(np.minimum(top, 1.0 - _EDGE))

    def clip(self, z: Floats) -> Floats:
        """Clip logits (K,) to the bounds."""
        return np.clip(z, self.low, self.high)

    def alpha(self, z: Floats) -> Floats:
        """Return sigmoid(z) (K,); at the lower bound exactly ``least``, so that a limit equal to its cost is kept."""
        return np.where(z <= self.low, self.least, np.maximum(expit(z), self.least))


def cost_metric(costs: CostSet[Cost], box: Box) -> Metric:
    """Return the metric dF/dz, summed over the costs in units of their limits."""

    def metric(z: Floats) -> Floats:
        alpha = box.alpha(z)
        weights: Floats = (costs.share_gradients(alpha) / costs.share_limits[:, None]).sum(0) * slope_of(alpha)
        mean = float(weights.mean())
        # A group that costs nothing still needs a positive weight.
        return np.maximum(weights, 1e-3 * mean) if mean > 0.0 else np.ones_like(z)

    return metric


def project_logits(costs: CostSet[Cost], y: Floats, limits: Floats, box: Box, metric: Metric) -> tuple[Floats, Floats]:
    """Return the logits nearest to ``y`` with costs within ``limits``, and the dual variables.

    Within a distance of 1 in every logit the projection is unique and found exactly. From farther away it is done in
    several such pieces, each with the metric of the point that it starts from; the duals are summed.

    Args:
        costs: J costs; their own limits are not used.
        y: Logits (K,).
        limits: Limits (J,) over the dense costs.
        box: Bounds of the logits.
        metric: Weights (K,) of the distance at logits (K,).

    Returns:
        Logits (K,) and duals (J,), in units of the metric.
    """
    z = box.clip(y)
    mu = np.zeros(limits.size)
    # Pieces approach a limit at the edge of what is feasible without reaching it; there go straight to the bound.
    pieces = _PIECES if (costs.shares(box.least) < (1.0 - 1e-6) * limits).all() else 0
    for _ in range(pieces):
        here = costs.shares(box.alpha(z))
        if (here <= limits).all():
            return z, mu
        floor = np.maximum(box.low, z - 1.0)
        # Halfway to what this piece can reach, unless it can reach the limits.
        target = np.maximum(limits, 0.5 * (here + costs.shares(box.alpha(floor))))
        z, part = _project_near(costs, z, target, floor, box, metric(z))
        mu = mu + part
    return _last_on_line(box.low, z, lambda point: (costs.shares(box.alpha(point)) <= limits).all()), mu


def _project_near(
    costs: CostSet[Cost], y: Floats, limits: Floats, floor: Floats, box: Box, weight: Floats
) -> tuple[Floats, Floats]:
    """Project where floor <= z <= y, F(floor) <= limits and y - floor <= 1; see `project_logits`.

    F is linearised in alpha, not in z. That is exact for a cost that is linear in alpha, and for quadratics with
    non-negative coefficients the linear model is feasible whenever the budget is. The linear problem is solved, F is
    linearised at its solution, and so on until z does not change.
    """
    z, mu, change, least = y, np.zeros(limits.size), np.inf, floor
    turns, last = np.zeros(y.size), np.zeros(y.size)
    for _ in range(30):
        alpha = box.alpha(z)
        grads = costs.share_gradients(alpha)
        room = limits - costs.shares(alpha) + grads @ alpha
        new, mu = _dual_newton(grads, np.maximum(room, grads @ box.alpha(least)), y, weight, least, mu)
        step = new - z
        moved = float(np.abs(step).max())
        if moved < 1e-10:
            z = new
            break
        if moved >= 0.7 * change:
            # Relinearising does not contract. Take half a step, and less for a group that keeps changing direction,
            # as it does at a kink below which it costs nothing. After a few turns such a group is fixed.
            turns += step * last < 0.0
            step = step * 0.5 ** np.maximum(turns, 1.0)
            least = np.where(turns >= _TURNS, np.maximum(least, z + step), least)
        z, last, change = z + step, step, moved
    # Rounding may leave the point outside by the last bits: take the first point towards the floor that is inside.
    return _last_on_line(floor, z, lambda point: (costs.shares(box.alpha(point)) <= limits).all()), mu


def _dual_newton(
    grads: Floats, room: Floats, y: Floats, weight: Floats, floor: Floats, mu: Floats
) -> tuple[Floats, Floats]:
    """Minimise sum_k weight_k (z_k - y_k)^2 / 2 subject to grads @ sigmoid(z) <= room and floor <= z <= y.

    Newton's method on the concave dual function of the J duals, projected on mu >= 0. Returns z (K,) and mu (J,).
    """

    def evaluate(mu: Floats) -> tuple[Floats, Floats, float]:
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
        slope = slope_of(s)
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
            # Accept a rise of the dual function or, where rounding hides it, a residual of at most half.
            if rest <= 0.5 * gap or candidate[2] > best + 1e-4 * float(over @ (trial - mu)):
                break
            size *= 0.25
        else:
            break
        mu, (z, over, best) = trial, candidate
    return z, mu


def _nearest(pull: Floats, y: Floats, floor: Floats) -> Floats:
    """Return the root z in [floor, y] of z - y + pull * s'(z), or ``floor`` if there is none.

    s' = s (1 - s) with s = sigmoid(z). There is at most one root: at a double root (y - z)(2 s - 1) = 1, which
    y - z <= 1 excludes.
    """
    none = floor - y + pull * slope_of(expit(floor)) >= 0.0
    low, high = floor, np.where(none, floor, y)
    z = np.clip(y - pull * slope_of(expit(y)), low, high)
    for _ in range(60):
        s = expit(z)
        slope = slope_of(s)
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


def _last_on_line(safe: Floats, wanted: Floats, keeps: Callable[[Floats], object]) -> Floats:
    """Return ``wanted`` if it is feasible, else the last feasible point on the line to it from ``safe``."""
    return last_feasible(lambda share: wanted if share == 1.0 else safe + share * (wanted - safe), keeps)
