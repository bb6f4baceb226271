"""Measure and correct: from keep ratios to widths that use a budget up on the device, in a few measurements.

A cost model learnt from a few dozen configurations is some per cent off at any one of them; a promise needs less. So
the network is measured, the model is corrected by all that was measured so far, and the same keep ratios are projected
to the budget again and rounded again. No training is repeated.

The correction: F(alpha) exp(g(alpha)), where g is a Gaussian process fitted to log(measured / F). Its kernel says
what is believed about the error of F before anything is measured:

    k(a, b) = constant^2 + slope^2 log(F(a)/F(1)) log(F(b)/F(1)) + local^2 exp(-|a - b|^2 / (2 K length^2))

a common factor (the machine is faster today), an error that grows with the size of the network, and one that is
shared by similar networks only. With one measurement this is close to scaling (``CostModel.anchored``); with one above
and one below the limit, close to a secant step between them.

Rounding lands just below an *aim* a little under the limit, because a certificate needs the whole interval of the
measurement below it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import logit
from torch import Tensor

from dsa_hw.admm import Admm, Cost
from dsa_hw.certificate import CANNOT_TELL, MET, Reading, limit_of, reference_of, verdict_of
from dsa_hw.costing import Line, predict
from dsa_hw.errors import InfeasibleBudgetError
from dsa_hw.rounding import narrowest, round_widths

__all__ = ["Corrected", "Round", "Settings", "land", "project", "settle"]

_log = logging.getLogger(__name__)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_MANY = 64  # groups: so many round well by themselves, and their pairs are too many to try


@dataclass(frozen=True)
class Settings:
    """``most`` device measurements, ``jumps`` of them free to go anywhere; at least ``use`` of the budget.

    ``first`` is the margin below the limit before any interval is known; ``extra`` what is added to the widest
    interval seen; ``widest`` the largest margin. ``constant``, ``slope``, ``local``, ``length``: see the module.
    """

    most: int = 6
    jumps: int = 3
    use: float = 0.97
    first: float = 0.01
    extra: float = 0.003
    widest: float = 0.05
    constant: float = 0.1
    slope: float = 0.1
    local: float = 0.03
    length: float = 0.1
    noise: float = 0.002


@dataclass(frozen=True, eq=False)
class Round:
    """One network that was measured: J predictions, limits, readings of it and of the dense network, and verdicts."""

    widths: Ints
    predicted: Floats
    limits: Floats
    readings: tuple[Reading, ...]
    dense: tuple[Reading, ...]
    verdicts: tuple[str, ...]
    used: Floats
    most_used: Floats

    @property
    def verdict(self) -> str:
        """The worst of the verdicts."""
        return next((v for v in self.verdicts if v not in (MET, CANNOT_TELL)), None) or (
            CANNOT_TELL if CANNOT_TELL in self.verdicts else MET
        )

    @property
    def utilisation(self) -> float:
        """Of the budget that is used most."""
        return float(self.used.max())

    @property
    def rank(self) -> tuple[int, float]:
        """Larger is better: budgets kept first, then well used; one that is over, the less the better."""
        kept = {MET: 2, CANNOT_TELL: 1}.get(self.verdict, 0)
        used = self.utilisation if np.isfinite(self.utilisation) else np.inf
        return kept, used if kept == 2 else -used


class Corrected:
    """``cost`` times exp(g), g from measured points (n, K) with log ratios (n,) and their uncertainties (n,)."""

    def __init__(self, cost: Cost, points: Floats, ratios: Floats, noise: Floats, settings: Settings) -> None:
        self._cost, self._points, self._settings = cost, points, settings
        self._scale = self._base(np.ones(points.shape[1]))
        self._logs = np.log(self._base(points) / self._scale)
        gram = self._kernel(points, self._logs)
        self._weights = np.linalg.solve(gram + np.diag(noise**2), ratios)

    def _base(self, alpha: Floats) -> Floats:
        with torch.no_grad():
            return np.asarray(self._cost.value(torch.from_numpy(np.ascontiguousarray(alpha))), np.float64)

    def _near(self, alpha: Floats) -> Floats:
        """The local part of the kernel between alpha (..., K) and the points, shape (..., n)."""
        s = self._settings
        square = ((alpha[..., None, :] - self._points) ** 2).mean(-1)
        return np.asarray(s.local**2 * np.exp(-square / (2 * s.length**2)))

    def _kernel(self, alpha: Floats, logs: Floats) -> Floats:
        s = self._settings
        return np.asarray(s.constant**2 + s.slope**2 * logs[..., None] * self._logs + self._near(alpha))

    def value(self, alpha: Tensor) -> Tensor:
        """Corrected cost (...) at keep ratios (..., K); not differentiable: ``gradient`` is in closed form."""
        with torch.no_grad():
            base = self._cost.value(alpha)
            logs = np.log(np.maximum(np.asarray(base, np.float64), 1e-300) / self._scale)
            shift = self._kernel(np.asarray(alpha, np.float64), logs) @ self._weights
            return base * torch.as_tensor(np.exp(shift)).to(base)

    def gradient(self, alpha: Floats) -> Floats:
        """Gradient (..., K): exp(g) (F' + F g'), where g' has F'/F from the slope and the bell's own derivative."""
        x = np.asarray(alpha, np.float64)
        base, slope, s = self._base(x), np.asarray(self._cost.gradient(x), np.float64), self._settings
        logs = np.log(np.maximum(base, 1e-300) / self._scale)
        near = self._near(x)
        factor = np.exp(self._kernel(x, logs) @ self._weights)
        tilt = s.slope**2 * (self._logs @ self._weights)
        pull = self._points - x[..., None, :]
        bell = ((near * self._weights)[..., None] * pull).sum(-2) / (x.shape[-1] * s.length**2)
        return np.asarray(factor[..., None] * (slope * (1 + tilt) + base[..., None] * bell))


