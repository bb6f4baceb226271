"""Read a profile table: what is used for fitting, what is kept back, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from budgets.features import Groups
from dsa_hw.errors import ProfileError

__all__ = ["QUANTITIES", "Table", "read_table"]

_log = logging.getLogger(__name__)

#: quantity -> (column of the profile table, unit, dimension in dsa_hw.units)
QUANTITIES: Final[dict[str, tuple[str, str, str]]] = {
    "latency": ("seconds", "s", "time"),
    "energy": ("joules", "J", "energy"),
}
#: Five folds of one configuration each is the least that cross-validation can compare estimators on.
MINIMUM: Final = 5
_REMEDY: Final = "measure more configurations (dsa-hw profile --samples 40)"


@dataclass(frozen=True, eq=False)
class Table:
    """A validated profile: widths (n, K) and costs (n,) in base units, by role.

    ``train`` rows are exchangeable draws: fitted, cross-validated and used for the bound. ``anchor`` rows (the dense
    network) are fitted but never tested on. ``holdout`` rows only test.
    """

    names: tuple[str, ...]
    sizes: NDArray[np.int64]
    train: pd.DataFrame
    anchor: pd.DataFrame
    holdout: pd.DataFrame
    quantity: str
    target: str
    fingerprint: str | None
    grid: Mapping[str, int]
    environment: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    operations: pd.DataFrame | None = field(default=None, repr=False)

    def ratios(self, rows: pd.DataFrame) -> NDArray[np.float64]:
        """Keep ratios (n, K) of some rows."""
        return rows[list(self.names)].to_numpy(np.float64) / self.sizes

    @staticmethod
    def costs(rows: pd.DataFrame) -> NDArray[np.float64]:
        """Costs (n,) of some rows, in base units."""
        return rows["cost"].to_numpy(np.float64)


def read_table(
    profile: pd.DataFrame,
    groups: Groups | None = None,
    *,
    target: str | None = None,
    quantity: str | None = None,
    column: str | None = None,
    aligned: bool = True,
) -> Table:
    """Validate a profile table (see ``budgets.fit`` for its columns) and divide its rows by role."""
    attrs: dict[str, Any] = {str(key): value for key, value in profile.attrs.items()}
    names, sizes = _groups(profile, attrs, groups)
    quantity = quantity or attrs.get("quantity") or "latency"
    if column is None:
        if quantity not in QUANTITIES:
            raise ProfileError(f"quantity {quantity!r}: its column is not known; say column='...'")
        column = QUANTITIES[quantity][0]
    for needed in (*names, column):
        if needed not in profile.columns:
            raise ProfileError(f"the profile has no column {needed!r}; it has {_listed(profile.columns)}")
    target = _target(profile, attrs, target)
    notes: list[str] = []

    rows = profile[list(names)].copy()
    rows["cost"] = pd.to_numeric(profile[column], errors="coerce")
    rows["split"] = profile["split"] if "split" in profile.columns else "train"
    _check_costs(rows, column)
    _check_widths(rows, names, sizes)

    grid = {name: int(step) for name, step in dict(attrs.get("grid") or {}).items()}
    off = _off_grid(rows, names, sizes, grid) & (rows["split"] != "dense")
    if aligned and off.any():
        kept = int((~off & (rows["split"] == "train")).sum())
        if kept < MINIMUM:
            raise ProfileError(
                f"{int(off.sum())} of {len(rows)} configurations are off the target's grid and {kept} to train on are "
                "left; sample widths on the grid, or pass aligned=False to fit across its steps"
            )
        notes.append(f"{int(off.sum())} configurations off the target's grid left out")
        rows = rows[~off].copy()

    keys = [*names, "split"]
    rows["cost"] = rows.groupby(keys, sort=False, observed=True)["cost"].transform("median")
    merged = rows.drop_duplicates(subset=keys)
    if len(merged) < len(rows):
        notes.append(f"{len(rows) - len(merged)} repeated measurements of a configuration merged by their median")
    holdout = merged[merged["split"] == "holdout"]
    train = merged[merged["split"] == "train"]
    configurations = pd.MultiIndex.from_frame(train[list(names)])
    leaked = (
        configurations.isin(pd.MultiIndex.from_frame(holdout[list(names)]))
        if len(holdout)
        else np.zeros(len(train), bool)
    )
    if leaked.any():
        notes.append(f"{int(leaked.sum())} training configurations that are also hold-out left out of training")
        train = train[~leaked]
    anchor = merged[merged["split"] == "dense"]
    if len(train) < MINIMUM:
        raise ProfileError(
            f"the profile has {len(train)} distinct configurations to train on, at least {MINIMUM} are needed; "
            f"{_REMEDY}"
        )
    spread = float(train["cost"].max() / train["cost"].min()) - 1
    if spread < 1e-6:
        raise ProfileError(
            f"all {len(train)} configurations cost the same ({float(train['cost'].iloc[0]):.4g} {column}), so the cost "
            "does not depend on the widths: the target does not run the pruned network, or a fixed overhead hides it; "
            "check the target, use a larger batch"
        )
    for note in notes:
        _log.warning("profile: %s", note)
    fingerprint = attrs.get("fingerprint") or (groups.fingerprint if groups is not None else None)
    if groups is not None and fingerprint != groups.fingerprint:
        raise ProfileError(
            f"the profile was measured on another network (fingerprint {str(fingerprint)[:12]}..., this one is "
            f"{groups.fingerprint[:12]}...); profile this network"
        )
    return Table(
        names=names,
        sizes=sizes,
        train=train.reset_index(drop=True),
        anchor=anchor.reset_index(drop=True),
        holdout=holdout.reset_index(drop=True),
        quantity=quantity,
        target=target,
        fingerprint=fingerprint,
        grid=grid,
        environment=dict(attrs.get("environment") or {}),
        notes=tuple(notes),
        operations=_operations(profile, attrs, train, names),
    )


def _groups(
    profile: pd.DataFrame, attrs: Mapping[str, Any], groups: Groups | None
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    if groups is not None:
        names, sizes = tuple(groups.names), np.asarray(groups.sizes, np.int64)
        if "names" in attrs and tuple(attrs["names"]) != names:
            differing = next(
                (i for i, (a, b) in enumerate(zip(attrs["names"], names, strict=False)) if a != b),
                min(len(names), len(attrs["names"])),
            )
            raise ProfileError(
                f"the profile has {len(attrs['names'])} channel groups and the network {len(names)}; they differ from "
                f"number {differing} on; profile this network"
            )
        if "sizes" in attrs and list(attrs["sizes"]) != sizes.tolist():
            raise ProfileError("the profile's channel groups have other sizes than the network's; profile this network")
        return names, sizes
    if "names" not in attrs or "sizes" not in attrs:
        raise ProfileError(
            "the profile says neither its channel groups nor their sizes: attrs['names'] and attrs['sizes'] are "
            "missing (pandas drops attrs when tables that differ in them are joined); pass groups=, or read the "
            "profile again with profilers.load"
        )
    return tuple(attrs["names"]), np.asarray(attrs["sizes"], np.int64)


def _target(profile: pd.DataFrame, attrs: Mapping[str, Any], target: str | None) -> str:
    if "target" in profile.columns:
        found = sorted(map(str, profile["target"].unique()))
        if len(found) > 1:
            raise ProfileError(
                f"the profile mixes {len(found)} targets ({', '.join(found)}); fit one model for each: "
                "profile[profile.target == ...]"
            )
        attrs = {**attrs, "target": found[0]} if found else attrs
    known = attrs.get("target")
    if target is None and known is None:
        raise ProfileError(
            "the profile does not say its target (attrs['target'] is missing; pandas drops attrs when tables of two "
            "targets are joined); fit each target's own table, or say target='...'"
        )
    if target is not None and known is not None and str(known) != target:
        raise ProfileError(f"asked for target {target!r}, the profile was measured on {known!r}; profile {target!r}")
    return str(known if known is not None else target)


def _check_costs(rows: pd.DataFrame, column: str) -> None:
    missing = ~np.isfinite(rows["cost"].to_numpy(np.float64))
    if missing.any():
        raise ProfileError(
            f"{int(missing.sum())} of {len(rows)} configurations have no finite {column} (first: row "
            f"{rows.index[missing][0]}); measure them again, or drop them with profile.dropna(subset=[{column!r}])"
        )
    wrong = rows["cost"].to_numpy(np.float64) <= 0
    if wrong.any():
        raise ProfileError(
            f"{int(wrong.sum())} of {len(rows)} configurations have {column} <= 0 (first: row {rows.index[wrong][0]}, "
            f"{float(rows['cost'].iloc[int(np.argmax(wrong))]):g}); a clock or a counter is broken: measure again"
        )


def _check_widths(rows: pd.DataFrame, names: tuple[str, ...], sizes: NDArray[np.int64]) -> None:
    widths = rows[list(names)].to_numpy(np.float64)
    wrong = ~np.isfinite(widths) | (widths != np.round(widths)) | (widths < 1) | (widths > sizes)
    if wrong.any():
        row, k = np.argwhere(wrong)[0]
        raise ProfileError(
            f"row {rows.index[row]}: width {widths[row, k]:g} of channel group {names[k]!r} is not a whole number from "
            f"1 to {sizes[k]}; columns hold widths, not keep ratios"
        )


def _off_grid(
    rows: pd.DataFrame, names: tuple[str, ...], sizes: NDArray[np.int64], grid: Mapping[str, int]
) -> pd.Series[bool]:
    """Rows with a width that is neither a multiple of its group's grid nor the dense one."""
    widths = rows[list(names)].to_numpy(np.int64)
    steps = np.array([max(int(grid.get(name, 1)), 1) for name in names])
    return pd.Series(((widths % steps != 0) & (widths != sizes)).any(1), index=rows.index)


def _operations(
    profile: pd.DataFrame, attrs: Mapping[str, Any], train: pd.DataFrame, names: tuple[str, ...]
) -> pd.DataFrame | None:
    """Per-operation times of the training rows from columns ``operation:NAME``, where the target reported them."""
    columns = [column for column in profile.columns if str(column).startswith("operation:")]
    if not columns:
        return None
    times = profile.groupby(list(names), sort=False)[columns].median()
    times.columns = [str(column).partition(":")[2] for column in columns]
    return times.reindex(pd.MultiIndex.from_frame(train[list(names)])).reset_index(drop=True)


def _listed(columns: Any, limit: int = 8) -> str:
    shown = [str(column) for column in columns]
    return ", ".join(shown[:limit]) + (f" and {len(shown) - limit} more" if len(shown) > limit else "")
