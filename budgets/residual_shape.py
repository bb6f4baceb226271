"""Mean and spread of relative residuals as smooth functions of the predicted cost.

A model's error often depends on the size of the network: small networks are predicted less precisely, or those of a
medium size too low. With residuals r_j at predicted log costs u_j, kernel averages (Nadaraya-Watson) describe it:

    k_j(u) = exp(-(u - u_j)^2 / 2 h^2) / sum_l exp(-(u - u_l)^2 / 2 h^2)
    m(u) = sum_j k_j(u) r_j,        s(u) = sum_j k_j(u) |r_j - m(u_j)|

h is Silverman's rule, 0.9 sd(u) n^(-1/5). Outside the range of the u_j both are constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from dsa_hw.utils.arrays import Bools, Floats

__all__ = ["ResidualShape"]

# Far below any error of a model, and far above the rounding errors of one that is exact.
_LEAST: Final = 1e-9


@dataclass(frozen=True, eq=False)
class ResidualShape:
    """Mean and spread of residuals for each of J models.

    Model j uses the residuals that do not belong to it, so that it is described by others.

    Attributes:
        logs: (p,) predicted log costs u.
        residuals: (p,) measured over predicted cost, minus 1.
        owner: (p,) model that a residual belongs to; -1 for none.
        models: Number of models J.
    """

    logs: Floats
    residuals: Floats
    owner: NDArray[np.intp]
    models: int

    def __call__(self, u: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """Return mean, spread and their derivatives at log costs u (..., J), each (..., J)."""
        low, high = self._range
        z = np.clip(u, low, high)
        distance = (z[..., None] - self.logs) / self._width
        exponent = np.where(self._used, -0.5 * distance**2, -np.inf)
        kernel = np.exp(exponent - exponent.max(-1, keepdims=True))
        kernel /= kernel.sum(-1, keepdims=True)
        pull = -distance / self._width
        # dk_j / du = k_j (pull_j - sum_l k_l pull_l), and 0 where u was clipped.
        change = kernel * (pull - (kernel * pull).sum(-1, keepdims=True)) * ((u > low) & (u < high))[..., None]
        mean, spread = kernel @ self.residuals, (kernel * self._deviations).sum(-1) + _LEAST
        return mean, spread, change @ self.residuals, (change * self._deviations).sum(-1)

    def value(self, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and spread at log costs u (..., J), differentiable, each (..., J)."""

        def tensor(array: Floats | Bools) -> torch.Tensor:
            found = torch.as_tensor(array, device=u.device)
            return found if found.dtype == torch.bool else found.to(u.dtype)

        low, high = self._range
        distance = (u.clamp(low, high)[..., None] - tensor(self.logs)) / self._width
        kernel = (-0.5 * distance**2).masked_fill(~tensor(self._used), -torch.inf).softmax(-1)
        return kernel @ tensor(self.residuals), (kernel * tensor(self._deviations)).sum(-1) + _LEAST

    @cached_property
    def _range(self) -> tuple[float, float]:
        return float(self.logs.min()), float(self.logs.max())

    @cached_property
    def _width(self) -> float:
        return max(0.9 * float(self.logs.std()) * len(self.logs) ** -0.2, _LEAST)

    @cached_property
    def _used(self) -> Bools:
        """Which residuals a model uses, (J, p)."""
        return np.asarray(self.owner != np.arange(self.models)[:, None])

    @cached_property
    def _deviations(self) -> Floats:
        """Distance of each residual from the mean that a model sees there, (J, p)."""
        rows = []
        for used in self._used:
            exponent = np.where(used, -0.5 * ((self.logs[:, None] - self.logs) / self._width) ** 2, -np.inf)
            kernel = np.exp(exponent - exponent.max(-1, keepdims=True))
            rows.append(np.abs(self.residuals - kernel @ self.residuals / kernel.sum(-1)))
        return np.array(rows)
