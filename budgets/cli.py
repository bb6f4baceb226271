"""``dsa-hw fit``: the command-line door of ``budgets.fit``."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dsa_hw.units import format_magnitude
from dsa_hw.utils.files import refuse_overwriting

if TYPE_CHECKING:  # the options alone must not cost the import of scikit-learn
    import pandas as pd

    from budgets.cost_model import CostModel
    from budgets.work_classes import Groups

__all__ = ["add_fit_command", "add_force_option", "report", "run"]

_log = logging.getLogger(__name__)


def add_fit_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add ``fit`` to the subcommands of ``dsa-hw``."""
    parser = subparsers.add_parser("fit", help="learn a cost model from a profile", description=__doc__)
    parser.add_argument("profile", type=Path, help="profile store made by dsa-hw profile")
    parser.add_argument("--out", type=Path, help="where to write the model (default: the profile's name with .json)")
    parser.add_argument("--plot", type=Path, help="draw the fit (.png, .svg, .pdf)")
    parser.add_argument(
        "--model",
        help="network, where the profile's own name for it is not that of a known model (package.module:factory)",
    )
    parser.add_argument("--target", help="target, where the profile holds several")
    parser.add_argument(
        "--outside", choices=("extrapolate", "clip", "refuse"), default="extrapolate", help="beyond the profiled range"
    )
    parser.add_argument("--calibration", choices=("jackknife+", "cv+", "split"), help="how the bound is calibrated")
    parser.add_argument("--confidence", type=float, default=0.9, help="of the bound that is reported (default 0.9)")
    parser.add_argument("--seed", type=int, default=0, help="of the cross-validation")
    return parser


def add_force_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--force`` to a command that loads a fitted model."""
    parser.add_argument(
        "--force",
        action="store_true",
        help="use a fitted model of another network, target or runtime version; the difference becomes a note in it",
    )


def run(
    args: argparse.Namespace,
    load_profile: Callable[[Path], pd.DataFrame],
    load_groups: Callable[[pd.DataFrame, str | None], Groups | None],
) -> CostModel:
    """Fit, save, draw.

    ``load_profile(path)`` reads the profile table and ``load_groups(table, args.model)`` the network's channel groups.
    """
    from budgets.fitting import fit

    if args.out is None:
        args.out = args.profile.with_suffix(".json")
    refuse_overwriting(args.out, args.profile)
    refuse_overwriting(args.plot, args.profile, args.out, option="--plot")
    profile = load_profile(args.profile)
    groups = load_groups(profile, args.model)
    model = fit(profile, groups, target=args.target, calibration=args.calibration, outside=args.outside, seed=args.seed)
    model.save(args.out)
    _log.info("wrote %s", args.out)
    if args.plot is not None:
        model.plot(args.plot, args.confidence)
        _log.info("wrote %s", args.plot)
    return model


def report(model: CostModel, confidence: float = 0.9) -> str:
    """What ``dsa-hw fit`` says when it is done: the model, its bound, and the table of candidates."""
    dimension = {"s": "time", "J": "energy"}.get(model.provenance.unit)
    table = model.report.copy()
    for column in ("mape", "se", "worst", "within_5", "within_10", "holdout_mape"):
        if column in table:
            table[column] = (100 * table[column]).map("{:.2f}%".format)
    table["seconds"] = table["seconds"].map("{:.2f}".format)
    lines = [
        repr(model),
        f"  upper bound at {100 * confidence:g}%: {100 * model.half_width(confidence):.1f}% above the prediction",
    ]
    if dimension and model.provenance.dense is not None:
        lines.append(f"  dense network measured: {format_magnitude(model.provenance.dense, dimension)}")
    return "\n".join([*lines, "", table.drop(columns="chosen").to_string()])
