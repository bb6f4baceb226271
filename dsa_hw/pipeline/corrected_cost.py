"""A cost model corrected by the networks that were measured."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dsa_hw.methods.costs import Cost
from dsa_hw.pipeline.options import RefinementOptions
from dsa_hw.utils.arrays import Floats

__all__ = ["CorrectedCost"]


class CorrectedCost:
    """A cost F(alpha) exp(g(alpha)), with a Gaussian process g fitted to log(measured / F).

    The kernel states the prior belief about the error of F:

        k(a, b) = constant^2 + slope^2 log(F(a)/F(1)) log(F(b)/F(1)) + local^2 exp(-|a - b|^2 / (2 K length^2))

    The three terms are a common factor (the machine is faster today), an error that grows with the size of the
    network, and an error that only similar networks share. With one measurement the correction is close to scaling;
    with one measurement above and one below the limit, it is close to a secant step between them.
    """

    def __init__(self, cost: Cost, points: Floats, ratios: Floats, noise: Floats, options: RefinementOptions) -> None:
        """Fit the correction.

        Args:
            cost: The cost F.
            points: Keep ratios (n, K) of the measured networks.
            ratios: log(measured / F) (n,).
            noise: Standard deviations (n,) of ``ratios``.
            options: The constants of the kernel.
        """
        self._cost, self._points, self._options = cost, points, options
        self._scale = self._base(np.ones(points.shape[1]))
        self._logs = np.log(self._base(points) / self._scale)
        gram = self._kernel(points, self._logs)
        self._weights = np.linalg.solve(gram + np.diag(noise**2), ratios)

    def value(self, alpha: Tensor) -> Tensor:
        """Return corrected costs (...) at keep ratios (..., K), without a gradient.

        The width search projects on F itself: near a measured network the local term makes every other configuration
        look cheaper, whichever group changes, so its gradient has no meaning.
        """
        with torch.no_grad():
            base = self._cost.value(alpha)
            logs = np.log(np.maximum(np.asarray(base, np.float64), 1e-300) / self._scale)
            shift = self._kernel(np.asarray(alpha, np.float64), logs) @ self._weights
            return base * torch.as_tensor(np.exp(shift)).to(base)

    def _base(self, alpha: Floats) -> Floats:
        with torch.no_grad():
            return np.asarray(self._cost.value(torch.from_numpy(np.ascontiguousarray(alpha))), np.float64)

    def _kernel(self, alpha: Floats, logs: Floats) -> Floats:
        """Return the kernel between alpha (..., K) and the points, shape (..., n)."""
        o = self._options
        square = ((alpha[..., None, :] - self._points) ** 2).mean(-1)
        near = o.local**2 * np.exp(-square / (2 * o.length**2))
        return np.asarray(o.constant**2 + o.slope**2 * logs[..., None] * self._logs + near)
