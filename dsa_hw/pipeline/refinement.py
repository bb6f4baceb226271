"""Measure and correct: from keep ratios to a network that uses its budgets, in a few measurements.

A cost model fitted to a few dozen configurations is off by some percent at any one of them. So the candidate is
measured, the model is corrected by all measurements so far (`CorrectedCost`), and the same keep ratios are projected
and rounded again (`WidthSearch`). Nothing is trained again. The correction moves the limit and not the direction: the
keep ratios are projected on the uncorrected F, to the limit at which the corrected cost of the rounded network is
right. Candidates aim below the limit by twice the reach of the interval: once so that the whole interval is below it,
and once so that the interval of another measurement, on another day, is likely to be below it too.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from torch import nn

from dsa_hw.errors import InfeasibleBudgetError
from dsa_hw.methods.costs import CostSet, Valued
from dsa_hw.methods.problem import Problem, Proposal, Realised, realise
from dsa_hw.pipeline.constraints import Constraint
from dsa_hw.pipeline.corrected_cost import CorrectedCost
from dsa_hw.pipeline.meters import DENSE
from dsa_hw.pipeline.options import RefinementOptions
from dsa_hw.pipeline.reading import Judgement, Reading, Verdict, judge, worst_verdict
from dsa_hw.pipeline.width_search import WidthSearch
from dsa_hw.utils.arrays import Bools, Floats, Ints

__all__ = ["Candidate", "Candidates", "Measure", "best_candidate", "candidates_table", "find_network", "refine"]

_log = logging.getLogger(__name__)

_AGAIN = 0.8  # of the reach of the interval, besides the interval itself, below the limit (benchmarks/agreement.py)
_CLOSE = 0.01  # of the budget below the aim is close enough

Measure = Callable[[Ints], tuple[Sequence[Reading], Sequence[Reading]]]
"""Widths (K,) -> J readings of that network, and J of the dense network in the same run."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A network that was measured, judged by J budgets.

    Attributes:
        widths: Widths (K,).
        predicted: Predicted costs (J,).
        readings: J readings of the network.
        dense: J readings of the dense network in the same run.
        judgements: J judgements.
    """

    widths: Ints
    predicted: Floats
    readings: tuple[Reading, ...]
    dense: tuple[Reading, ...]
    judgements: tuple[Judgement, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of the verdicts."""
        return worst_verdict(j.verdict for j in self.judgements)

    @property
    def utilisation(self) -> float:
        """The share that is used of the budget that is used most."""
        return max(j.used for j in self.judgements)

    @property
    def clear(self) -> bool:
        """Whether the budgets are met by so much that another measurement is likely to say so too."""
        return self.verdict == Verdict.MET and all(j.high + _AGAIN * (j.high - j.used) <= 1 for j in self.judgements)

    @property
    def rank(self) -> tuple[int, float]:
        """Larger is better: clearly met, then met, each well used; of those over the budget, the least."""
        met = {Verdict.MET: 2, Verdict.INCONCLUSIVE: 1, Verdict.NOT_MET: 0}[self.verdict] + self.clear
        used = self.utilisation if np.isfinite(self.utilisation) else np.inf
        return met, used if met >= 2 else -used


def best_candidate(candidates: Sequence[Candidate]) -> Candidate:
    """Return the best network that was measured."""
    return max(candidates, key=lambda c: c.rank)


class Candidates:
    """The networks of one proposal by their widths, and their readings beside the dense network."""

    def __init__(
        self, problem: Problem, proposal: Proposal, constraints: Sequence[Constraint], reading_limit: float
    ) -> None:
        """Prepare to measure.

        Args:
            problem: What the proposal solves.
            proposal: Keep ratios, weights and ranking of channels.
            constraints: One for each budget, with the meter that reads its cost.
            reading_limit: Seconds for one measurement.
        """
        self._problem, self._proposal, self._constraints = problem, proposal, constraints
        self._limit = reading_limit
        self._made: dict[tuple[int, ...], Realised] = {}

    def network(self, widths: Ints) -> Realised:
        """Return the network with these widths (K,)."""
        key = tuple(widths.tolist())
        if key not in self._made:
            self._made[key] = realise(self._problem, self._proposal, widths)
        return self._made[key]

    def measure(self, widths: Ints) -> tuple[list[Reading], list[Reading]]:
        """Return the readings for every budget, of this network and of the dense one."""
        small, kept = self.network(widths).model, self.network(widths).kept
        readings, dense = [], []
        for constraint in self._constraints:
            networks: dict[str, nn.Module] = {"pruned": small}
            if not constraint.meter.exact:
                networks = {DENSE: self._problem.model, **networks}
            found = constraint.meter.read(networks, self._limit, kept={"pruned": kept})
            readings.append(found["pruned"])
            dense.append(found.get(DENSE, Reading(constraint.dense, constraint.dense, constraint.dense)))
        return readings, dense


