"""Keep probabilities of channels as a differentiable function of the keep ratios (Sec. 3.1 of the DSA paper).

Channel i of a group with importances b_i is kept with probability

    p_i = 1 / (1 + (b_i / beta1)^-beta2) = sigmoid(beta2 * (log b_i - log beta1)),        (1/C) sum_i p_i = alpha.

The second equation defines beta1(alpha) (Eq. 2). With x_i = beta2 * log b_i and c = beta2 * log beta1 it is one scalar
root per group of a decreasing function of c, bracketed by [min x - logit(alpha), max x - logit(alpha)]: at the
left end every p_i is at least alpha, at the right end none is above it. Differentiating it gives, with
f'_i = p_i (1 - p_i) (Eqs. 5 and 6),

    dp_i/dalpha = C f'_i / sum_j f'_j,        dL/dalpha = C sum_i (dL/dp_i) f'_i / sum_j f'_j.

All groups are solved at once, padded to (K, C_max). A padded channel has log-importance -inf, hence p = 0 and
f' = 0, so that no operation depends on the padding. Everything is float64. Derivations:
docs/development/mathematics.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_hw.errors import WidthError
from dsa_hw.methods.dsa.threshold import solve_logits

__all__ = ["Layout", "inexactness", "keep_probabilities"]

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
            raise WidthError(f"`sizes` must have at least one group and at least 1 for each; got {list(self.sizes)}.")

    @property
    def shape(self) -> tuple[int, int]:
        """(K, C_max)."""
        return len(self.sizes), max(self.sizes)

    def counts(self, device: torch.device | str | None = None) -> Tensor:
        """Return the sizes C_k as a float64 tensor (K,)."""
        return torch.tensor(self.sizes, dtype=torch.float64, device=device)

    def valid(self, device: torch.device | str | None = None) -> Tensor:
        """Return a boolean tensor (K, C_max): which entries are channels and not padding."""
        counts = torch.tensor(self.sizes, device=device)
        return torch.arange(self.shape[1], device=device) < counts[:, None]

    def pad(self, values: Sequence[Tensor | NDArray[Any]], fill: float = 0.0) -> Tensor:
        """Return K vectors of lengths C_k as one float64 tensor (K, C_max), padded with ``fill``."""
        vectors = [torch.as_tensor(value).detach().to(torch.float64).reshape(-1) for value in values]
        found = tuple(vector.numel() for vector in vectors)
        if found != self.sizes:
            raise WidthError(f"Vectors must have the lengths {list(self.sizes)}; got {list(found)}.")
        return torch.nn.utils.rnn.pad_sequence(vectors, batch_first=True, padding_value=fill)

    def split(self, padded: Tensor) -> list[Tensor]:
        """Return K views (..., C_k) of a tensor (..., K, C_max); gradients pass."""
        return [padded[..., k, :size] for k, size in enumerate(self.sizes)]


def inexactness(p: Tensor) -> Tensor:
    """Return E |sum m - alpha C|^2 = sum p (1 - p) of each group (..., K) for probabilities p (..., K, C_max)."""
    return (p * (1.0 - p)).sum(-1)


def keep_probabilities(alpha: Tensor, importance: Tensor, beta2: float | Tensor, layout: Layout) -> Tensor:
    """Return keep probabilities p (K, C_max) with mean(p) = alpha in each group; 0 in the padding.

    Args:
        alpha: Keep ratios (K,) in [0, 1]; they get the implicit gradient.
        importance: Non-negative importances (K, C_max), as from ``layout.pad``. As in the paper they are constants,
            and only their ratios within a group matter. Channels of equal importance have equal p.
        beta2: Sharpness, positive, a number or (K,).
        layout: Sizes of the groups.

    Raises:
        WidthError: A shape does not fit, or a value is out of range.
    """
    shape = layout.shape
    if tuple(alpha.shape) != shape[:1] or tuple(importance.shape) != shape:
        raise WidthError(
            f"{shape[0]} groups of at most {shape[1]} channels need keep ratios of shape {shape[:1]} and importances "
            f"of shape {shape}; got {tuple(alpha.shape)} and {tuple(importance.shape)}. Use Layout.pad."
        )
    ratios = alpha.detach().to(torch.float64)
    if not bool(((ratios >= 0.0) & (ratios <= 1.0)).all()):
        raise WidthError(f"Keep ratios must lie in [0, 1]; got {_outside(ratios, 0.0, 1.0)}.")
    slope = torch.as_tensor(beta2, dtype=torch.float64, device=alpha.device)
    if not bool(((slope > 0.0) & slope.isfinite()).all()):
        raise WidthError(f"beta2 must be positive and finite; got {_outside(slope.reshape(-1), 0.0, math.inf)}.")
    log_importance = _log_importance(importance.detach(), layout)
    result: Tensor = _KeepProbabilities.apply(alpha, log_importance, slope, layout)  # type: ignore[no-untyped-call]
    return result


def _outside(values: Tensor, low: float, high: float) -> list[float]:
    bad = ~((values >= low) & (values <= high)) if low < high else ~values.isfinite()
    return [float(value) for value in values[bad][:5]] or [float(value) for value in values[:5]]


def _log_importance(importance: Tensor, layout: Layout) -> Tensor:
    """Return log(b / max b) (K, C_max), in [-30 decades, 0] per group, -inf in the padding."""
    values = importance.to(torch.float64)
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    if not bool(((low >= 0.0) & high.isfinite()).all()):  # also false for NaN: amin propagates it
        wrong = [k for k in range(layout.shape[0]) if not bool((low[k] >= 0.0) & high[k].isfinite())]
        raise WidthError(
            "Importances must be finite and non-negative. Use magnitudes (|gamma|, norms), and check that the weights "
            f"are finite. Wrong in the groups {wrong[:5]}."
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
        # f' = e^-|v| / (1 + e^-|v|)^2. For large beta2 all of them may underflow while their ratios do not. So divide
        # by the largest in the exponent; the weights then tend to those of the channels at the threshold.
        distance = v.abs()
        nearest = distance.amin(1, keepdim=True)
        decay = torch.exp((nearest - distance).clamp_(min=-300.0))  # denormal numbers are slow
        weights = decay / (1.0 + decay * torch.exp(-nearest)).square_()
        grad = counts * (grads[0].to(torch.float64) * weights).sum(1) / weights.sum(1)
        return grad.to(ctx.dtype), None, None, None
