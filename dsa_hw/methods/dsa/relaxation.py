"""Differentiable pruning: keep ratios -> keep probabilities -> masks, and the gradient back.

Channel i of a group with importances b_i is kept with probability (Sec. 3.1 of the paper)

    p_i = 1 / (1 + (b_i / beta1)^-beta2) = sigmoid(beta2 * (log b_i - log beta1)),        (1/C) sum_i p_i = alpha.

The second equation defines beta1(alpha) (Eq. 2). With x_i = beta2 * log b_i and c = beta2 * log beta1 it is one scalar
root per group of a decreasing function of c, bracketed by [min x - logit(alpha), max x - logit(alpha)]: at the
left end every p_i is at least alpha, at the right end none is above it. Differentiating it gives, with
f'_i = p_i (1 - p_i) (Eqs. 5 and 6),

    dp_i/dalpha = C f'_i / sum_j f'_j,        dL/dalpha = C sum_i (dL/dp_i) f'_i / sum_j f'_j.

All groups are solved at once, padded to (K, C_max); a padded channel has log-importance -inf, hence p = 0 and
f' = 0, so no operation needs to know about padding. Everything is float64. Derivations:
docs/development/mathematics.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_hw.errors import DsaError, WidthError
from dsa_hw.methods.dsa.threshold import EDGE, solve_logits

__all__ = ["MASKS", "Layout", "MaskSample", "beta2_schedule", "inexactness", "keep_probabilities", "sample_masks"]

# Importances more than 30 decades below the largest of their group count as 0, and 0 counts as that: a channel
# with b = 0 is kept last but can be kept, so that mean(p) = alpha has a solution for every alpha.
_DECADES = 30.0


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


class _KeepProbabilities(torch.autograd.Function):
    """p(alpha) with the implicit gradient."""

    @staticmethod
    def forward(ctx: Any, alpha: Tensor, log_importance: Tensor, beta2: Tensor, layout: Layout) -> Tensor:
        counts = layout.counts(alpha.device)
        given = log_importance, beta2.expand(counts.shape), alpha.detach().to(torch.float64), counts
        v = torch.from_numpy(solve_logits(*(values.cpu().numpy() for values in given))).to(alpha.device)
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
    Its gradient vanishes where the p of a group are nearly equal and a batch norm with batch statistics follows.
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
    masks = torch.sigmoid((torch.logit(p, eps=EDGE) + noise) / temperature)
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