def find_network(
    problem: Problem,
    proposal: Proposal,
    constraints: Sequence[Constraint],
    options: RefinementOptions,
    *,
    reading_limit: float,
    listener: Callable[[str, float], None] | None = None,
) -> tuple[list[Candidate], Realised]:
    """Turn a proposal into the best network that was measured.

    Args:
        problem: What the proposal solves.
        proposal: Keep ratios, weights and ranking of channels.
        constraints: One for each budget.
        options: Of the loop.
        reading_limit: Seconds for the measurement of one network.
        listener: Called before each measurement with a text and the share of measurements that are done.

    Returns:
        All networks that were measured, in order, and the best one.
    """
    candidates = Candidates(problem, proposal, constraints, reading_limit)
    count = 0

    def measure(widths: Ints) -> tuple[list[Reading], list[Reading]]:
        nonlocal count
        if listener is not None:
            listener(f"network {count + 1}", count / options.most)
        count += 1
        return candidates.measure(widths)

    found = refine(constraints, proposal.alpha, problem.costs.sizes, problem.grid, measure, options)
    for number, candidate in enumerate(found, 1):
        _log.info("Measurement %d: %s.", number, _sentence(constraints, candidate))
    return found, candidates.network(best_candidate(found).widths)


def refine(
    constraints: Sequence[Constraint],
    alpha: Floats,
    sizes: Ints,
    grid: Ints | None,
    measure: Measure,
    options: RefinementOptions | None = None,
) -> list[Candidate]:
    """Measure, correct and round again until the budgets are met and well used.

    Args:
        constraints: One for each of J budgets.
        alpha: Keep ratios (K,).
        sizes: Dense widths (K,).
        grid: Step of the widths (K,); None allows every width.
        measure: Measures the network of given widths beside the dense one.
        options: Of the loop.

    Returns:
        Every network that was measured, in order; `best_candidate` chooses.

    Raises:
        InfeasibleBudgetError: The cost models say that not even the narrowest network is within the budgets.
    """
    options = options or RefinementOptions()
    grid = np.ones(len(sizes), np.int64) if grid is None else grid
    found: list[Candidate] = []
    seen: Counter[tuple[int, ...]] = Counter()
    costs: list[Valued] = [c.cost for c in constraints]
    search = WidthSearch(alpha, sizes, [c.cost for c in constraints], grid, options.minimum)
    limits = np.array([c.limit for c in constraints])
    exact = np.array([c.meter.exact for c in constraints])
    while len(found) < options.most:
        margins = _margins(found, exact, options)
        aims = CostSet(costs, sizes, limits * (1 - margins), [c.budget for c in constraints])
        try:
            widths = search.search(aims, enough=1 - (1 - options.use) / 3)
        except InfeasibleBudgetError:
            if not found:
                raise
            widths = search.least  # the corrected model says that not even this is enough: measure it once
        if seen[tuple(widths.tolist())]:
            best = best_candidate(found)
            window = min(options.use / (1 - margins.max()), 1.0), 1.0
            other = search.neighbour(best.widths, aims, window, seen) if best.verdict == Verdict.MET else None
            if other is None:
                break
            widths = other
        seen[tuple(widths.tolist())] += 1
        predicted = aims.at_widths(widths)
        readings, dense = measure(widths)
        judgements = tuple(
            judge(c.budget, reading, whole, exact=c.meter.exact, confidence=options.confidence)
            for c, reading, whole in zip(constraints, readings, dense, strict=True)
        )
        found.append(Candidate(widths, predicted, tuple(readings), tuple(dense), judgements))
        if found[-1].clear and found[-1].utilisation >= min(options.use, 1 - float(margins.max()) - _CLOSE):
            break
        limits = np.array([_limit(constraints, found, j) for j in range(len(constraints))])
        costs = [_corrected(constraints[j], found, sizes, j, options) for j in range(len(constraints))]
    return found


