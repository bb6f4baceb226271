"""From a profile table to a cost model: compare, refit, calibrate, test on what was held out."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from importlib.metadata import version

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from budgets.conformal import calibrate, fit_rows
from budgets.cost_model import CostModel, Provenance
from budgets.features import Groups, physics_features
from budgets.profile_table import QUANTITIES, Table, read_table
from budgets.regression import CostRegressor
from budgets.selection import Comparison, compare
from budgets.selection import candidates as all_candidates

__all__ = ["fit"]

_log = logging.getLogger(__name__)

Array = NDArray[np.float64]


def fit(
    profile: pd.DataFrame,
    groups: Groups | None = None,
    *,
    candidates: Mapping[str, CostRegressor] | None = None,
    target: str | None = None,
    quantity: str | None = None,
    column: str | None = None,
    calibration: str | None = None,
    outside: str = "extrapolate",
    aligned: bool = True,
    folds: int = 5,
    repeats: int = 2,
    seed: int = 0,
) -> CostModel:
    """Learn a cost from measurements.

    Args:
        profile: one row for each configuration: a column of widths for each channel group, the cost (``seconds`` or
            ``joules``) and ``split`` (``"train"`` and ``"dense"`` are fitted, ``"holdout"`` only tests, ``"grid"`` is
            ignored). ``attrs`` has names, sizes, target, fingerprint, grid and environment, as ``profilers.load``
            returns it. Columns ``operation:NAME`` are per-operation times, where the target reports them.
        groups: the network's channel groups. Without them the estimators do not know which groups meet in which
            operation, and need many more configurations: a warning says so.
        candidates: estimators to compare, by name, the default first (default: ``budgets.selection.candidates``).
        target, quantity, column: where ``profile.attrs`` does not say.
        calibration: ``"jackknife+"`` (default), ``"cv+"`` (default where a slow estimator is chosen, by all
            configurations or by all but one) or ``"split"`` (uses the hold-out rows). In the first two the choice among
            candidates is repeated without the configurations left out (see ``budgets.conformal``).
        outside: what to do outside the profiled range: ``"extrapolate"``, ``"clip"`` or ``"refuse"``.
        aligned: leave configurations off the target's grid out (its steps are not part of a smooth cost).
        folds, repeats, seed: of the cross-validation.

    Returns:
        The chosen model, refitted to all training rows and calibrated, with the table of all candidates in ``report``.
    """
    table = read_table(profile, groups, target=target, quantity=quantity, column=column, aligned=aligned)
    notes = list(table.notes)
    if groups is None and candidates is None:
        notes.append("no channel groups given: topology-free estimators, expect to need many more configurations")
        _log.warning(notes[-1])
    contenders = dict(candidates) if candidates is not None else all_candidates(groups, outside)
    alpha, cost = table.ratios(table.train), table.costs(table.train)
    anchor = (table.ratios(table.anchor), table.costs(table.anchor)) if len(table.anchor) else None
    operations = table.operations
    comparison = compare(
        contenders, alpha, cost, anchor=anchor, operation_seconds=operations, folds=folds, repeats=repeats, seed=seed
    )
    _log.info("chosen: %s", comparison.why)
    template = contenders[comparison.chosen]
    estimator = fit_rows(template, alpha, cost, np.arange(len(cost)), anchor, operations)

    def choose(rows: NDArray[np.intp]) -> CostRegressor:
        return contenders[comparison.without(rows)]

    method = calibration
    if method is None:
        alone = (choose(np.array([i])) for i in range(len(cost)))
        method = "jackknife+" if _quick(template) and all(map(_quick, alone)) else "cv+"
    held = (table.ratios(table.holdout), table.costs(table.holdout))
    bound = calibrate(
        estimator,
        alpha,
        cost,
        method=method,
        anchor=anchor,
        calibration=held,
        operation_seconds=operations,
        choose=choose,
        seed=seed,
    )
    fitted = pd.concat(
        [
            table.train.assign(predicted=cost * (1 + comparison.residuals[comparison.chosen])),
            table.holdout.assign(predicted=estimator.predict(held[0]) if len(held[1]) else []),
        ],
        ignore_index=True,
    )
    column_unit = QUANTITIES.get(table.quantity)
    return CostModel(
        name=comparison.chosen,
        estimator=estimator,
        calibration=bound,
        names=table.names,
        sizes=table.sizes,
        provenance=Provenance(
            quantity=table.quantity,
            unit=column_unit[1] if column_unit else str(profile.attrs.get("unit", "")),
            target=table.target,
            fingerprint=table.fingerprint,
            grid=table.grid,
            environment=table.environment,
            versions=_versions(),
            configurations=len(cost) + (0 if anchor is None else len(anchor[1])),
            holdout=len(held[1]),
            dense=float(anchor[1].mean()) if anchor is not None else None,
            errors=_errors(comparison, estimator, held),
            notes=tuple(notes),
            statistic=profile.attrs.get("statistic"),
        ),
        report=_with_holdout(comparison.table, contenders, table, anchor, operations),
        why=comparison.why,
        fitted=fitted,
        flops_shares=_flops_shares(groups),
    )


def _quick(estimator: CostRegressor) -> bool:
    """Leave-one-out of the linear estimators costs milliseconds; of the others, seconds."""
    from budgets.regression.linear import _Linear

    return isinstance(estimator, _Linear)


def _errors(comparison: Comparison, estimator: CostRegressor, held: tuple[Array, Array]) -> dict[str, float]:
    chosen = comparison.table.index == comparison.chosen
    errors = {f"cv_{name}": float(comparison.table[name].to_numpy()[chosen][0]) for name in ("mape", "within_10")}
    if len(held[1]):
        relative = np.abs(estimator.predict(held[0]) / held[1] - 1)
        errors |= {"holdout_mape": float(relative.mean()), "holdout_within_10": float((relative <= 0.1).mean())}
    return errors


def _with_holdout(
    report: pd.DataFrame,
    contenders: Mapping[str, CostRegressor],
    table: Table,
    anchor: tuple[Array, Array] | None,
    operations: pd.DataFrame | None,
) -> pd.DataFrame:
    """Add each candidate's hold-out error: reported after the choice, never used for it."""
    if not len(table.holdout):
        return report
    alpha, cost = table.ratios(table.train), table.costs(table.train)
    points, measured = table.ratios(table.holdout), table.costs(table.holdout)
    errors = {}
    for name, estimator in contenders.items():
        model = fit_rows(estimator, alpha, cost, np.arange(len(cost)), anchor, operations)
        errors[name] = float(np.abs(model.predict(points) / measured - 1).mean())
    return report.assign(holdout_mape=pd.Series(errors))


def _flops_shares(groups: Groups | None) -> dict[str, float] | None:
    """Share of each group in the FLOPs, alpha dF/dalpha at 1: to be set beside the cost's."""
    if groups is None:
        return None
    phi = physics_features(groups, "coarse")
    if "work" not in phi.names:
        return None
    quadratic = phi.combine([float(name == "work") for name in phi.names])
    effect = quadratic.gradient(np.ones(phi.size))
    return dict(zip(groups.names, (effect / effect.sum()).tolist(), strict=True))


def _versions() -> dict[str, str]:
    found = {name: version(name) for name in ("numpy", "scipy", "scikit-learn", "torch")}
    return {"python": platform.python_version(), **found}
