"""``dsa-hw fit``: fit a cost model to a profile."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dsa_hw
from dsa_hw.cli.options import add_command
from dsa_hw.cli.output import Table, print_json, print_table, records
from dsa_hw.errors import ModelError, ProfileError
from dsa_hw.profiles import QUANTITIES, Profile
from dsa_hw.units import format_magnitude
from dsa_hw.utils.files import refuse_overwriting
from dsa_hw.utils.text import first_line, percent

if TYPE_CHECKING:
    from budgets import CostModel
    from dsa_hw.channels import ChannelGroups

__all__ = ["add", "run"]

_EXAMPLES = """Examples:
  dsa-hw fit profile.sqlite
  dsa-hw fit profile.sqlite --out latency.json --plot fit.png

--json prints an object with out, candidates.
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "fit",
        run,
        summary="fit a cost model to a profile",
        description="Fit a cost model to a profile: select the best candidate by cross-validation, calibrate an upper "
        "bound, and test both on held-out configurations.",
        examples=_EXAMPLES,
    )
    option = parser.add_argument
    option("profile", type=Path, metavar="PROFILE", help="profile store (.sqlite) of dsa-hw profile")
    option("--out", type=Path, metavar="JSON", help="the file to write (default: the name of the profile with .json)")
    option("--plot", type=Path, metavar="PATH", help="plot the fit to this .png, .svg or .pdf file")
    option(
        "--model",
        metavar="NAME",
        help="the network, for example package.module:factory (default: the one in the store that was profiled last)",
    )
    option("--target", metavar="RUNTIME/DEVICE", help="the target, where the store has several (default: the last one)")
    option(
        "--outside",
        choices=("extrapolate", "clip", "refuse"),
        default="extrapolate",
        help="what to do beyond the profiled range",
    )
    option(
        "--calibration",
        choices=("jackknife+", "cv+", "split"),
        help="how the bound is calibrated (default: jackknife+ for linear models, else cv+)",
    )
    option("--confidence", type=float, default=0.9, help="confidence of the reported bound")
    option("--seed", type=int, default=0, metavar="N", help="seed of the cross-validation")


def run(args: argparse.Namespace) -> int:
    """Fit, save, plot and report."""
    out = args.out or args.profile.with_suffix(".json")
    refuse_overwriting(out, args.profile)
    refuse_overwriting(args.plot, args.profile, out, option="--plot")
    profile = _profile(args.profile, args.model, args.target)
    groups = _groups(profile, args.model)
    model = dsa_hw.fit(profile, groups, calibration=args.calibration, outside=args.outside, seed=args.seed)
    text = _report(model, args.confidence)  # first: a confidence that is out of reach writes nothing
    model.save(out)
    if args.plot is not None:
        model.plot(args.plot, args.confidence)
    if args.json:
        print_json({"out": str(out), "candidates": records(model.report.reset_index())})
    else:
        print(text)
        print_table(_candidates(model))
        print(f"\nsaved: {out}" + (f", {args.plot}" if args.plot else ""))
    return 0


def _profile(path: Path, name: str | None, target: str | None) -> Profile:
    """Return the last profile of this network and target.

    A store with one network only may have it under another name than the one that the user types.
    """
    from profilers.storage.tables import network_names

    if name is not None and name not in (names := network_names(path)) and len(names) == 1:
        name = None
    return dsa_hw.load_profile(path, network=name, target=target)


def _groups(profile: Profile, name: str | None) -> ChannelGroups:
    """Return the channel groups of the profiled network, made from its name."""
    from dsa_hw.zoo.models import load_model

    shapes = [shape for shape, _ in profile.inputs]
    shape = shapes[0] if len(shapes) == 1 else None
    if name is not None:
        return dsa_hw.find_groups(*load_model(name, shape))
    try:
        return dsa_hw.find_groups(*load_model(profile.network, shape, imports=False))
    except ModelError as error:
        raise ProfileError(
            f"Cannot make the network {profile.network!r} from the name in the profile ({first_line(error)}). Name the "
            "network with --model, or fit in Python with dsa_hw.fit(profile, groups)."
        ) from error


def _report(model: CostModel, confidence: float) -> str:
    """Return the model and its bound as text."""
    bound = f"{percent(model.half_width(confidence))} above the prediction"
    lines = [repr(model), f"  upper bound at {100 * confidence:g}%: {bound} (median)"]
    if model.provenance.dense is not None:
        dimension = QUANTITIES[model.provenance.quantity].dimension
        lines.append(f"  dense network measured: {format_magnitude(model.provenance.dense, dimension)}")
    return "\n".join([*lines, ""])


def _candidates(model: CostModel) -> Table:
    """Return a row for each candidate that was cross-validated."""
    table = model.report.drop(columns="chosen")
    for column in ("mape", "se", "worst", "within_5", "within_10", "holdout_mape"):
        if column in table:
            table[column] = table[column].map(lambda value: percent(value, 2))
    table["seconds"] = table["seconds"].map("{:.2f}".format)
    rows = [(str(name), *map(str, row)) for name, row in zip(table.index, table.to_numpy(), strict=True)]
    return Table((str(table.index.name or ""), *map(str, table.columns)), rows)