def candidates_table(constraints: Sequence[Constraint], candidates: Sequence[Candidate]) -> pd.DataFrame:
    """Return a row for each measured network and budget."""
    rows = [
        {
            "round": number,
            "asked": str(constraint.budget),
            "limit": judgement.limit,
            "predicted": candidate.predicted[j],
            "measured": candidate.readings[j].value,
            "low": candidate.readings[j].low,
            "high": candidate.readings[j].high,
            "dense": candidate.dense[j].value,
            "utilisation": judgement.used,
            "verdict": str(judgement.verdict),
            "doubt": judgement.doubt,
            "widths": tuple(candidate.widths.tolist()),
        }
        for number, candidate in enumerate(candidates, 1)
        for j, (constraint, judgement) in enumerate(zip(constraints, candidate.judgements, strict=True))
    ]
    return pd.DataFrame(rows)


def _limit(constraints: Sequence[Constraint], found: Sequence[Candidate], j: int) -> float:
    """Return the limit to aim at next; that of a relative budget is a share of the predicted dense cost."""
    if constraints[j].budget.relative:
        return constraints[j].limit
    limits = [c.judgements[j].limit for c in found]
    seen = [limit for limit in limits if np.isfinite(limit) and limit > 0]
    return float(np.exp(np.mean(np.log(seen)))) if seen else constraints[j].limit


def _margins(found: Sequence[Candidate], exact: Bools, options: RefinementOptions) -> Floats:
    """Return how far below the limit to aim (J,): twice the part of the interval above the value, and a little more."""
    margin = np.full(exact.size, options.first)
    if found:
        above = np.array([[j.high / j.used - 1 for j in c.judgements] for c in found])
        above = above[np.isfinite(above).all(-1)]
        if len(above):
            reach = np.median(above, axis=0)
            margin = np.clip((1 + _AGAIN) * reach + options.extra, options.extra, options.widest)
    return np.where(exact, 0.0, margin)


def _corrected(
    constraint: Constraint, found: Sequence[Candidate], sizes: Ints, j: int, options: RefinementOptions
) -> Valued:
    if constraint.meter.exact:
        return constraint.cost
    points, values, noise = [], [], []
    for candidate in found:
        for widths, reading in ((candidate.widths, candidate.readings[j]), (sizes, candidate.dense[j])):
            if reading.usable:
                value, error = _value(constraint, reading, candidate.dense[j])
                points.append(widths / sizes)
                values.append(value)
                noise.append(float(np.clip(error, options.noise, 0.2)))
    if not points:
        return constraint.cost
    array = np.array(points)
    predicted = CostSet([constraint.cost], sizes).at_widths(np.rint(array * sizes).astype(np.int64))[:, 0]
    return CorrectedCost(constraint.cost, array, np.log(np.array(values) / predicted), np.array(noise), options)


def _value(constraint: Constraint, reading: Reading, dense: Reading) -> tuple[float, float]:
    """Return the cost of a network in the unit of the cost model, and the standard deviation of its logarithm.

    For a relative budget it is the measured ratio times the predicted dense cost: how fast the machine is today does
    not matter.
    """
    found = reading.estimate()
    if constraint.budget.relative:
        found = reading.share if reading.share is not None else found.over(dense.estimate())
        return found.value * constraint.dense, math.sqrt(found.variance)
    return reading.value, math.sqrt(found.variance)


def _sentence(constraints: Sequence[Constraint], candidate: Candidate) -> str:
    return "; ".join(
        f"{c.budget.format(reading.value)} for {c.budget} ({judgement.verdict})"
        for c, reading, judgement in zip(constraints, candidate.readings, candidate.judgements, strict=True)
    )
