"""dsa-hw fit: learn a cost model from a profile."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import TYPE_CHECKING, Any

from dsa_hw.errors import ModelError, ProfileError

if TYPE_CHECKING:
    import pandas as pd

    from dsa_hw.channels import ChannelGroups

_EXAMPLES = """examples:
  dsa-hw fit profile.sqlite
  dsa-hw fit profile.sqlite --out latency.json --plot fit.png
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    from budgets.cli import add_fit_command
    from profilers.latency import share

    parser = add_fit_command(subparsers)
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--allow", type=share, default=0.02, help="disturbance allowed, as when it was profiled (2%%)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fit, save, draw, and say how good it is."""
    from budgets import cli

    model = cli.run(args, lambda path: _profile(path, args.allow), _groups)
    if args.json:
        table = model.report.reset_index()
        print(json.dumps({"out": str(args.out), "candidates": json.loads(table.to_json(orient="records"))}, indent=1))
        return 0
    print(cli.report(model, args.confidence))
    print(f"\nsaved: {args.out}" + (f", {args.plot}" if args.plot else ""))
    return 0


def _profile(path: pathlib.Path, allow: float) -> pd.DataFrame:
    import profilers

    return profilers.load(path, protocol=profilers.Protocol.allowing(allow)).profile


def _groups(profile: pd.DataFrame, name: str | None) -> ChannelGroups:
    """The channel groups of the profiled network, made again from its name."""
    from dsa_hw import find_groups
    from dsa_hw.zoo.models import load_model

    shapes = [shape for shape, _ in profile.attrs.get("inputs", [])]
    shape = shapes[0] if len(shapes) == 1 else None
    if name is not None:
        model, inputs = load_model(name, shape)
        return find_groups(model, inputs)
    found = str(profile.attrs.get("network"))
    try:
        model, inputs = load_model(found, shape, imports=False)
    except ModelError as error:
        raise ProfileError(
            f"Cannot make the network {found!r} from the name in the profile ({error}). Name the network with --model, "
            "or fit in Python with budgets.fit(profile, groups)."
        ) from error
    return find_groups(model, inputs)
