"""Differentiable pruning: keep ratios -> keep probabilities -> masks, and the gradient back.

Channel i of a group with importances b_i is kept with probability (Sec. 3.1 of the paper)

    p_i = 1 / (1 + (b_i / beta1)^-beta2) = sigmoid(beta2 * (log b_i - log beta1)),        (1/C) sum_i p_i = alpha.

The second equation defines beta1(alpha). With x_i = beta2 * log b_i and c = beta2 * log beta1 it is one scalar
root per group of a decreasing function of c, bracketed by [min x - logit(alpha), max x - logit(alpha)]: at the
left end every p_i is at least alpha, at the right end none is above it. Differentiating it gives, with
f'_i = p_i (1 - p_i),

    dp_i/dalpha = C f'_i / sum_j f'_j,        dL/dalpha = C sum_i (dL/dp_i) f'_i / sum_j f'_j.

All groups are solved at once, padded to (K, C_max); a padded channel has log-importance -inf, hence p = 0 and
f' = 0, so no operation needs to know about padding. Everything is float64. Derivations: docs/mathematics.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_hw.errors import DsaError, WidthError

__all__ = ["MASKS", "Layout", "MaskSample", "beta2_schedule", "inexactness", "keep_probabilities", "sample_masks"]

# A keep ratio closer than this to 0 or 1 is moved to it: sigmoid(theta) rounds to 1 at theta = 37.
_EDGE = 1e-12
# Importances more than 30 decades below the largest of their group count as 0, and 0 counts as that: a channel
# with b = 0 is kept last but can be kept, so that mean(p) = alpha has a solution for every alpha.
_DECADES = 30.0
_ITERATIONS = 200


@dataclass(frozen=True)
class Layout:
    """Ragged groups as one (K, C_max) tensor; ``sizes`` are the K group sizes C_k."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse an empty set of groups and groups without channels."""
        object.__setattr__(self, "sizes", tuple(int(size) for size in self.sizes))
        if not self.sizes or min(self.sizes) < 1:
            raise WidthError(f"sizes = {list(self.sizes)}: at least one group is needed, and each needs a channel.")

    @property
    def shape(self) -> tuple[int, int]:
        """(K, C_max)."""
        return len(self.sizes), max(self.sizes)

    def counts(self, device: torch.device | str | None = None) -> Tensor:
        """The sizes C_k as a float64 tensor (K,)."""
        return torch.tensor(self.sizes, dtype=torch.float64, device=device)

    def valid(self, device: torch.device | str | None = None) -> Tensor:
        """Boolean (K, C_max): which entries are channels and not padding."""
        counts = torch.tensor(self.sizes, device=device)
        return torch.arange(self.shape[1], device=device) < counts[:, None]

    def pad(self, values: Sequence[Tensor | NDArray[Any]], fill: float = 0.0) -> Tensor:
        """K vectors of lengths C_k -> (K, C_max) float64, padded with ``fill``."""
        vectors = [torch.as_tensor(value).detach().to(torch.float64).reshape(-1) for value in values]
        found = tuple(vector.numel() for vector in vectors)
        if found != self.sizes:
            raise WidthError(f"{len(self.sizes)} vectors of lengths {list(self.sizes)} expected, found {list(found)}.")
        return torch.nn.utils.rnn.pad_sequence(vectors, batch_first=True, padding_value=fill)

    def split(self, padded: Tensor) -> list[Tensor]:
        """(..., K, C_max) -> K views (..., C_k); gradients pass."""
        return [padded[..., k, :size] for k, size in enumerate(self.sizes)]


def beta2_schedule(epoch: float, start: float = 0.05, growth: float = 1.1) -> float:
    """The paper's beta2: ``start`` at epoch 0, times ``growth`` per epoch; the inexactness falls as it grows."""
    return float(start * growth**epoch)


def inexactness(p: Tensor) -> Tensor:
    """E |sum m - alpha C|^2 = sum p (1 - p) of each group; p (..., K, C_max) -> (..., K)."""
    return (p * (1.0 - p)).sum(-1)


