"""Fit a cost model to a profile: compare candidates, refit, calibrate, test."""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Mapping
from importlib.metadata import version
from math import lcm
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from budgets.conformal import calibrate, fit_rows
from budgets.cost_model import CostModel
from budgets.profile_rows import ProfileRows, read_rows
from budgets.provenance import Provenance
from budgets.regression import CostRegressor
from budgets.regression.linear import LinearRegressor
from budgets.selection import CandidateComparison, compare_candidates
from budgets.selection import candidates as all_candidates
from budgets.work_classes import Groups, physics_features
from dsa_hw.profiles import Profile
from dsa_hw.utils.arrays import Floats

__all__ = ["fit"]

_log = logging.getLogger(__name__)
# Titles of targets on GPUs, e.g. "torch/cuda:1 fp16".
_GPU: Final = re.compile(r"/(cuda|xpu|mps)\b|tensorrt")


def fit(
    profile: Profile | pd.DataFrame,
    groups: Groups | None = None,
    *,
    candidates: Mapping[str, CostRegressor] | None = None,
    target: str | None = None,
    calibration: str | None = None,
    outside: str = "extrapolate",
    aligned: bool = True,
    folds: int = 5,
    repeats: int = 2,
    seed: int = 0,
) -> CostModel:
    """Fit a cost model to a profile.

    Args:
        profile: What ``profilers.profile`` or ``profilers.load_profile`` returned; or a table of your own with a row
            per configuration: a column of widths for each channel group, ``seconds`` or ``joules``, and ``split``
            (``"train"`` and ``"dense"`` are fitted, ``"holdout"`` is only tested on, others are ignored; without the
            column every row is fitted). A table needs ``groups`` and ``target``. Where there is a column ``error``
            (the standard deviation of the logarithm of a cost, without what all have in common), uncertain
            configurations have less weight in the fit.
        groups: The network's channel groups. Without them the estimators do not know which groups meet in which
            operation and need many more configurations.
        candidates: Estimators to compare, by name, the default first; ``budgets.selection.candidates`` by default.
        target: Title of the target; refused where the profile was measured on another one.
        calibration: ``"jackknife+"``, ``"cv+"`` or ``"split"`` (uses the held-out rows). In the first two the choice
            among candidates is repeated without the configurations left out (see ``budgets.conformal``). By default
            jackknife+, or CV+ where a slow estimator is chosen.
        outside: Beyond the profiled range: ``"extrapolate"``, ``"clip"`` or ``"refuse"``.
        aligned: Leave out configurations off the target's grid, whose steps are not part of a smooth cost.
        folds: Of the cross-validation.
        repeats: Of the cross-validation.
        seed: Of the cross-validation.

    Returns:
        The chosen model, refitted to all training rows and calibrated, with all candidates in ``report``.

    Raises:
        ProfileError: The profile cannot be fitted; see `budgets.profile_rows.read_rows`.

    Example:
        >>> import numpy as np, pandas as pd, torch, budgets, dsa_hw
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.Conv2d(32, 16, 3), torch.nn.Conv2d(16, 4, 3))
        >>> groups = dsa_hw.find_groups(net, (torch.zeros(1, 3, 16, 16),))
        >>> widths = np.random.default_rng(0).integers(4, groups.sizes + 1, (20, len(groups)))
        >>> table = pd.DataFrame(widths, columns=list(groups.names))
        >>> table["seconds"] = 1e-4 + 1e-9 * budgets.flops(groups).predict(table)
        >>> model = budgets.fit(table, groups, target="my board", aligned=False)
        >>> bool(np.allclose(model.predict(table), table["seconds"], rtol=1e-3))
        True
        >>> half = np.full(len(groups), 0.5)
        >>> bool(model(half) <= model.upper(half, confidence=0.9))
        True
    """
    rows = read_rows(profile, groups, target=target, aligned=aligned)
    profile, notes = rows.profile, list(rows.notes)
    if groups is None and candidates is None:
        notes.append("no channel groups given: topology-free estimators need many more configurations")
        _log.warning("Profile: %s.", notes[-1])
    contenders = (
        dict(candidates)
        if candidates is not None
        else all_candidates(groups, outside, gpu=bool(_GPU.search(profile.target)))
    )
    alpha, cost = rows.points(rows.train)
    anchor = rows.points(rows.anchor) if len(rows.anchor) else None
    held = rows.points(rows.holdout)
    weights = _weights(contenders, alpha, cost, anchor, rows.errors)
    comparison = compare_candidates(
        contenders, alpha, cost, anchor=anchor, weights=weights, folds=folds, repeats=repeats, seed=seed
    )
    _log.info("Chosen: %s.", comparison.why)
    template = contenders[comparison.chosen]
    everything = np.arange(len(cost))
    estimator = fit_rows(template, alpha, cost, everything, anchor, weights)

    def choose(left_out: NDArray[np.intp]) -> CostRegressor:
        return contenders[comparison.without(left_out)]

    if calibration is None:
        chosen = [template, *(choose(np.array([i])) for i in range(len(cost)))]
        # Leave-one-out of the linear estimators takes milliseconds, of the others seconds.
        calibration = "jackknife+" if all(isinstance(model, LinearRegressor) for model in chosen) else "cv+"
    bound = calibrate(
        estimator,
        alpha,
        cost,
        method=calibration,
        anchor=anchor,
        weights=weights,
        calibration=held,
        choose=choose,
        seed=seed,
    )
    grid, widened = _grid(rows, estimator)
    if widened:
        assert estimator.blocks is not None
        notes.append(f"the grid of {widened} channel groups is whole blocks of {estimator.blocks.block} channels")
    report = comparison.table
    if len(held[1]):
        # Reported after the choice, never used for it.
        refitted = {
            name: fit_rows(model, alpha, cost, everything, anchor, weights) for name, model in contenders.items()
        }
        errors = {name: float(_relative_errors(model, *held).mean()) for name, model in refitted.items()}
        report = report.assign(holdout_mape=pd.Series(errors))
    fitted = pd.concat(
        [
            rows.train.assign(predicted=cost * (1 + comparison.residuals[comparison.chosen])),
            rows.holdout.assign(predicted=estimator.predict(held[0]) if len(held[1]) else []),
        ],
        ignore_index=True,
    ).drop(columns="error")
    return CostModel(
        name=comparison.chosen,
        estimator=estimator,
        calibration=bound,
        names=profile.names,
        sizes=rows.sizes,
        provenance=Provenance(
            quantity=profile.quantity,
            unit=profile.unit,
            target=profile.target,
            fingerprint=profile.fingerprint or (None if groups is None else groups.fingerprint),
            grid=grid,
            environment=dict(profile.environment),
            versions=_versions(),
            configurations=len(cost) + len(rows.anchor),
            holdout=len(held[1]),
            dense=None if anchor is None else float(anchor[1].mean()),
            errors=_errors(comparison, estimator, held),
            notes=tuple(notes),
            statistic=profile.statistic,
        ),
        report=report,
        why=comparison.why,
        fitted=fitted,
        flops_shares=_flops_shares(groups),
    )


