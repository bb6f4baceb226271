"""The soft threshold beta1(alpha) of every group, by one bracketed root solve.

With x_i = beta2 * log b_i and c = beta2 * log beta1, c is the root of mean_i sigmoid(x_i - c) = alpha (see
`dsa_hw.methods.dsa.relaxation`). A solve is a few sigmoids over (K, C_max) numbers and, between them, dozens of
operations on K numbers that take less time than their call. NumPy's calls are cheaper than torch's
(docs/benchmarks/relaxation.md), and on a GPU each would be a kernel launch. So the solve runs in NumPy for every
device, with one copy of the importances to the host.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import logit

from dsa_hw.utils.arrays import Floats

__all__ = ["EDGE", "solve_logits"]

# Keep ratios are clipped to [EDGE, 1 - EDGE], because sigmoid(theta) rounds to 1 at theta = 37.
EDGE = 1e-12
_ITERATIONS = 200


def solve_logits(log_importance: Floats, beta2: Floats, alpha: Floats, counts: Floats) -> Floats:
    """Return logits v = beta2 * (log b - log beta1) (K, C_max) with mean(sigmoid(v)) = alpha, to 1e-10 or better.

    Args:
        log_importance: log b (K, C_max), -inf in the padding and finite elsewhere.
        beta2: Sharpness (K,).
        alpha: Keep ratios (K,).
        counts: Sizes of the groups (K,).
    """
    target = np.clip(alpha, EDGE, 1.0 - EDGE)
    offset = logit(target)
    finite = np.where(np.isneginf(log_importance), 0.0, log_importance)
    mean = finite.sum(1) / counts
    variance = np.maximum(np.einsum("kc,kc->k", finite, finite) / counts - mean * mean, 0.0)
    # First guess for narrow x: for normal x, mean(sigmoid(x - c)) is about sigmoid((E x - c) / sqrt(1 + pi Var x / 8)).
    spread = beta2 * beta2 * variance
    guess = beta2 * mean - offset * np.sqrt(1.0 + math.pi / 8.0 * spread)
    anchor = np.zeros_like(guess)
    wide = spread > 4.0
    if wide.any():
        # For wide x: the limit of hard pruning. log b is measured from the channel at the threshold, whose own logit
        # is then exactly -c, so that no digits are lost there even at beta2 = 1e10. float32 sorts faster and is used
        # unless beta2 makes the difference visible.
        values = log_importance if beta2.max() > 1e4 else log_importance.astype(np.float32)
        cut, share, gap = _hard_threshold(values, target, counts)
        anchor = np.where(wide, cut, 0.0)
        guess = np.where(wide, np.minimum(-logit(share), beta2 * gap), guess)
    x = (log_importance - anchor[:, None]) * beta2[:, None]
    low, high = (finite.min(1) - anchor) * beta2 - offset, (finite.max(1) - anchor) * beta2 - offset
    x -= _bracketed_newton(x, target, counts, low, high, guess)[:, None]
    return x


def _hard_threshold(log_importance: NDArray[np.floating], target: Floats, counts: Floats) -> tuple[Floats, ...]:
    """Return where hard pruning to ``target`` would cut, three arrays (K,).

    They are the log-importance of the channel at the cut, the share of the channels of equal importance that are
    kept, and half the distance to the next larger importance. As beta2 grows, the root tends to -logit(share) above
    the cut, or to the middle of the gap if the share is 0.
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
    """Return the root c (K,) of mean(sigmoid(x - c)) = target in [low, high].

    Newton's method on logit(mean p) = logit(alpha), which is linear in c if all x are equal and nearly so if they are
    close. Bisection if a step leaves the bracket or does not halve the residual, as where the mean is a staircase.
    """
    # The rounding error of a mean of C numbers in [0, 1] is about 1e-16; the relative part is for alpha near 0 and 1.
    tolerance = 1e-11 * np.minimum(target, 1.0 - target) + 2e-15
    goal = logit(target)
    c = np.clip(guess, low, high)
    root, rows = c.copy(), np.arange(c.size)
    previous = np.full_like(c, math.inf)
    # One buffer for all iterations: allocating memory of this size costs more than the sigmoid.
    p = np.empty_like(x)
    with np.errstate(divide="ignore", invalid="ignore"):
        for iteration in range(_ITERATIONS):
            # p = sigmoid(x - c); clipped, because infinities and denormal numbers are slow.
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
            if iteration > 50:  # a bracket without a number inside cannot be improved
                unmet &= np.nextafter(low, high) < high
            left = np.count_nonzero(unmet)
            if left == 0:
                break
            proposal = c + (logit(mean) - goal) * (1.0 - mean) * total / (total - np.einsum("kc,kc->k", p, p))
            # NaN fails every comparison and bisects too. After a bisection Newton is tried again.
            good = (proposal > low) & (proposal < high) & (size <= 0.5 * previous)
            previous = np.where(good, size, math.inf)
            c = np.where(unmet, np.where(good, proposal, 0.5 * (low + high)), c)
            if 3 * left <= unmet.size:  # most groups are done: continue with the others only
                root[rows] = c
                rows, x, target, goal, counts, tolerance, low, high, previous, c = (
                    values[unmet] for values in (rows, x, target, goal, counts, tolerance, low, high, previous, c)
                )
                p = p[:left]
    root[rows] = c
    return root
