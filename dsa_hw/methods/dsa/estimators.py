"""Estimators of the gradient of an expected loss by the keep probabilities, through sampled masks.

An estimator draws masks m with E[m] = p and turns the losses of the masks into an estimate of dE[L]/dp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_hw.errors import DsaError
from dsa_hw.methods.dsa.threshold import EDGE
from dsa_hw.utils.text import unknown_name

__all__ = ["MASKS", "MaskSample", "sample_masks"]


@dataclass(frozen=True, eq=False)
class MaskSample:
    """Masks (N, K, C_max) for N forward passes, and how their losses give dE[L]/dp."""

    masks: Tensor
    _surrogate: Callable[[Tensor], Tensor]

    def surrogate(self, losses: Tensor) -> Tensor:
        """Return the mean of ``losses`` (N,) as a scalar whose backward pass leaves the estimate of dE[L]/dp in p.

        Raises:
            DsaError: There is not one loss per mask.
        """
        if losses.shape != self.masks.shape[:1]:
            raise DsaError(
                f"{self.masks.shape[0]} masks need {self.masks.shape[0]} losses; got a tensor of shape "
                f"{tuple(losses.shape)}."
            )
        return self._surrogate(losses)


@dataclass(frozen=True)
class _Draw:
    """What `sample_masks` was asked for; an estimator uses what it needs."""

    count: int
    temperature: float
    generator: torch.Generator | None
    dtype: torch.dtype

    def uniform(self, p: Tensor, count: int) -> Tensor:
        # 24 bits are enough to compare with p, and float32 takes half the time.
        return torch.rand((count, *p.shape), dtype=torch.float32, device=p.device, generator=self.generator)

    def pairs(self, p: Tensor) -> tuple[Tensor, Tensor]:
        u, keep = self.uniform(p, self.count // 2), p.detach()
        return u < keep, u >= 1.0 - keep  # P(1 - u <= p) = p as well; with >=, p = 0 stays 0 because u < 1

    def straight_through(self, hard: Tensor, p: Tensor) -> MaskSample:
        low = p.to(self.dtype)
        # The difference is exactly 0 and has gradient 1.
        return _pathwise(hard.to(self.dtype) + (low - low.detach()))


_Estimator = Callable[[Tensor, _Draw], MaskSample]
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
    """Draw masks for keep probabilities.

    Args:
        p: Keep probabilities (K, C_max).
        method: Name of the estimator.

            - ``soft``: the mean field m = p. No variance; exact for a loss that is multilinear in the masks. One mask.
              The gradient vanishes if the p of a group are nearly equal and a batch norm with batch statistics follows.
            - ``straight_through``: Bernoulli masks with dL/dp := dL/dm. Exact in expectation for a multilinear loss.
            - ``antithetic``: the same with masks in pairs from u and 1 - u; ``count`` must be even.
            - ``relaxed``: binary concrete masks. Exact for the relaxed loss, which differs from the loss.
            - ``disarm``: Bernoulli pairs. Unbiased for every loss, and needs no dL/dm; ``count`` must be even.
        count: Number of masks.
        temperature: Temperature of relaxed masks.
        generator: Source of random numbers.
        dtype: Type of the masks.

    Returns:
        The masks, and the surrogate loss that carries the gradient.

    Raises:
        DsaError: The estimator is unknown, does not take ``count`` masks, or the temperature is not positive.
    """
    if method not in MASKS:
        raise DsaError(unknown_name("mask estimator", method, MASKS))
    if count < 1 or (method in ("antithetic", "disarm") and count % 2) or (method == "soft" and count != 1):
        need = {"soft": "1", "antithetic": "even", "disarm": "even"}.get(method, "at least 1")
        raise DsaError(f"The number of masks of {method!r} must be {need}; got {count}.")
    if not temperature > 0.0:
        raise DsaError(f"The temperature of relaxed masks must be positive; got {temperature}.")
    return MASKS[method](p, _Draw(count, temperature, generator, dtype))


def _pathwise(masks: Tensor) -> MaskSample:
    return MaskSample(masks, lambda losses: losses.mean())


@_register("soft")
def _soft(p: Tensor, draw: _Draw) -> MaskSample:
    return _pathwise(p.to(draw.dtype)[None])


@_register("straight_through")
def _straight_through(p: Tensor, draw: _Draw) -> MaskSample:
    return draw.straight_through(draw.uniform(p, draw.count) < p.detach(), p)


@_register("antithetic")
def _antithetic(p: Tensor, draw: _Draw) -> MaskSample:
    return draw.straight_through(torch.cat(draw.pairs(p)), p)


@_register("relaxed")
def _relaxed(p: Tensor, draw: _Draw) -> MaskSample:
    # u must lie in the open interval, but float32 rand can be exactly 0.
    noise = torch.logit(draw.uniform(p, draw.count).to(torch.float64), eps=2.0**-26)
    masks = torch.sigmoid((torch.logit(p, eps=EDGE) + noise) / draw.temperature)
    return _pathwise((masks * (p.detach() > 0.0)).to(draw.dtype))  # padding stays exactly 0


@_register("disarm")
def _disarm(p: Tensor, draw: _Draw) -> MaskSample:
    """Estimate by antithetic pairs m, m~ with the shared uniform integrated out (Dong, Mnih, Tucker 2020).

    dE[L]/dlogit_i = (1/2) (L(m) - L(m~)) (-1)^{m~_i} [m_i != m~_i] sigmoid(|logit_i|), and
    sigmoid(|logit|) / (p (1 - p)) = 1 / min(p, 1 - p), which is finite wherever m != m~ can happen.
    """
    first, second = draw.pairs(p)
    half, keep = draw.count // 2, p.detach()
    differ = first != second
    sign = torch.where(second, -1.0, 1.0).to(torch.float64)
    rarer = torch.minimum(keep, 1.0 - keep)
    score = torch.where(differ, 0.5 * sign / rarer.clamp(min=torch.finfo(torch.float64).tiny), 0.0)

    def surrogate(losses: Tensor) -> Tensor:
        values = losses.detach().to(torch.float64)
        gap = values[:half] - values[half:]
        coefficient = torch.einsum("n,nkc->kc", gap, score) / half
        # losses.mean() keeps the gradient to whatever else (weights) the losses depend on.
        return losses.mean() + ((p - keep) * coefficient).sum().to(losses.dtype)

    return MaskSample(torch.cat((first, second)).to(draw.dtype), surrogate)
