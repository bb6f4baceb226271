"""dsa-hw fit: fit a cost model to a profile."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsa_hw.errors import ModelError, ProfileError
from dsa_hw.profiles import QUANTITIES, Profile
from dsa_hw.units import format_magnitude
from dsa_hw.utils.arguments import share
from dsa_hw.utils.files import refuse_overwriting

if TYPE_CHECKING:
    from budgets import CostModel
    from dsa_hw.channels import ChannelGroups

_EXAMPLES = """examples:
  dsa-hw fit profile.sqlite
  dsa-hw fit profile.sqlite --out latency.json --plot fit.png
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "fit",
        help="fit a cost model to a profile",
        description="Fit a cost model to a profile: compare candidates, calibrate a bound, test on held-out rows.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("profile", type=Path, help="profile store made by dsa-hw profile")
    parser.add_argument("--out", type=Path, help="where to write the model (default: the profile's name with .json)")
    parser.add_argument("--plot", type=Path, help="draw the fit (.png, .svg, .pdf)")
    parser.add_argument(
        "--model",
        help="network, where the profile's own name for it is not that of a known model (package.module:factory)",
    )
    parser.add_argument("--target", help="refuse a profile of another target")
    parser.add_argument(
        "--outside",
        choices=("extrapolate", "clip", "refuse"),
        default="extrapolate",
        help="beyond the profiled range (%(default)s)",
    )
    parser.add_argument("--calibration", choices=("jackknife+", "cv+", "split"), help="how the bound is calibrated")
    parser.add_argument("--confidence", type=float, default=0.9, help="of the bound that is reported (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the cross-validation (%(default)s)")
    parser.add_argument("--allow", type=share, default=0.02, help="interference allowed, as when it was profiled (2%%)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fit, save, draw and report."""
    import budgets
    import profilers

    out = args.out or args.profile.with_suffix(".json")
    refuse_overwriting(out, args.profile)
    refuse_overwriting(args.plot, args.profile, out, option="--plot")
    profile = profilers.load_profile(args.profile, rules=profilers.MeasuringRules.allowing(args.allow))
    groups = _groups(profile, args.model)
    model = budgets.fit(
        profile, groups, target=args.target, calibration=args.calibration, outside=args.outside, seed=args.seed
    )
    model.save(out)
    if args.plot is not None:
        model.plot(args.plot, args.confidence)
    if args.json:
        table = model.report.reset_index()
        print(json.dumps({"out": str(out), "candidates": json.loads(table.to_json(orient="records"))}, indent=1))
    else:
        print(_report(model, args.confidence))
        print(f"\nsaved: {out}" + (f", {args.plot}" if args.plot else ""))
    return 0


def _groups(profile: Profile, name: str | None) -> ChannelGroups:
    """Return the channel groups of the profiled network, made from its name."""
    from dsa_hw.channels import find_groups
    from dsa_hw.zoo.models import load_model

    shapes = [shape for shape, _ in profile.inputs]
    shape = shapes[0] if len(shapes) == 1 else None
    if name is not None:
        return find_groups(*load_model(name, shape))
    try:
        return find_groups(*load_model(profile.network, shape, imports=False))
    except ModelError as error:
        raise ProfileError(
            f"Cannot make the network {profile.network!r} from the name in the profile ({error}). Name the network "
            "with --model, or fit in Python with budgets.fit(profile, groups)."
        ) from error


def _report(model: CostModel, confidence: float) -> str:
    """Return the model, its bound and the table of candidates as text."""
    table = model.report.drop(columns="chosen")
    for column in ("mape", "se", "worst", "within_5", "within_10", "holdout_mape"):
        if column in table:
            table[column] = (100 * table[column]).map("{:.2f}%".format)
    table["seconds"] = table["seconds"].map("{:.2f}".format)
    bound = f"{100 * model.half_width(confidence):.1f}% above the prediction"
    lines = [repr(model), f"  upper bound at {100 * confidence:g}%: {bound} (median)"]
    if model.provenance.dense is not None:
        dimension = QUANTITIES[model.provenance.quantity].dimension
        lines.append(f"  dense network measured: {format_magnitude(model.provenance.dense, dimension)}")
    return "\n".join([*lines, "", table.to_string()])