def keep_probabilities(alpha: Tensor, importance: Tensor, beta2: float | Tensor, layout: Layout) -> Tensor:
    """Keep probabilities p (K, C_max) float64 with mean(p) = alpha in each group; 0 in the padding.

    ``alpha`` (K,) in [0, 1] gets the implicit gradient. ``importance`` (K, C_max), non-negative, as from
    ``layout.pad``, is a constant, as in the paper; only its ratios within a group matter. Channels of equal
    importance have equal p at any ``beta2`` > 0 (a number, or one per group (K,)).
    """
    shape = layout.shape
    if tuple(alpha.shape) != shape[:1] or tuple(importance.shape) != shape:
        raise WidthError(
            f"{shape[0]} groups of at most {shape[1]} channels need keep ratios of shape {shape[:1]} and importances "
            f"of shape {shape}; found {tuple(alpha.shape)} and {tuple(importance.shape)}. Use Layout.pad."
        )
    ratios = alpha.detach().to(torch.float64)
    if not bool(((ratios >= 0.0) & (ratios <= 1.0)).all()):
        raise WidthError(f"Keep ratios must lie in [0, 1]; found {_outside(ratios, 0.0, 1.0)}.")
    slope = torch.as_tensor(beta2, dtype=torch.float64, device=alpha.device)
    if not bool(((slope > 0.0) & slope.isfinite()).all()):
        raise WidthError(f"beta2 must be positive and finite; found {_outside(slope.reshape(-1), 0.0, math.inf)}.")
    log_importance = _log_importance(importance.detach(), layout)
    result: Tensor = _KeepProbabilities.apply(alpha, log_importance, slope, layout)  # type: ignore[no-untyped-call]
    return result


def _outside(values: Tensor, low: float, high: float) -> list[float]:
    bad = ~((values >= low) & (values <= high)) if low < high else ~values.isfinite()
    return [float(value) for value in values[bad][:5]] or [float(value) for value in values[:5]]


def _log_importance(importance: Tensor, layout: Layout) -> Tensor:
    """log(b / max b) in [-30 decades, 0] per group, -inf in the padding. (K, C_max)."""
    values = importance.to(torch.float64)
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    if not bool(((low >= 0.0) & high.isfinite()).all()):  # also false for NaN: amin propagates it
        wrong = [k for k in range(layout.shape[0]) if not bool((low[k] >= 0.0) & high[k].isfinite())]
        raise WidthError(
            f"Importances must be finite and non-negative; those of group(s) {wrong[:5]} are not. "
            "Use magnitudes (|gamma|, norms), and check that the weights are finite."
        )
    # A group of zeros has no largest importance; there, as where all are equal, every channel gets p = alpha.
    logs = torch.where(high > 0.0, values / high, 1.0).log_()
    logs.clamp_(min=-_DECADES * math.log(10.0))
    if min(layout.sizes) < layout.shape[1]:
        logs.masked_fill_(~layout.valid(values.device), -math.inf)
    return logs


def _solve(log_importance: Tensor, beta2: Tensor, alpha: Tensor, counts: Tensor) -> Tensor:
    """Logits v = beta2 * (log b - log beta1) (K, C_max) with mean(sigmoid(v)) = alpha, to 1e-10 or better."""
    scale = beta2.reshape(-1, 1)
    target = alpha.clamp(_EDGE, 1.0 - _EDGE)
    offset = torch.logit(target)
    finite = log_importance.nan_to_num(neginf=0.0)
    mean = finite.sum(1) / counts
    variance = (torch.linalg.vecdot(finite, finite) / counts - mean * mean).clamp(min=0.0)
    # First guess for narrow x: were they normal, mean(sigmoid(x - c)) would be about
    # sigmoid((E x - c) / sqrt(1 + pi Var x / 8)).
    spread = beta2 * beta2 * variance
    guess = beta2 * mean - offset * (1.0 + math.pi / 8.0 * spread).sqrt()
    wide = spread > 4.0
    if bool(wide.any()):
        # For wide x: what it is in the limit of hard pruning. There log b is measured from the channel at the
        # threshold, whose own logit is then exactly -c, so that beta2 = 1e10 costs no digits where they count.
        # (Found in float32, which takes a sixth of the time, unless beta2 makes the difference visible.)
        values = log_importance if float(beta2.max()) > 1e4 else log_importance.to(torch.float32)
        cut, share, gap = _hard_threshold(values, target, counts)
        anchor = torch.where(wide, cut, 0.0)[:, None]
        guess = torch.where(wide, torch.minimum(-torch.logit(share), beta2 * gap), guess)
    else:
        anchor = torch.zeros_like(scale)
    x = (log_importance - anchor).mul_(scale)
    low, high = (finite.amin(1) - anchor[:, 0]) * beta2, (finite.amax(1) - anchor[:, 0]) * beta2
    root = _bracketed_newton(x, target, counts, low - offset, high - offset, guess)
    return x.sub_(root[:, None])