Measure = Callable[[Ints], tuple[Sequence[Reading], Sequence[Reading]]]
"""Widths (K,) -> J readings of that network, and J of the dense network in the same run."""


def settle(
    lines: Sequence[Line],
    alpha: Floats,
    sizes: Ints,
    grid: Ints,
    measure: Measure,
    *,
    minimum: float = 0.05,
    settings: Settings | None = None,
    listener: Callable[[Round, int], None] | None = None,
) -> list[Round]:
    """Measure, correct and round again until the budgets are kept and well used; every round, in order.

    The answer is ``max(rounds, key=lambda r: r.rank)``: the best network that was measured, never one that was only
    predicted.
    """
    rules = settings or Settings()
    least = narrowest(sizes, grid, minimum) / sizes
    rounds: list[Round] = []
    seen: dict[tuple[int, ...], int] = {}
    costs: list[Cost] = [line.cost for line in lines]
    limits = np.array([line.limit for line in lines])
    exact = np.array([line.gauge.exact for line in lines])
    while len(rounds) < rules.most:
        margins = _margins(rounds, exact, rules)
        aims = limits * (1 - margins)
        try:
            widths = _near_the_best(rounds, seen, sizes, costs, aims, grid, minimum, 1 - margins.max(), rules)
            if widths is None:
                near = project(alpha, costs, aims, least)
                widths = land(near, sizes, costs, aims, grid, minimum, 1 - (1 - rules.use) / 3)
        except InfeasibleBudgetError:
            if not rounds:
                raise
            break  # the corrected model says that nothing smaller is left; the best measured one is the answer
        key = tuple(widths.tolist())
        # The same network again is worth it once, where the first look at it could not be trusted.
        doubtful = rounds and any(reading.doubt for reading in rounds[-1].readings)
        if seen.get(key, 0) >= (2 if doubtful else 1):
            break
        seen[key] = seen.get(key, 0) + 1
        predicted = predict(costs, widths, sizes)
        readings, dense = measure(widths)
        rounds.append(_judge(lines, widths, predicted, readings, dense))
        if listener is not None:
            listener(rounds[-1], len(rounds))
        if rounds[-1].verdict == MET and rounds[-1].utilisation >= rules.use:
            break
        limits = np.array([_limit(lines, rounds, j) for j in range(len(lines))])
        costs = [_corrected(lines[j], rounds, sizes, j, rules) for j in range(len(lines))]
    return rounds


def project(alpha: Floats, costs: Sequence[Cost], limits: Floats, least: Floats) -> Floats:
    """The keep ratios nearest to ``alpha`` (K,), none below ``least`` (K,), that use the limits up.

    By the projection of the allocation itself.
    """
    admm = Admm(costs, limits.tolist(), alpha.size, pace=1, minimum=least)
    admm.state.z = logit(np.clip(alpha, np.maximum(least, 1e-6), 1 - 1e-6))
    return admm.keep_ratios


