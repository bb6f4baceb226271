"""Choice of an estimator: cross-validation of all candidates on the same folds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.model_selection import RepeatedKFold

from budgets.blocks import Blocks
from budgets.conformal import fit_rows
from budgets.features import FeatureMap
from budgets.kernels import kernel_shapes
from budgets.regression import (
    BilinearRidge,
    CostRegressor,
    FastestKernel,
    GPResidual,
    MonotoneBoosting,
    PerOperationAdditive,
    PhysicsNNLS,
    TopologyQuadratic,
)
from budgets.work_classes import Groups, physics_features, unit_channels
from dsa_hw.errors import ProfileError
from dsa_hw.utils.arrays import Floats

__all__ = ["DEFAULT", "CandidateComparison", "candidates", "compare_candidates"]

#: The candidate that is chosen unless another one is clearly better.
DEFAULT: Final = "physics"
# Channels that vector units work on at a time: 8 floats with AVX2 and NEON pairs, 16 with AVX-512, 32 on GPUs and NPUs.
_BLOCKS: Final = (8, 16, 32)


def candidates(
    groups: Groups | None = None, outside: str = "extrapolate", gpu: bool = False
) -> dict[str, CostRegressor]:
    """Return the estimators that ``budgets.fit`` compares, by name.

    "flops" (a constant and multiply-adds) is the cost that FLOPs budgets assume.

    Args:
        groups: Channel groups; without them the estimators do not know which groups meet in which operation.
        outside: Beyond the profiled range: "extrapolate", "clip" or "refuse".
        gpu: Whether the target is a GPU, whose library picks an algorithm for each operation.
    """
    coarse: FeatureMap | None = None
    classes: FeatureMap | None = None
    operations: FeatureMap | None = None
    if groups is not None:
        coarse, classes, operations = (
            physics_features(groups, granularity) for granularity in ("coarse", "classes", "operations")
        )
    found: dict[str, CostRegressor] = {DEFAULT: PhysicsNNLS(classes, outside=outside)}
    if coarse is not None:
        found["physics, coarse"] = PhysicsNNLS(coarse, outside=outside)
        found["flops"] = PhysicsNNLS(_only(coarse, ("constant", "work")), outside=outside)
        found["per operation"] = PerOperationAdditive(operations, outside=outside)
    if groups is not None:
        columns = physics_features(groups, blocks=True)
        sizes, channels = tuple(groups.sizes.tolist()), unit_channels(groups)
        for block, narrow in product(_BLOCKS, (False, True)):
            name = f"physics, blocks of {block}" + (", narrow inputs" if narrow else "")
            found[name] = PhysicsNNLS(columns, blocks=Blocks(block, sizes, channels, narrow), outside=outside)
    if groups is not None and gpu:
        shapes, covered = kernel_shapes(groups)
        rest = physics_features(groups, without=covered)
        found["fastest kernel"] = FastestKernel(rest, shapes=shapes, outside=outside)
    found["topology quadratic"] = TopologyQuadratic(classes, outside=outside)
    found["bilinear ridge"] = BilinearRidge(classes, outside=outside)
    found["physics + gp"] = GPResidual(classes, outside=outside)
    found["monotone boosting"] = MonotoneBoosting(classes, outside=outside)
    return found


@dataclass(frozen=True, eq=False)
class CandidateComparison:
    """Cross-validated errors of the candidates.

    Attributes:
        table: A row for each candidate.
        chosen: The candidate to use.
        why: The reason, in words.
        residuals: Candidate -> signed relative error of each configuration, (n,).
        errors: Candidate -> absolute relative error of each configuration, (n,).
    """

    table: pd.DataFrame
    chosen: str
    why: str
    residuals: Mapping[str, Floats]
    errors: Mapping[str, Floats]

    def without(self, rows: NDArray[np.intp]) -> str:
        """Return the candidate that is chosen without the errors of ``rows``."""
        return _choose({name: np.delete(error, rows) for name, error in self.errors.items()})[0]


def compare_candidates(
    contenders: Mapping[str, CostRegressor],
    alpha: Floats,
    y: Floats,
    *,
    anchor: tuple[Floats, Floats] | None = None,
    weights: Floats | None = None,
    folds: int = 5,
    repeats: int = 2,
    seed: int = 0,
) -> CandidateComparison:
    """Compare candidates by repeated k-fold cross-validation.

    The first one is chosen unless another has a lower mean absolute percentage error by more than one standard error
    of the paired difference (over configurations) and by more than a twentieth of its error; among those, the one with
    the lowest error is chosen. Of several candidates and a few dozen configurations the lowest error is otherwise often
    low by chance.

    Args:
        contenders: Estimators by name, the default first.
        alpha: (n, K) keep ratios.
        y: (n,) costs.
        anchor: Keep ratios and costs that are part of every fit and never tested on.
        weights: Weights of the n rows and then of the anchor's rows in the fits; equal by default. Errors of all rows
            count alike in the comparison.
        folds: Of the cross-validation.
        repeats: Of the cross-validation.
        seed: Of the folds.

    Raises:
        ProfileError: There are no candidates.
    """
    if not contenders:
        raise ProfileError("No candidates to compare. Leave candidates= out to compare all.")
    splits = list(RepeatedKFold(n_splits=min(folds, len(y)), n_repeats=repeats, random_state=seed).split(alpha))
    errors: dict[str, Floats] = {}
    residuals: dict[str, Floats] = {}
    rows = []
    for name, estimator in contenders.items():
        started = time.perf_counter()
        summed, signed = np.zeros(len(y)), np.zeros(len(y))
        for kept, left in splits:
            model = fit_rows(estimator, alpha, y, kept, anchor, weights)
            relative = model.predict(alpha[left]) / y[left] - 1
            summed[left] += np.abs(relative)
            signed[left] += relative
        errors[name], residuals[name] = summed / repeats, signed / repeats
        rows.append(
            {
                "candidate": name,
                "mape": float(errors[name].mean()),
                "se": float(errors[name].std(ddof=1) / np.sqrt(len(y))),
                "worst": float(errors[name].max()),
                "within_5": float((errors[name] <= 0.05).mean()),
                "within_10": float((errors[name] <= 0.10).mean()),
                "monotone": estimator.monotone,
                "seconds": time.perf_counter() - started,
            }
        )
    table = pd.DataFrame(rows).set_index("candidate")
    chosen, why = _choose(errors)
    table["chosen"] = table.index == chosen
    return CandidateComparison(table, chosen, why, residuals, errors)


def _choose(errors: Mapping[str, Floats]) -> tuple[str, str]:
    first = next(iter(errors))
    better = []
    for name, error in errors.items():
        difference = errors[first] - error
        margin = max(difference.std(ddof=1) / np.sqrt(len(difference)), 0.05 * errors[first].mean())
        if difference.mean() > margin:
            better.append(name)
    if not better:
        lowest = min(errors, key=lambda name: float(errors[name].mean()))
        detail = "it has the lowest error" if lowest == first else f"no other is clearly better (lowest: {lowest})"
        return first, f"{first}: {detail}"
    winner = min(better, key=lambda name: float(errors[name].mean()))
    gain = float((errors[first] - errors[winner]).mean())
    return (
        winner,
        f"{winner}: its error is {100 * gain:.2f} percentage points below that of {first}, more than by chance",
    )


def _only(phi: FeatureMap, names: tuple[str, ...]) -> FeatureMap:
    """Return the part of a feature map with these names."""
    index = [phi.names.index(name) for name in names if name in phi.names]
    terms = np.flatnonzero(np.isin(phi.owner, index))
    order = {old: new for new, old in enumerate(index)}
    terms = terms[np.argsort([order[int(phi.owner[t])] for t in terms], kind="stable")]
    return FeatureMap(
        names=tuple(phi.names[j] for j in index),
        classes=tuple(phi.classes[j] for j in index),
        dense=phi.dense[index],
        owner=np.array([order[int(phi.owner[t])] for t in terms], np.intp),
        left0=phi.left0[terms],
        left=phi.left[terms],
        right0=phi.right0[terms],
        right=phi.right[terms],
    )