def _hard_threshold(log_importance: Tensor, target: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where hard pruning to ``target`` would cut; each (K,).

    The log-importance of the channel at the cut, the share of the channels of that same importance that are kept,
    and half the way to the next larger importance. As beta2 grows, the root tends to -logit(share) above the cut,
    or to the middle of the gap where the share is 0.
    """
    ascending = _sorted(log_importance)
    width = log_importance.shape[1]
    kept = target * counts
    whole = kept.round()
    kept = torch.where((kept - whole).abs() < 1e-9, whole, kept)  # 0.3 * 10 channels are 3
    place = (width - 1 - torch.minimum(kept, counts - 1.0).long())[:, None]
    anchor = ascending.gather(1, place)
    above = (ascending.gather(1, (place + 1).clamp(max=width - 1)) - anchor)[:, 0]
    first, last = torch.searchsorted(ascending, anchor), torch.searchsorted(ascending, anchor, right=True)
    share = (kept - (width - last[:, 0])) / (last - first)[:, 0]
    gap = torch.where(above > 0.0, 0.5 * above, math.inf)
    return anchor[:, 0].to(target.dtype), share.clamp(0.0, 1.0 - _EDGE), gap.to(target.dtype)


def _sorted(values: Tensor) -> Tensor:
    # NumPy's vectorised sort takes a tenth of the time of torch's on the CPU.
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=1))
    return values.sort(1).values


def _bracketed_newton(x: Tensor, target: Tensor, counts: Tensor, low: Tensor, high: Tensor, guess: Tensor) -> Tensor:
    """Root c (K,) of mean(sigmoid(x - c)) = target in [low, high].

    Newton's method on logit(mean p) = logit(alpha), which is linear in c where all x are equal and nearly so
    where they are close; bisection where a step leaves the bracket or does not halve the residual (where the
    mean is a staircase).
    """
    # Rounding of a mean of C numbers in [0, 1] is about 1e-16; the relative part matters for alpha near 0 and 1.
    tolerance = 1e-11 * torch.minimum(target, 1.0 - target) + 2e-15
    goal = torch.logit(target)
    c = torch.minimum(torch.maximum(guess, low), high)
    root, rows = c, torch.arange(c.shape[0], device=c.device)
    previous = torch.full_like(c, math.inf)
    # One buffer for all iterations: fresh memory of this size costs more than the sigmoid.
    p = torch.empty_like(x)
    for iteration in range(_ITERATIONS):
        p = torch.sub(x, c[:, None], out=p).sigmoid_()
        total = p.sum(1)
        mean = total / counts
        residual = mean - target
        size = residual.abs()
        above = residual > 0.0
        low, high = torch.where(above, c, low), torch.where(above, high, c)
        unmet = size > tolerance
        if iteration > 50:  # a bracket without a number inside it has been solved as well as can be
            unmet &= torch.nextafter(low, high) < high
        left = int(torch.count_nonzero(unmet))
        if left == 0:
            break
        proposal = torch.addcdiv(c, (torch.logit(mean) - goal) * (1.0 - mean) * total, total - (p * p).sum(1))
        # A NaN fails every comparison, so it bisects too. After a bisection Newton gets another chance, whatever
        # the residual did.
        good = (proposal > low) & (proposal < high) & (size <= 0.5 * previous)
        previous = torch.where(good, size, math.inf)
        c = torch.where(unmet, torch.where(good, proposal, 0.5 * (low + high)), c)
        if 3 * left <= unmet.numel():  # most groups are done: go on with the others alone
            root = root.index_copy(0, rows, c)
            index = unmet.nonzero()[:, 0]
            rows, x, target, goal, counts, tolerance, low, high, previous, c = (
                values.index_select(0, index)
                for values in (rows, x, target, goal, counts, tolerance, low, high, previous, c)
            )
            p = p[:left]
    return root.index_copy(0, rows, c)


class _KeepProbabilities(torch.autograd.Function):
    """p(alpha) with the implicit gradient."""

    @staticmethod
    def forward(ctx: Any, alpha: Tensor, log_importance: Tensor, beta2: Tensor, layout: Layout) -> Tensor:
        counts = layout.counts(alpha.device)
        v = _solve(log_importance, beta2.expand(counts.shape), alpha.detach().to(torch.float64), counts)
        ctx.save_for_backward(v, counts)
        ctx.dtype = alpha.dtype
        return torch.sigmoid(v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        v, counts = ctx.saved_tensors
        # f' = e^-|v| / (1 + e^-|v|)^2. All of them may underflow for large beta2 while their ratios do not: divide
        # by the largest in the exponent, so that the weights are those of the limit (the channels at the threshold).
        distance = v.abs()
        nearest = distance.amin(1, keepdim=True)
        decay = torch.exp((nearest - distance).clamp_(min=-300.0))  # below is nothing, and slow: denormal numbers
        weights = decay / (1.0 + decay * torch.exp(-nearest)).square_()
        grad = counts * (grads[0].to(torch.float64) * weights).sum(1) / weights.sum(1)
        return grad.to(ctx.dtype), None, None, None


@dataclass(frozen=True, eq=False)
class MaskSample:
    """Masks (N, K, C_max) for N forward passes (or N examples of one pass) and how to get dL/dp from them."""

    masks: Tensor
    _surrogate: Callable[[Tensor], Tensor]

    def surrogate(self, losses: Tensor) -> Tensor:
        """Scalar equal to the mean of ``losses`` (N,) whose backward pass leaves the estimate of dE[L]/dp in p."""
        if losses.shape != self.masks.shape[:1]:
            raise DsaError(
                f"{self.masks.shape[0]} masks were drawn, so {self.masks.shape[0]} losses are needed, one each; "
                f"found a tensor of shape {tuple(losses.shape)}."
            )
        return self._surrogate(losses)


_Estimator = Callable[[Tensor, int, float, torch.Generator | None, torch.dtype], MaskSample]
MASKS: dict[str, _Estimator] = {}
"""Name -> estimator of the gradient through the masks."""


def _register(name: str) -> Callable[[_Estimator], _Estimator]:
    def decorator(function: _Estimator) -> _Estimator:
        MASKS[name] = function
        return function

    return decorator


def sample_masks(
    p: Tensor,
    method: str = "soft",
    count: int = 1,
    *,
    temperature: float = 0.5,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> MaskSample:
    """Draw ``count`` masks for keep probabilities ``p`` (K, C_max).

    ``soft`` the mean field m = p: no variance; exact where the loss is multilinear in the masks. One mask only.
    ``straight_through`` Bernoulli masks, dL/dp := dL/dm: exact in expectation where the loss is multilinear.
    ``antithetic`` the same with masks in pairs from u and 1 - u; ``count`` even.
    ``relaxed`` binary concrete masks at ``temperature``: exact for the relaxed loss, which is another one.
    ``disarm`` Bernoulli pairs, unbiased for every loss and needs no dL/dm; ``count`` even.
    """
    if method not in MASKS:
        raise DsaError(f"There is no mask estimator {method!r}; there are {', '.join(sorted(MASKS))}.")
    if count < 1 or (method in ("antithetic", "disarm") and count % 2) or (method == "soft" and count != 1):
        need = {"soft": "exactly one mask", "antithetic": "an even number", "disarm": "an even number"}
        raise DsaError(f"{count} masks asked of {method!r}; it takes {need.get(method, 'at least one')}.")
    return MASKS[method](p, count, temperature, generator, dtype)


def _uniform(p: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    # float32 numbers: 24 bits are enough to compare with p, and they take half the time.
    return torch.rand((count, *p.shape), dtype=torch.float32, device=p.device, generator=generator)


def _pathwise(masks: Tensor) -> MaskSample:
    return MaskSample(masks, lambda losses: losses.mean())


@_register("soft")
def _soft(p: Tensor, count: int, temperature: float, rng: torch.Generator | None, dtype: torch.dtype) -> MaskSample:
    return _pathwise(p.to(dtype)[None])


@_register("straight_through")
def _straight(p: Tensor, count: int, temperature: float, rng: torch.Generator | None, dtype: torch.dtype) -> MaskSample:
    hard = (_uniform(p, count, rng) < p.detach()).to(dtype)
    low = p.to(dtype)
    return _pathwise(hard + (low - low.detach()))  # the bracket is exactly 0, with gradient 1


@_register("antithetic")
def _anti(p: Tensor, count: int, temperature: float, rng: torch.Generator | None, dtype: torch.dtype) -> MaskSample:
    hard = _pairs(p, count, rng)
    low = p.to(dtype)
    return _pathwise(torch.cat(hard).to(dtype) + (low - low.detach()))


def _pairs(p: Tensor, count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    u, keep = _uniform(p, count // 2, generator), p.detach()
    return u < keep, u >= 1.0 - keep  # P(1 - u <= p) = p as well; >= keeps p = 0 at 0: u < 1 always


@_register("relaxed")
def _relaxed(p: Tensor, count: int, temperature: float, rng: torch.Generator | None, dtype: torch.dtype) -> MaskSample:
    if not temperature > 0.0:
        raise DsaError(f"The temperature of relaxed masks must be positive; found {temperature}.")
    # u on the open interval: float32 rand can be exactly 0.
    noise = torch.logit(_uniform(p, count, rng).to(torch.float64), eps=2.0**-26)
    masks = torch.sigmoid((torch.logit(p, eps=_EDGE) + noise) / temperature)
    return _pathwise((masks * (p.detach() > 0.0)).to(dtype))  # padding stays exactly 0


@_register("disarm")
def _disarm(p: Tensor, count: int, temperature: float, rng: torch.Generator | None, dtype: torch.dtype) -> MaskSample:
    """Dong, Mnih, Tucker (2020): antithetic pairs m, m~ with the shared uniform integrated out.

    dE[L]/dlogit_i = (1/2) (L(m) - L(m~)) (-1)^{m~_i} [m_i != m~_i] sigmoid(|logit_i|), and
    sigmoid(|logit|) / (p (1 - p)) = 1 / min(p, 1 - p), which is finite wherever m != m~ can happen.
    """
    first, second = _pairs(p, count, rng)
    keep = p.detach()
    differ = first != second
    sign = torch.where(second, -1.0, 1.0).to(torch.float64)
    rarer = torch.minimum(keep, 1.0 - keep)
    score = torch.where(differ, 0.5 * sign / rarer.clamp(min=torch.finfo(torch.float64).tiny), 0.0)

    def surrogate(losses: Tensor) -> Tensor:
        values = losses.detach().to(torch.float64)
        gap = values[: count // 2] - values[count // 2 :]
        coefficient = torch.einsum("n,nkc->kc", gap, score) / (count // 2)
        # losses.mean() keeps the gradient to whatever else (weights) the losses depend on.
        return losses.mean() + ((p - keep) * coefficient).sum().to(losses.dtype)

    return MaskSample(torch.cat((first, second)).to(dtype), surrogate)
