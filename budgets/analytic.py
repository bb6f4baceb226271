"""Counted costs: FLOPs, parameters and peak activation memory.

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

__all__ = ["AnalyticCost", "Counted", "PeakCost", "activation_memory", "flops", "params", "quadratics"]


def flops(groups: ChannelGroups, convention: str = "counted") -> AnalyticCost:
    """Return the FLOPs of one forward pass on the example input.

    >>> import torch, dsa_hw
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 1, bias=False), torch.nn.Conv2d(8, 4, 1, bias=False))
    >>> cost = flops(dsa_hw.find_groups(net, (torch.zeros(1, 3, 10, 10),)))
    >>> cost.dense, float(cost([0.5]))
    (11200.0, 5600.0)

    Args:
        groups: Channel groups of the network.
        convention: ``"counted"`` as in ``torch.utils.flop_counter``: 2 per multiply-add of convolutions, linear layers
            and matrix products (attention by its two products). ``"paper"`` as in DSA's tables: 2 per multiply-add,
            convolutions only.

    Raises:
        BudgetError: The convention is unknown.
    """
    if convention not in ("counted", "paper"):
        raise BudgetError(f"Unknown FLOPs convention {convention!r}. Available conventions: counted, paper.")
    terms = [t for o in groups.operations if convention == "counted" or o.kind.startswith("conv") for t in o.flops]
    return AnalyticCost("flops", "FLOP", groups.names, groups.sizes, *quadratics(terms, groups.sizes))


def params(groups: ChannelGroups) -> AnalyticCost:
    """Return the number of parameters; tied weights count once, buffers do not count."""
    return AnalyticCost("params", "1", groups.names, groups.sizes, *quadratics(groups.counted.parameters, groups.sizes))


def activation_memory(groups: ChannelGroups) -> PeakCost:
    """Return the peak bytes of live activations.

    Each activation is freed after its last use; views and in-place operations take no memory. The network's inputs
    count while they are needed, weights do not. There is one affine form per step of the execution; the peak is their
    maximum, and its gradient is that of the step that attains it.
    """
    live, storage = groups.counted.liveness
    steps = np.zeros((len(live), len(groups) + 1))
    rows = np.array([[t.scale * t.factors[0].constant, *(t.scale * t.factors[0].coefficients)] for t in storage])
    for step, alive in enumerate(live):
        steps[step] = rows[list(alive)].sum(0)
    return PeakCost("activation_memory", "byte", groups.names, groups.sizes, _undominated(steps))


def quadratics(terms: Iterable[Term], sizes: Ints) -> tuple[Quadratic, Quadratic]:
    """Return the sum of ``terms`` over keep ratios, and over widths.

    Over widths the coefficients are integers.
    """
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
    """Return the rows that can be the maximum for some alpha >= 0.

    These are the rows that are not below another one in every entry.
    """
    steps = np.unique(steps, axis=0)
    keep = [
        i for i, row in enumerate(steps) if not any((row <= other).all() for j, other in enumerate(steps) if j != i)
    ]
    return steps[keep]


@dataclass(frozen=True, eq=False)
class Counted:
    """Common part of the counted costs."""

    name: str
    unit: str
    names: tuple[str, ...]
    sizes: Ints

    def predict(self, configurations: pd.DataFrame) -> pd.Series:
        """Return the exact cost of configurations, a column of widths per group."""
        missing = [name for name in self.names if name not in configurations.columns]
        if missing:
            raise WidthError(
                f"The table needs a column for each of the {len(self.names)} channel groups; it has no {missing[0]!r}."
            )
        widths = configurations.loc[:, list(self.names)].to_numpy(np.float64)
        return pd.Series(self._at_widths(widths), index=configurations.index, name=self.name)

    def upper(self, alpha: ArrayLike, confidence: float = 0.9) -> Floats:
        """Return the value itself, which is exact at any confidence."""
        return self(alpha)

    @property
    def dense(self) -> float:
        """Cost of the dense network."""
        return float(self._at_widths(self.sizes.astype(np.float64)[None])[0])

    def __call__(self, alpha: ArrayLike) -> Floats:
        """Return the value at keep ratios (..., K), shape (...)."""
        raise NotImplementedError

    def _at_widths(self, widths: Floats) -> Floats:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class AnalyticCost(Counted):
    """Quadratic cost F(alpha) = alpha' A alpha + B' alpha + c."""

    quadratic: Quadratic = field(repr=False)
    _per_width: Quadratic = field(repr=False)

    def __call__(self, alpha: ArrayLike) -> Floats:
        """Return the value at keep ratios (..., K), shape (...)."""
        return self.quadratic(alpha)

    def value(self, alpha: torch.Tensor) -> torch.Tensor:
        """Return the differentiable value at keep ratios (..., K), shape (...)."""
        return self.quadratic.value(alpha)

    def gradient(self, alpha: ArrayLike) -> Floats:
        """Return dF/dalpha = 2 A alpha + B at keep ratios (..., K), shape (..., K)."""
        return self.quadratic.gradient(alpha)

    def _at_widths(self, widths: Floats) -> Floats:
        return np.rint(self._per_width(widths))


@dataclass(frozen=True, eq=False)
class PeakCost(Counted):
    """Maximum of affine forms, F(alpha) = max over steps of (s_0 + s' alpha).

    ``steps`` is (T, 1 + K), the constant first.
    """

    steps: Floats = field(repr=False)

    def __call__(self, alpha: ArrayLike) -> Floats:
        """Return the value at keep ratios (..., K), shape (...)."""
        return self._all(alpha).max(-1)

    def value(self, alpha: torch.Tensor) -> torch.Tensor:
        """Return the differentiable value at keep ratios (..., K), shape (...).

        The gradient is that of one maximal step.
        """
        steps = torch.as_tensor(self.steps, dtype=alpha.dtype, device=alpha.device)
        return (steps[:, 0] + alpha @ steps[:, 1:].T).max(-1).values

    def gradient(self, alpha: ArrayLike) -> Floats:
        """Return the gradient of the first step that attains the peak, (..., K)."""
        return self.steps[self._all(alpha).argmax(-1), 1:]

    def _all(self, alpha: ArrayLike) -> Floats:
        return self.steps[:, 0] + np.asarray(alpha, np.float64) @ self.steps[:, 1:].T

    def _at_widths(self, widths: Floats) -> Floats:
        return np.rint((self.steps[:, 0] + widths @ (self.steps[:, 1:] / self.sizes).T).max(-1))
