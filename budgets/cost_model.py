"""A fitted, calibrated cost with its provenance: what the allocator trusts and a file keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray

from budgets.conformal import Calibration
from budgets.profile_table import QUANTITIES
from budgets.regression import CostRegressor
from dsa_hw.errors import WidthError
from dsa_hw.units import format_magnitude

__all__ = ["CostModel", "Provenance"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Provenance:
    """Where a cost model comes from, and how good it was there."""

    quantity: str
    unit: str
    target: str
    fingerprint: str | None
    grid: Mapping[str, int]
    environment: Mapping[str, Any]
    versions: Mapping[str, str]
    configurations: int
    holdout: int
    dense: float | None
    errors: Mapping[str, float]
    notes: tuple[str, ...] = ()
    # Which time of many runs: "quiet", "median", "p95" ...; None where the profile does not say.
    statistic: str | None = None


@dataclass(frozen=True, eq=False)
class CostModel:
    """Cost of a network on a target as a function of the keep ratios.

    ``value`` (torch, differentiable, batched), ``gradient`` (NumPy, closed form), ``upper`` (calibrated bound) and
    ``predict`` (DataFrame of widths in, Series out). All in ``provenance.unit``. ``report`` has one row for each
    candidate that was compared. ``factor`` scales every answer; see ``anchored``.
    """

    name: str
    estimator: CostRegressor
    calibration: Calibration
    names: tuple[str, ...]
    sizes: NDArray[np.int64]
    provenance: Provenance
    report: pd.DataFrame = field(repr=False)
    why: str = ""
    factor: float = 1.0
    # Measured and cross-validated costs, for the plot and for later audits.
    fitted: pd.DataFrame | None = field(default=None, repr=False)
    flops_shares: Mapping[str, float] | None = field(default=None, repr=False)

    def __call__(self, alpha: ArrayLike) -> Array:
        """Cost at keep ratios (..., K), shape (...), in NumPy."""
        x, rows = self._points(alpha)
        return np.asarray(self.factor * self.estimator.at(rows).reshape(x.shape[:-1]), np.float64)

    def value(self, alpha: torch.Tensor, confidence: float | None = None) -> torch.Tensor:
        """Differentiable cost at keep ratios (..., K), shape (...); with ``confidence``, its calibrated upper bound."""
        raw = self.estimator.value(alpha) if confidence is None else self.calibration.upper_value(alpha, confidence)
        return raw if self.factor == 1.0 else self.factor * raw

    def gradient(self, alpha: ArrayLike, confidence: float | None = None) -> Array:
        """Gradient by alpha at (..., K), shape (..., K), of what ``value`` returns with the same arguments."""
        x, rows = self._points(alpha)
        slope = self.estimator.slope(rows) if confidence is None else self.calibration.upper_gradient(rows, confidence)
        return self.factor * slope.reshape(x.shape)

    def upper(self, alpha: ArrayLike, confidence: float = 0.9) -> Array:
        """Cost not exceeded with ``confidence`` at keep ratios (..., K), shape (...); see ``budgets.conformal``."""
        return self._bound(alpha, confidence, self.calibration.upper)

    def lower(self, alpha: ArrayLike, confidence: float = 0.9) -> Array:
        """Cost that is not undercut with ``confidence`` at keep ratios (..., K), shape (...)."""
        return self._bound(alpha, confidence, self.calibration.lower)

    def _bound(self, alpha: ArrayLike, confidence: float, order: Any) -> Array:
        x, rows = self._points(alpha)
        bound, _ = order(rows, confidence)
        return np.asarray(self.factor * bound.reshape(x.shape[:-1]), np.float64)

    def _points(self, alpha: ArrayLike) -> tuple[Array, Array]:
        """Keep ratios as float64 (..., K) and as rows (n, K)."""
        x = np.asarray(alpha, np.float64)
        if x.ndim == 0 or x.shape[-1] != len(self.names):
            raise WidthError(
                f"keep ratios have shape {x.shape}; the last axis must be the {len(self.names)} channel groups"
            )
        if not np.isfinite(x).all():
            raise WidthError("keep ratios must be finite; NaN or infinity was given")
        return x, x.reshape(-1, len(self.names))

    def predict(self, configurations: pd.DataFrame) -> pd.Series[float]:
        """Cost of configurations: a column of widths for each channel group, one row each."""
        missing = [name for name in self.names if name not in configurations.columns]
        if missing:
            raise WidthError(
                f"configurations lack {len(missing)} of {len(self.names)} channel groups: {', '.join(missing[:5])}; "
                "give a width for each"
            )
        widths = configurations[list(self.names)].to_numpy(np.float64)
        if not np.isfinite(widths).all() or (widths < 1).any() or (widths > self.sizes).any():
            raise WidthError(
                "widths must lie between 1 and the size of their channel group; keep ratios go to value() and "
                "gradient()"
            )
        return pd.Series(
            self.factor * self.estimator.at(widths / self.sizes),
            index=configurations.index,
            name=self.provenance.quantity,
        )

    @property
    def dense(self) -> float:
        """Predicted cost at alpha = 1."""
        return self.factor * float(self.estimator.predict(np.ones((1, len(self.names))))[0])

    def shares(self, alpha: ArrayLike | None = None) -> pd.Series[float]:
        """Share of each channel group in the cost: alpha_k dF/dalpha_k at ``alpha`` (K,) (default 1), summing to 1."""
        point = np.ones(len(self.names)) if alpha is None else np.asarray(alpha, np.float64)
        effect = np.maximum(self.gradient(point) * point, 0.0)
        total = effect.sum()
        return pd.Series(effect / total if total > 0 else effect, index=list(self.names), name=self.provenance.quantity)

    def covers(self, alpha: ArrayLike) -> NDArray[np.bool_]:
        """Whether keep ratios (..., K) lie in the range that was profiled, group by group, shape (...)."""
        x, slack = np.asarray(alpha, np.float64), 1e-6
        return np.asarray(((x >= self.estimator.low_ - slack) & (x <= self.estimator.high_ + slack)).all(-1))

    def anchored(self, alpha: ArrayLike, cost: float) -> CostModel:
        """The same model scaled to pass through a new measurement at ``alpha`` (K,): correct, then allocate again."""
        predicted = self.factor * float(self.estimator.predict(np.asarray(alpha, np.float64)[None])[0])
        if not (np.isfinite(cost) and cost > 0 and predicted > 0):
            raise WidthError(
                f"cannot anchor a prediction of {predicted:g} at a measured cost of {cost:g}: both must be positive"
            )
        return replace(self, factor=self.factor * cost / predicted)

    def save(self, path: str | Path) -> Path:
        """Write JSON (see ``budgets.serialization``); ``budgets.load`` reads it."""
        from budgets.serialization import save

        return save(self, path)

    def plot(self, path: str | Path) -> Path:
        """Draw the four panels of ``budgets.plots``."""
        from budgets.plots import plot

        return plot(self, path)

    def half_width(self, confidence: float = 0.9) -> float:
        """Relative distance of the upper bound from the prediction: the median over the training configurations."""
        if self.fitted is None:
            points = np.ones((1, len(self.names)))
        else:
            points = self.fitted[list(self.names)].to_numpy(np.float64) / self.sizes
        return float(np.median(self.upper(points, confidence) / (self.factor * self.estimator.at(points)) - 1))

    def __repr__(self) -> str:
        """One paragraph: what, where, how good, how sure."""
        p = self.provenance
        dimension = next((row[2] for row in QUANTITIES.values() if row[1] == p.unit), None)
        dense = format_magnitude(self.dense, dimension) if dimension else f"{self.dense:.4g} {p.unit}"
        errors = ", ".join(f"{key.replace('_', ' ')} {100 * value:.1f} %" for key, value in p.errors.items())
        lines = [
            f"{p.quantity} of {len(self.names)} channel groups on {p.target}: {self.name}, dense {dense}",
            f"  fitted to {p.configurations} configurations, {p.holdout} held out; {errors}",
            f"  bound: {self.calibration.method}; chosen because {self.why}",
        ]
        lines += [f"  note: {note}" for note in p.notes]
        return "\n".join(lines)