def _weights(
    contenders: Mapping[str, CostRegressor],
    alpha: Floats,
    cost: Floats,
    anchor: tuple[Floats, Floats] | None,
    errors: Floats,
) -> Floats | None:
    """Return the weights of the rows and then of the anchor's, 1 / (floor^2 + error^2).

    A precise measurement is not worth more than the model can use. The floor is the model's own error: the median
    absolute residual of an unweighted fit of the default, which a minority of uncertain rows hardly changes, as a
    standard deviation; at least a tenth of the usual error, so that no row decides alone. An error that is not known is
    taken to be the median of the others.
    """
    known = np.isfinite(errors)
    if not contenders or not known.any():
        return None
    first = fit_rows(next(iter(contenders.values())), alpha, cost, np.arange(len(cost)), anchor)
    usual = float(np.median(errors[known]))
    floor = max(1.4826 * float(np.median(np.abs(first.predict(alpha) / cost - 1))), 0.1 * usual)
    variance = floor**2 + np.where(known, errors, usual) ** 2
    return np.asarray(1 / np.maximum(variance, np.finfo(float).eps), np.float64)


def _grid(rows: ProfileRows, estimator: CostRegressor) -> tuple[dict[str, int], int]:
    """Return the grid of the profile and of the estimator's blocks, and how many groups the blocks change.

    On this grid the estimator's ``value`` is its ``predict``.
    """
    grid = {name: int(step) for name, step in rows.profile.grid.items()}
    if estimator.blocks is None:
        return grid, 0
    found = dict(grid)
    for name, size, step in zip(rows.profile.names, rows.sizes.tolist(), estimator.blocks.steps.tolist(), strict=True):
        both = lcm(max(grid.get(name, 1), 1), step)
        if both != grid.get(name, 1) and both <= size:
            found[name] = both
    return found, sum(found[name] != grid.get(name) for name in found)


def _relative_errors(model: CostRegressor, alpha: Floats, cost: Floats) -> Floats:
    return np.abs(model.predict(alpha) / cost - 1)


def _errors(comparison: CandidateComparison, estimator: CostRegressor, held: tuple[Floats, Floats]) -> dict[str, float]:
    own = comparison.table.loc[comparison.chosen].to_dict()
    errors = {f"cv_{name}": float(own[name]) for name in ("mape", "within_10")}
    if len(held[1]):
        relative = _relative_errors(estimator, *held)
        errors |= {"holdout_mape": float(relative.mean()), "holdout_within_10": float((relative <= 0.1).mean())}
    return errors


def _flops_shares(groups: Groups | None) -> dict[str, float] | None:
    """Return the share of each group in the FLOPs, alpha dF/dalpha at 1."""
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