def land(
    alpha: Floats, sizes: Ints, costs: Sequence[Cost], aims: Floats, grid: Ints, minimum: float, enough: float
) -> Ints:
    """Widths (K,) near ``alpha`` within ``aims`` that use at least ``enough`` of them, on the grid where possible.

    Where rounding leaves more of the budget unused: first other widths on the grid (one group up, another one down),
    then a finer step for a single group. Off the grid the device is slower than F says; the next measurement tells.
    """
    widths = round_widths(alpha, sizes, costs, aims.tolist(), grid, minimum=minimum)
    best = float(_use(widths, sizes, costs, aims))
    bottom = narrowest(sizes, grid, minimum)
    steps = [grid] if alpha.size <= _MANY else []
    while steps[-1:] and (steps[-1] > 1).any():
        steps.append(np.maximum(steps[-1] // 2, 1))
    for number, step in enumerate(steps):
        if best >= enough or (widths == sizes).all():
            break
        rows = _pairs(widths, sizes, bottom, step) if number == 0 else _singles(widths, sizes, step)
        if len(rows):
            found = _use(rows, sizes, costs, aims)
            pick = int(np.argmax(found))
            if found[pick] > best:
                widths, best = rows[pick], float(found[pick])
    return widths


def _near_the_best(
    rounds: Sequence[Round],
    seen: Mapping[tuple[int, ...], int],
    sizes: Ints,
    costs: Sequence[Cost],
    aims: Floats,
    grid: Ints,
    minimum: float,
    kept: float,
    rules: Settings,
) -> Ints | None:
    """After a few rounds: the best small change of the best network so far, if that one keeps the budgets.

    Rounding again may jump to quite another network, about which the corrected model knows less. ``kept`` is the share
    of the limits that the aims are.
    """
    if len(rounds) < rules.jumps or sizes.size > _MANY:
        return None
    best = max(rounds, key=lambda r: r.rank)
    if best.verdict != MET:
        return None
    bottom = narrowest(sizes, grid, minimum)
    rows = np.vstack([_singles(best.widths, sizes, grid), _pairs(best.widths, sizes, bottom, grid)])
    rows = rows[[tuple(row) not in seen for row in rows.tolist()]]
    if not len(rows):
        return None
    use = _use(rows, sizes, costs, aims)
    # The middle of what would do: an error to either side is then forgiven.
    middle = 0.5 * (min(rules.use / kept, 1.0) + 1.0)
    pick = int(np.argmin(np.abs(use - middle)))
    return np.asarray(rows[pick]) if abs(use[pick] - middle) <= 1.0 - middle + 1e-9 else None


def _use(rows: Ints, sizes: Ints, costs: Sequence[Cost], aims: Floats) -> Floats:
    """How much of the aims configurations (..., K) use; -inf where one is exceeded."""
    share = predict(costs, rows, sizes) / aims
    return np.where((share <= 1).all(-1), share.max(-1), -np.inf)


def _pairs(widths: Ints, sizes: Ints, bottom: Ints, step: Ints) -> Ints:
    """One group up by 1 to 3 steps and another one down by as many at most, all pairs, shape (R, K)."""
    rows = []
    for up in range(widths.size):
        for raised in (1, 2, 3):
            higher = widths[up] + raised * step[up]
            if higher > sizes[up]:
                break
            for down in range(widths.size):
                for lowered in (1, 2, 3):
                    lower = widths[down] - lowered * step[down]
                    if down == up or lower < bottom[down]:
                        break
                    row = widths.copy()
                    row[up], row[down] = higher, lower
                    rows.append(row)
    return np.array(rows, np.int64).reshape(-1, widths.size)


def _singles(widths: Ints, sizes: Ints, step: Ints) -> Ints:
    """Every larger width of one group, by its step up to below the full width, shape (R, K)."""
    rows = []
    for k in range(widths.size):
        for width in range(int(widths[k]) + int(step[k]), int(sizes[k]), int(step[k])):
            row = widths.copy()
            row[k] = width
            rows.append(row)
    return np.array(rows, np.int64).reshape(-1, widths.size)


def _judge(
    lines: Sequence[Line], widths: Ints, predicted: Floats, readings: Sequence[Reading], dense: Sequence[Reading]
) -> Round:
    limits, verdicts, used, most = [], [], [], []
    for line, reading, whole in zip(lines, readings, dense, strict=True):
        limit = limit_of(line.budget, line.limit, whole, line.gauge.exact)
        verdict, share, _, high = verdict_of(reading, limit, reference_of(line.budget, whole, line.gauge.exact))
        limits.append(limit)
        verdicts.append(verdict)
        used.append(share)
        most.append(high)
    return Round(
        widths,
        predicted,
        np.array(limits),
        tuple(readings),
        tuple(dense),
        tuple(verdicts),
        np.array(used),
        np.array(most),
    )


def _limit(lines: Sequence[Line], rounds: Sequence[Round], j: int) -> float:
    """The limit to aim at next: of a relative budget, the mean over the rounds, since each saw the dense network."""
    seen = [r.limits[j] for r in rounds if np.isfinite(r.limits[j]) and r.limits[j] > 0]
    return float(np.exp(np.mean(np.log(seen)))) if seen else lines[j].limit


def _margins(rounds: Sequence[Round], exact: NDArray[np.bool_], rules: Settings) -> Floats:
    """How far below the limit to aim (J,): the half of the interval that lies above the value, and a little more."""
    margin = np.full(exact.size, rules.first)
    if rounds:
        above = np.array([r.most_used / r.used - 1 for r in rounds])
        above = above[np.isfinite(above).all(-1)]
        if len(above):
            margin = np.clip(above.max(0) + rules.extra, rules.extra, rules.widest)
    return np.where(exact, 0.0, margin)


def _corrected(line: Line, rounds: Sequence[Round], sizes: Ints, j: int, rules: Settings) -> Cost:
    if line.gauge.exact:
        return line.cost
    points, values, noise = [], [], []
    for found in rounds:
        for widths, reading in ((found.widths, found.readings[j]), (sizes, found.dense[j])):
            if reading.usable:
                points.append(widths / sizes)
                values.append(reading.value)
                side = np.clip(max(reading.sides()), rules.noise, 0.2)
                noise.append(max(float(side) / 2, rules.noise) * (3 if reading.doubt else 1))
    if not points:
        return line.cost
    array = np.array(points)
    predicted = predict([line.cost], np.rint(array * sizes).astype(np.int64), sizes)[:, 0]
    return Corrected(line.cost, array, np.log(np.array(values) / predicted), np.array(noise), rules)
