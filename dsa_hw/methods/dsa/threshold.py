"""beta1(alpha): the soft threshold of every group at once, by a bracketed root solve on the host.

With x_i = beta2 * log b_i and c = beta2 * log beta1, c is the root of mean_i sigmoid(x_i - c) = alpha (see
``dsa_hw.methods.dsa.relaxation``). A solve is a few sigmoids over (K, C_max) numbers and, between them, dozens of
operations on K numbers, each of which costs less than the call of it. NumPy's calls are cheaper than torch's
(docs/benchmarks/relaxation.md), and
a GPU would be asked for hundreds of small launches; so this is NumPy on any device, for one copy of the importances.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import logit

__all__ = ["EDGE", "solve_logits"]

Floats = NDArray[np.float64]
# A keep ratio closer than this to 0 or 1 is moved to it: sigmoid(theta) rounds to 1 at theta = 37.
EDGE = 1e-12
_ITERATIONS = 200


def solve_logits(log_importance: Floats, beta2: Floats, alpha: Floats, counts: Floats) -> Floats:
    """Logits v = beta2 * (log b - log beta1) (K, C_max) with mean(sigmoid(v)) = alpha, to 1e-10 or better.

    ``log_importance`` (K, C_max) is -inf in the padding and finite elsewhere; ``beta2``, ``alpha``, ``counts`` (K,).
    """
    target = np.clip(alpha, EDGE, 1.0 - EDGE)
    offset = logit(target)
    finite = np.where(np.isneginf(log_importance), 0.0, log_importance)
    mean = finite.sum(1) / counts
    variance = np.maximum(np.einsum("kc,kc->k", finite, finite) / counts - mean * mean, 0.0)
    # First guess for narrow x: were they normal, mean(sigmoid(x - c)) would be about
    # sigmoid((E x - c) / sqrt(1 + pi Var x / 8)).
    spread = beta2 * beta2 * variance
    guess = beta2 * mean - offset * np.sqrt(1.0 + math.pi / 8.0 * spread)
    anchor = np.zeros_like(guess)
    wide = spread > 4.0
    if wide.any():
        # For wide x: what it is in the limit of hard pruning. There log b is measured from the channel at the
        # threshold, whose own logit is then exactly -c, so that beta2 = 1e10 costs no digits where they count.
        # (Found in float32, which sorts faster, unless beta2 makes the difference visible.)
        values = log_importance if beta2.max() > 1e4 else log_importance.astype(np.float32)
        cut, share, gap = _hard_threshold(values, target, counts)
        anchor = np.where(wide, cut, 0.0)
        guess = np.where(wide, np.minimum(-logit(share), beta2 * gap), guess)
    x = (log_importance - anchor[:, None]) * beta2[:, None]
    low, high = (finite.min(1) - anchor) * beta2 - offset, (finite.max(1) - anchor) * beta2 - offset
    x -= _bracketed_newton(x, target, counts, low, high, guess)[:, None]
    return x


def _hard_threshold(log_importance: NDArray[np.floating], target: Floats, counts: Floats) -> tuple[Floats, ...]:
    """Where hard pruning to ``target`` would cut; each (K,).

    The log-importance of the channel at the cut, the share of the channels of that same importance that are kept,
    and half the way to the next larger importance. As beta2 grows, the root tends to -logit(share) above the cut,
    or to the middle of the gap where the share is 0.
    """
    ascending = np.sort(log_importance, axis=1)
    width = ascending.shape[1]
    kept = target * counts
    whole = np.round(kept)
    kept = np.where(np.abs(kept - whole) < 1e-9, whole, kept)  # 0.3 * 10 channels are 3
    place = width - 1 - np.minimum(kept, counts - 1.0).astype(np.int64)
    rows = np.arange(len(place))
    anchor = ascending[rows, place]
    above = (ascending[rows, np.minimum(place + 1, width - 1)] - anchor).astype(np.float64)
    at_most, below = (ascending <= anchor[:, None]).sum(1), (ascending < anchor[:, None]).sum(1)
    share = (kept - (width - at_most)) / (at_most - below)
    gap = np.where(above > 0.0, 0.5 * above, math.inf)
    return anchor.astype(np.float64), np.clip(share, 0.0, 1.0 - EDGE), gap


def _bracketed_newton(x: Floats, target: Floats, counts: Floats, low: Floats, high: Floats, guess: Floats) -> Floats:
    """Root c (K,) of mean(sigmoid(x - c)) = target in [low, high].

    Newton's method on logit(mean p) = logit(alpha), which is linear in c where all x are equal and nearly so
    where they are close; bisection where a step leaves the bracket or does not halve the residual (where the
    mean is a staircase).
    """
    # Rounding of a mean of C numbers in [0, 1] is about 1e-16; the relative part matters for alpha near 0 and 1.
    tolerance = 1e-11 * np.minimum(target, 1.0 - target) + 2e-15
    goal = logit(target)
    c = np.clip(guess, low, high)
    root, rows = c.copy(), np.arange(c.size)
    previous = np.full_like(c, math.inf)
    # One buffer for all iterations: fresh memory of this size costs more than the sigmoid.
    p = np.empty_like(x)
    with np.errstate(divide="ignore", invalid="ignore"):
        for iteration in range(_ITERATIONS):
            # p = sigmoid(x - c), clipped to where it is 1 or nothing: infinities and denormal numbers are slow
            np.clip(np.subtract(c[:, None], x, out=p), -40.0, 300.0, out=p)
            np.exp(p, out=p)
            p += 1.0
            np.reciprocal(p, out=p)
            total = p.sum(1)
            mean = total / counts
            residual = mean - target
            size = np.abs(residual)
            above = residual > 0.0
            low, high = np.where(above, c, low), np.where(above, high, c)
            unmet = size > tolerance
            if iteration > 50:  # a bracket without a number inside it has been solved as well as can be
                unmet &= np.nextafter(low, high) < high
            left = np.count_nonzero(unmet)
            if left == 0:
                break
            proposal = c + (logit(mean) - goal) * (1.0 - mean) * total / (total - np.einsum("kc,kc->k", p, p))
            # A NaN fails every comparison, so it bisects too. After a bisection Newton gets another chance, whatever
            # the residual did.
            good = (proposal > low) & (proposal < high) & (size <= 0.5 * previous)
            previous = np.where(good, size, math.inf)
            c = np.where(unmet, np.where(good, proposal, 0.5 * (low + high)), c)
            if 3 * left <= unmet.size:  # most groups are done: go on with the others alone
                root[rows] = c
                rows, x, target, goal, counts, tolerance, low, high, previous, c = (
                    values[unmet] for values in (rows, x, target, goal, counts, tolerance, low, high, previous, c)
                )
                p = p[:left]
    root[rows] = c
    return root
