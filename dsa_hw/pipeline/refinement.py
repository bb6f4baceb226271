"""Measure and correct: from keep ratios to widths that use a budget up on the device, in a few measurements.

A cost model learnt from a few dozen configurations is some per cent off at any one of them; a promise needs less. So
the network is measured, the model is corrected by all that was measured so far, and the same keep ratios are projected
to the budget again and rounded again. No training is repeated.

The correction moves the limit and not the direction: F stays as it is, and the keep ratios are projected to the limit
at which the *corrected* cost of the rounded network is right (`dsa_hw.pipeline.width_search`). To project on the
corrected cost would
be unkind: next to a network that was found too slow every other one looks faster, whichever group is changed.

What is corrected: F(alpha) exp(g(alpha)), where g is a Gaussian process fitted to log(measured / F). Its kernel says
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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_hw.errors import InfeasibleBudgetError
from dsa_hw.methods.costs import Cost, CostSet, Valued
from dsa_hw.pipeline.certificate import CANNOT_TELL, MET, Reading, limit_of, reference_of, verdict_of
from dsa_hw.pipeline.constraints import Line
from dsa_hw.pipeline.width_search import Way

__all__ = ["Corrected", "Round", "Settings", "settle"]

_log = logging.getLogger(__name__)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Settings:
    """``most`` device measurements; at least ``use`` of the budget.

    ``first`` is the margin below the limit before any interval is known; ``extra`` what is added to the widest
    interval seen; ``widest`` the largest margin. ``constant``, ``slope``, ``local``, ``length``: see the module.
    """

    most: int = 6
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
        """Corrected cost (...) at keep ratios (..., K), without a gradient: see above why none is wanted."""
        with torch.no_grad():
            base = self._cost.value(alpha)
            logs = np.log(np.maximum(np.asarray(base, np.float64), 1e-300) / self._scale)
            shift = self._kernel(np.asarray(alpha, np.float64), logs) @ self._weights
            return base * torch.as_tensor(np.exp(shift)).to(base)


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
    rounds: list[Round] = []
    seen: Counter[tuple[int, ...]] = Counter()
    costs: list[Valued] = [line.cost for line in lines]
    way = Way(alpha, sizes, [line.cost for line in lines], grid, minimum)
    limits = np.array([line.limit for line in lines])
    exact = np.array([line.gauge.exact for line in lines])
    while len(rounds) < rules.most:
        margins = _margins(rounds, exact, rules)
        aims = CostSet(costs, sizes, limits * (1 - margins), [line.budget for line in lines])
        try:
            widths = way.approach(aims, enough=1 - (1 - rules.use) / 3)
        except InfeasibleBudgetError:
            if not rounds:
                raise
            widths = way.least  # the corrected model says that not even this is enough; measured once, to be sure
        # The same network again is worth it once, where the first look at it could not be trusted.
        doubtful = rounds and any(reading.doubt for reading in rounds[-1].readings)
        if seen[tuple(widths.tolist())] >= (2 if doubtful else 1):
            best = max(rounds, key=lambda r: r.rank)
            window = min(rules.use / (1 - margins.max()), 1.0), 1.0
            other = way.beside(best.widths, aims, window, seen) if best.verdict == MET else None
            if other is None:
                break
            widths = other
        seen[tuple(widths.tolist())] += 1
        predicted = aims.at_widths(widths)
        readings, dense = measure(widths)
        rounds.append(_judge(lines, widths, predicted, readings, dense))
        if listener is not None:
            listener(rounds[-1], len(rounds))
        if rounds[-1].verdict == MET and rounds[-1].utilisation >= rules.use:
            break
        limits = np.array([_limit(lines, rounds, j) for j in range(len(lines))])
        costs = [_corrected(lines[j], rounds, sizes, j, rules) for j in range(len(lines))]
    return rounds


def _judge(
    lines: Sequence[Line], widths: Ints, predicted: Floats, readings: Sequence[Reading], dense: Sequence[Reading]
) -> Round:
    limits, verdicts, used, most = [], [], [], []
    for line, reading, whole in zip(lines, readings, dense, strict=True):
        limit = limit_of(line.budget, whole.value)
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


def _corrected(line: Line, rounds: Sequence[Round], sizes: Ints, j: int, rules: Settings) -> Valued:
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
    predicted = CostSet([line.cost], sizes).at_widths(np.rint(array * sizes).astype(np.int64))[:, 0]
    return Corrected(line.cost, array, np.log(np.array(values) / predicted), np.array(noise), rules)
