"""Least squares from streamed moments, with a penalty on the distance from the weights as they were cut."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["Moments", "best_fit", "solve"]

# Times the mean variance of an input; the best on held-out images is taken.
_RIDGES = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1)


class Moments:
    """First and second moments of inputs X (n, G, d) and targets Y (n, G, o), about a fixed point near the mean."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x0, self.y0 = x.double().mean(0), y.double().mean(0)
        groups, d = self.x0.shape
        self.n = 0
        self.x, self.y = torch.zeros_like(self.x0), torch.zeros_like(self.y0)
        self.xx, self.xy = (self.x0.new_zeros(groups, d, n) for n in (d, self.y0.shape[1]))
        self.yy = torch.zeros_like(self.y0)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add samples."""
        x, y = (x - self.x0.to(x.dtype)).movedim(1, 0), (y - self.y0.to(y.dtype)).movedim(1, 0)
        self.n += x.shape[1]
        self.x += x.sum(1)
        self.y += y.sum(1)
        self.xx += x.mT @ x
        self.xy += x.mT @ y
        self.yy += y.square().sum(1)

    def joined(self, other: Moments) -> Moments:
        """Return the moments of all samples; both are about the same point."""
        both = object.__new__(Moments)
        both.x0, both.y0, both.n = self.x0, self.y0, self.n + other.n
        for name in ("x", "y", "xx", "xy", "yy"):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        return both

    def about(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean products XX (G, d, d), XY (G, d, o) and YY (G, o) of deviations from points near the mean."""
        n = self.n
        dx, dy, mx, my = x - self.x0, y - self.y0, self.x / n, self.y / n
        outer = torch.einsum
        xx, xy = self.xx / n, self.xy / n  # (d, d) takes 170 MB for 3 x 3 filters of 512 channels: one at a time
        for a, b, sign in ((mx, dx, -1), (dx, mx, -1), (dx, dx, 1)):
            xx.add_(outer("gi,gj->gij", a, b), alpha=sign)
        for a, b, sign in ((mx, dy, -1), (dx, my, -1), (dx, dy, 1)):
            xy.add_(outer("gi,gj->gij", a, b), alpha=sign)
        yy = self.yy / n - 2 * my * dy + dy.square()
        return xx, xy, yy

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Means of X (G, d) and of Y (G, o)."""
        return self.x0 + self.x / self.n, self.y0 + self.y / self.n


def best_fit(train: Moments, test: Moments | None, start: Tensor, centred: bool) -> tuple[Tensor, float, float, float]:
    """Return the weights and the ridge with the least error on held-out samples, and the errors before and after."""
    judge = train if test is None else test
    mean_x, mean_y = train.means
    if not centred:
        mean_x, mean_y = torch.zeros_like(mean_x), torch.zeros_like(mean_y)
    xx, xy, yy = judge.about(mean_x, mean_y)
    total = float(yy.sum().clamp_min(1e-30))

    def error(w: Tensor) -> float:
        fitted = torch.einsum("goi,gij,goj->", w, xx, w)
        return float(yy.sum() - 2 * torch.einsum("god,gdo->", w, xy) + fitted) / total

    before = error(start)
    best = (start, math.inf, before)
    ridges = _RIDGES if test is not None else _RIDGES[1:2]
    for ridge in ridges:
        w = solve(train, start, ridge, centred)
        found = error(w)
        if found < best[2]:
            best = (w, ridge, found)
    return best[0], best[1], max(before, 0.0), max(best[2], 0.0)


def solve(moments: Moments, start: Tensor, ridge: float, centred: bool) -> Tensor:
    """Return the weights (G, o, d) that minimise the error with a penalty on the distance from ``start``."""
    mean_x, mean_y = moments.means
    if not centred:
        mean_x, mean_y = torch.zeros_like(mean_x), torch.zeros_like(mean_y)
    xx, xy, _ = moments.about(mean_x, mean_y)
    rest = xy - xx @ start.mT
    diagonal = xx.diagonal(dim1=-2, dim2=-1)
    diagonal += ridge * diagonal.mean(-1, keepdim=True).clamp_min(1e-30)
    return start + torch.linalg.solve(xx, rest).mT
