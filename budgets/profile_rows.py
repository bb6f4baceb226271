"""Validate a profile and divide its rows by role: fitted, anchored, held out."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from budgets.work_classes import Groups
from dsa_hw.errors import ProfileError
from dsa_hw.profiles import QUANTITIES, Profile
from dsa_hw.utils.arrays import Floats, Ints

__all__ = ["MINIMUM", "ProfileRows", "read_rows"]

_log = logging.getLogger(__name__)

#: Five folds of one configuration each is the least that cross-validation can compare estimators on.
MINIMUM: Final = 5


@dataclass(frozen=True, eq=False)
class ProfileRows:
    """The valid rows of a profile: widths, ``cost`` in base units and its ``error``, by role.

    Attributes:
        profile: Where the rows come from.
        train: Exchangeable draws: fitted, cross-validated and used for the bound.
        anchor: The dense network: fitted, but never tested on.
        holdout: Only tested on.
        notes: What was left out or merged, in words.
    """

    profile: Profile
    train: pd.DataFrame
    anchor: pd.DataFrame
    holdout: pd.DataFrame
    notes: tuple[str, ...] = ()

    @property
    def sizes(self) -> Ints:
        """The dense width of each group, (K,)."""
        return np.array(self.profile.sizes, np.int64)

    def points(self, rows: pd.DataFrame) -> tuple[Floats, Floats]:
        """Return keep ratios (n, K) and costs (n,) of some rows."""
        ratios = rows[list(self.profile.names)].to_numpy(np.float64) / self.sizes
        return ratios, rows["cost"].to_numpy(np.float64)

    @property
    def errors(self) -> Floats:
        """Standard deviations of the logarithms of the costs of ``train`` and then ``anchor``; NaN if not known."""
        return np.concatenate([rows["error"].to_numpy(np.float64) for rows in (self.train, self.anchor)])


def read_rows(
    profile: Profile | pd.DataFrame,
    groups: Groups | None = None,
    *,
    target: str | None = None,
    aligned: bool = True,
) -> ProfileRows:
    """Validate a profile and divide its rows by role.

    Args:
        profile: See ``budgets.fit``.
        groups: Channel groups of the network; required for a plain table.
        target: Title of the target; required for a plain table.
        aligned: Leave out configurations that are off the target's grid.

    Returns:
        The rows; repeated measurements of a configuration are merged by their median.

    Raises:
        ProfileError: The profile is of another network or target, has values that cannot be costs or widths, or too
            few configurations.
    """
    profile = _as_profile(profile, groups, target)
    names, sizes, column = list(profile.names), np.array(profile.sizes), profile.column
    for needed in (*names, column):
        if needed not in profile.table.columns:
            raise ProfileError(f"The profile has no column {needed!r}; it has {_listed(profile.table.columns)}.")
    rows = profile.table[names].copy()
    rows["cost"] = pd.to_numeric(profile.table[column], errors="coerce")
    rows["error"] = (
        pd.to_numeric(profile.table["error"], errors="coerce") if "error" in profile.table.columns else np.nan
    )
    rows["split"] = profile.table["split"] if "split" in profile.table.columns else "train"
    _check_costs(rows, column)
    _check_widths(rows, names, sizes)

    notes: list[str] = []
    steps = np.array([max(int(profile.grid.get(name, 1)), 1) for name in names])
    widths = rows[names].to_numpy(np.int64)
    off = ((widths % steps != 0) & (widths != sizes)).any(1) & (rows["split"] != "dense").to_numpy()
    if aligned and off.any():
        kept = int((~off & (rows["split"] == "train")).sum())
        if kept < MINIMUM:
            raise ProfileError(
                f"{off.sum()} of {len(rows)} configurations are off the target's grid and {kept} to train on are left. "
                "Sample widths on the grid, or use aligned=False to fit across its steps."
            )
        notes.append(f"{off.sum()} configurations off the target's grid left out")
        rows = rows[~off].copy()

    keys = [*names, "split"]
    for name in ("cost", "error"):
        rows[name] = rows.groupby(keys, sort=False, observed=True)[name].transform("median")
    merged = rows.drop_duplicates(subset=keys)
    if len(merged) < len(rows):
        notes.append(f"{len(rows) - len(merged)} repeated measurements of a configuration merged by their median")
    train, anchor, holdout = (merged[merged["split"] == split] for split in ("train", "dense", "holdout"))
    leaked = pd.MultiIndex.from_frame(train[names]).isin(pd.MultiIndex.from_frame(holdout[names]))
    if leaked.any():
        notes.append(f"{leaked.sum()} training configurations that are also held out left out of training")
        train = train[~leaked]
    if len(train) < MINIMUM:
        raise ProfileError(
            f"The profile has {len(train)} distinct configurations to train on; at least {MINIMUM} are needed. Measure "
            "more (dsa-hw profile --samples 40)."
        )
    if float(train["cost"].max() / train["cost"].min()) - 1 < 1e-6:
        raise ProfileError(
            f"All {len(train)} configurations cost the same ({float(train['cost'].iloc[0]):.4g} {column}): the target "
            "does not run the pruned network, or a fixed overhead dominates. Check the target, or use a larger batch."
        )
    for note in notes:
        _log.warning("Profile: %s.", note)
    train, anchor, holdout = (part.reset_index(drop=True) for part in (train, anchor, holdout))
    return ProfileRows(profile, train, anchor, holdout, tuple(notes))


def _as_profile(profile: Profile | pd.DataFrame, groups: Groups | None, target: str | None) -> Profile:
    """Return a profile of this network and target, also of a plain table."""
    if isinstance(profile, pd.DataFrame):
        return _from_table(profile, groups, target)
    if target is not None and target != profile.target:
        raise ProfileError(f"The profile was measured on {profile.target!r}; requested target {target!r}.")
    if groups is None:
        return profile
    names, sizes = tuple(groups.names), tuple(np.asarray(groups.sizes).tolist())
    if names != profile.names:
        differing = next((n for n in profile.names if n not in names), None) or next(iter(names), "")
        raise ProfileError(
            f"The profile has {len(profile.names)} channel groups and the network {len(names)}; they differ in "
            f"{differing!r}. Profile this network."
        )
    if sizes != profile.sizes or profile.fingerprint not in (None, groups.fingerprint):
        raise ProfileError(
            f"The profile was measured on another network (fingerprint {str(profile.fingerprint)[:12]}; this network: "
            f"{groups.fingerprint[:12]}). Profile this network."
        )
    return profile


def _from_table(table: pd.DataFrame, groups: Groups | None, target: str | None) -> Profile:
    if groups is None or target is None:
        raise ProfileError(
            "A plain table says neither its network nor its target. Add groups= and target=, or pass the Profile that "
            "profilers.profile or profilers.load_profile returned."
        )
    found = [name for name, quantity in QUANTITIES.items() if quantity.column in table.columns]
    if len(found) != 1:
        columns = " or ".join(repr(quantity.column) for quantity in QUANTITIES.values())
        raise ProfileError(f"The table needs one column of costs, {columns}; it has {_listed(table.columns)}.")
    if "target" in table.columns and set(map(str, table["target"].unique())) != {target}:
        others = ", ".join(sorted(map(str, table["target"].unique())))
        raise ProfileError(f"The table holds measurements of {others}; keep those of {target!r} only.")
    sizes = tuple(np.asarray(groups.sizes).tolist())
    return Profile(table, tuple(groups.names), sizes, target, found[0], groups.fingerprint)


def _check_costs(rows: pd.DataFrame, column: str) -> None:
    cost, error = rows["cost"].to_numpy(np.float64), rows["error"].to_numpy(np.float64)
    for wrong, what, remedy in (
        (~np.isfinite(cost), f"no finite {column}", f"Measure them again, or drop them: dropna(subset=[{column!r}])."),
        (cost <= 0, f"{column} <= 0", "A clock or a counter is broken: measure again."),
        ((error < 0) | np.isinf(error), "an error below 0 or infinite", "Leave the error empty where it is not known."),
    ):
        if wrong.any():
            raise ProfileError(
                f"{wrong.sum()} of {len(rows)} configurations have {what} (first: row {rows.index[wrong][0]}). {remedy}"
            )


def _check_widths(rows: pd.DataFrame, names: list[str], sizes: Ints) -> None:
    widths = rows[names].to_numpy(np.float64)
    wrong = ~np.isfinite(widths) | (widths != np.round(widths)) | (widths < 1) | (widths > sizes)
    if wrong.any():
        row, k = np.argwhere(wrong)[0]
        raise ProfileError(
            f"Row {rows.index[row]}: the width of channel group {names[k]!r} must be a whole number from 1 to "
            f"{sizes[k]} (a width, not a keep ratio); got {widths[row, k]:g}."
        )


def _listed(columns: Any, limit: int = 8) -> str:
    shown = [str(column) for column in columns]
    return ", ".join(shown[:limit]) + (f" and {len(shown) - limit} more" if len(shown) > limit else "")
