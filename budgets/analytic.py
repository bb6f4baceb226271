"""Costs that are counted, not measured: FLOPs, parameters, peak activation memory. Exact, from the channel groups.

A convolution with C_out x C_in weights of k x k on an oh x ow output costs 2 k k oh ow C_out C_in. Both channel counts
are affine in the keep ratios, so it adds to A where both sides belong to groups, to B where one side is fixed (image
input, logits) or the convolution is depthwise, and to c where both are fixed:

    F(alpha) = alpha' A alpha + B' alpha + c

With alpha = widths / sizes the coefficients over *widths* are integers, so ``predict`` is exact to the last FLOP.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike

from budgets.quadratic import Quadratic
from dsa_hw.channels import ChannelGroups
from dsa_hw.channels.counts import Term
from dsa_hw.errors import BudgetError, WidthError
from dsa_hw.utils.arrays import Floats, Ints

__all__ = ["AnalyticCost", "PeakCost", "activation_memory", "flops", "params", "quadratics"]


def flops(groups: ChannelGroups, convention: str = "counted") -> AnalyticCost:
    """FLOPs of one forward pass on the example input.

    ``convention="counted"`` is that of ``torch.utils.flop_counter``: 2 per multiply-add of convolutions, linear layers
    and matrix products (attention by its two products). ``"paper"`` is that of DSA's tables: 2 per multiply-add,
    convolutions only.
    """
    if convention not in ("counted", "paper"):
        raise BudgetError(f"FLOPs convention {convention!r} is unknown: choose 'counted' or 'paper'")
    terms = [t for o in groups.operations if convention == "counted" or o.kind.startswith("conv") for t in o.flops]
    return AnalyticCost("flops", "FLOP", groups.names, groups.sizes, *quadratics(terms, groups.sizes))


def params(groups: ChannelGroups) -> AnalyticCost:
    """Number of parameters; tied weights count once, buffers do not."""
    return AnalyticCost("params", "1", groups.names, groups.sizes, *quadratics(groups.counted.parameters, groups.sizes))


def activation_memory(groups: ChannelGroups) -> PeakCost:
    """Peak bytes of live activations, if each is freed after its last use and views and in-place operations cost
    nothing.

    The network's inputs count while they are needed, its own weights do not. One affine form per step of the
    execution; the peak is their maximum, and its gradient is that of the step that attains it.
    """
    live, storage = groups.counted.liveness
    steps = np.zeros((len(live), len(groups) + 1))
    rows = np.array([[t.scale * t.factors[0].constant, *(t.scale * t.factors[0].coefficients)] for t in storage])
    for step, alive in enumerate(live):
        steps[step] = rows[list(alive)].sum(0)
    return PeakCost("activation_memory", "byte", groups.names, groups.sizes, _undominated(steps))


def quadratics(terms: Iterable[Term], sizes: Ints) -> tuple[Quadratic, Quadratic]:
    """The sum of ``terms`` over keep ratios, and the same over widths, whose coefficients are integers."""
    k = len(sizes)
    A, B, c = np.zeros((k, k)), np.zeros(k), 0.0  # noqa: N806
    for term in terms:
        match term.factors:
            case ():
                c += term.scale
            case (count,):
                B += term.scale * count.coefficients  # noqa: N806
                c += term.scale * count.constant
            case (left, right):
                outer = np.outer(left.coefficients, right.coefficients)
                A += term.scale * (outer + outer.T)  # noqa: N806  (twice the symmetric part: whole numbers stay exact)
                B += term.scale * (left.constant * right.coefficients + right.constant * left.coefficients)  # noqa: N806
                c += term.scale * left.constant * right.constant
    per_width = Quadratic(A / 2 / np.outer(sizes, sizes), B / sizes, c)
    return Quadratic(A / 2, B, c), per_width


def _undominated(steps: Floats) -> Floats:
    """Rows that can be the maximum for some alpha >= 0: those not below another one in every entry."""
    steps = np.unique(steps, axis=0)
    keep = [
        i for i, row in enumerate(steps) if not any((row <= other).all() for j, other in enumerate(steps) if j != i)
    ]
    return steps[keep]


@dataclass(frozen=True, eq=False)
class _Counted:
    """What all analytic costs share: the groups they speak of, and tables in and out."""

    name: str
    unit: str
    names: tuple[str, ...]
    sizes: Ints

    def predict(self, configurations: pd.DataFrame) -> pd.Series:
        """Exact cost of each configuration; columns are group names, values integer widths."""
        missing = [name for name in self.names if name not in configurations.columns]
        if missing:
            raise WidthError(
                f"the table has no column {missing[0]!r}: it needs one for each of the {len(self.names)} channel groups"
            )
        widths = configurations.loc[:, list(self.names)].to_numpy(np.float64)
        return pd.Series(self._at_widths(widths), index=configurations.index, name=self.name)

    def upper(self, alpha: ArrayLike, confidence: float = 0.9) -> Floats:
        """The value itself: it is counted, so it is its own bound at any confidence."""
        return self(alpha)

    @property
    def dense(self) -> float:
        """Cost of the whole network."""
        return float(self._at_widths(self.sizes.astype(np.float64)[None])[0])

    def __call__(self, alpha: ArrayLike) -> Floats:
        """Value at keep ratios (..., K), shape (...)."""
        raise NotImplementedError

    def _at_widths(self, widths: Floats) -> Floats:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class AnalyticCost(_Counted):
    """F(alpha) = alpha' A alpha + B' alpha + c."""

    quadratic: Quadratic = field(repr=False)
    _per_width: Quadratic = field(repr=False)

    def __call__(self, alpha: ArrayLike) -> Floats:
        """Value at keep ratios (..., K), shape (...)."""
        return self.quadratic(alpha)

    def value(self, alpha: torch.Tensor) -> torch.Tensor:
        """Differentiable value at keep ratios (..., K), shape (...)."""
        return self.quadratic.value(alpha)

    def gradient(self, alpha: ArrayLike) -> Floats:
        """dF/dalpha = 2 A alpha + B at keep ratios (..., K), shape (..., K)."""
        return self.quadratic.gradient(alpha)

    def _at_widths(self, widths: Floats) -> Floats:
        return np.rint(self._per_width(widths))


@dataclass(frozen=True, eq=False)
class PeakCost(_Counted):
    """F(alpha) = max over steps of (s_0 + s' alpha); ``steps`` is (T, 1 + K)."""

    steps: Floats = field(repr=False)

    def __call__(self, alpha: ArrayLike) -> Floats:
        """Value at keep ratios (..., K), shape (...)."""
        return self._all(alpha).max(-1)

    def value(self, alpha: torch.Tensor) -> torch.Tensor:
        """Differentiable value at keep ratios (..., K), shape (...); the gradient is that of one maximal step."""
        steps = torch.as_tensor(self.steps, dtype=alpha.dtype, device=alpha.device)
        return (steps[:, 0] + alpha @ steps[:, 1:].T).max(-1).values

    def gradient(self, alpha: ArrayLike) -> Floats:
        """Gradient of the step that attains the peak (the first of equals), shape (..., K)."""
        return self.steps[self._all(alpha).argmax(-1), 1:]

    def _all(self, alpha: ArrayLike) -> Floats:
        return self.steps[:, 0] + np.asarray(alpha, np.float64) @ self.steps[:, 1:].T

    def _at_widths(self, widths: Floats) -> Floats:
        return np.rint((self.steps[:, 0] + widths @ (self.steps[:, 1:] / self.sizes).T).max(-1))
