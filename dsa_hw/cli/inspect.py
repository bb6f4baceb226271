"""dsa-hw inspect: what can be pruned in a network, and what each group is worth."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import TYPE_CHECKING, Any

from dsa_hw.errors import DsaError

if TYPE_CHECKING:
    import pandas as pd

    from dsa_hw.channels import ChannelGroups

_EXAMPLES = """examples:
  dsa-hw inspect --model resnet18 --input 1x3x224x224
  dsa-hw inspect --model timm/convnext_atto --plot groups.png
  dsa-hw inspect --model mypackage.networks:make_net --input 1x3x32x32 --json
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "inspect",
        help="channel groups of a network: what can be pruned, what is frozen and why",
        description="Channel groups of a network: what can be pruned, what is frozen and why, FLOPs and parameters.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    parser.add_argument("--plot", metavar="PNG", help="draw FLOPs and parameters per group")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """``--model`` and ``--input``, the same in every command."""
    parser.add_argument(
        "--model", required=True, metavar="NAME", help="torchvision name, timm/NAME, or package.module:factory"
    )
    parser.add_argument(
        "--input", metavar="SHAPE", help="shape of the input, for example 1x3x224x224 (default: the model's own)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the table, or JSON, and draw the picture."""
    import budgets
    from dsa_hw import find_groups
    from dsa_hw.zoo.models import load_model, parse_shape

    model, inputs = load_model(args.model, parse_shape(args.input) if args.input else None)
    groups = find_groups(model, inputs)
    frame = groups.to_frame()
    totals = {
        "flops": budgets.flops(groups).dense,
        "params": budgets.params(groups).dense,
        "activation_memory": budgets.activation_memory(groups).dense,
    }
    if args.json:
        content = {"model": args.model, **totals, "groups": json.loads(frame.to_json(orient="records"))}
        print(json.dumps(content, indent=1))
    else:
        shapes = ", ".join("x".join(map(str, shape)) for shape in groups.inputs)
        print(f"{args.model} on {shapes}: {len(groups)} channel groups that can be pruned\n")
        print(table(frame))
        print(
            f"\n{totals['flops'] / 1e9:.3f} GFLOPs, {totals['params'] / 1e6:.3f} M parameters, "
            f"{totals['activation_memory'] / 2**20:.1f} MiB of activations at the peak"
        )
    if args.plot:
        _plot(groups, args.model, pathlib.Path(args.plot))
    return 0


def table(frame: pd.DataFrame) -> str:
    """The frame of ``groups.to_frame`` for a terminal."""
    short = frame.assign(
        members=[m if len(m) <= 40 else f"{m.split(', ')[0]} + {m.count(', ')} more" for m in frame["members"]],
        flops_share=[f"{share:6.1%}" for share in frame["flops_share"]],
    )
    rows = [
        ("group", "channels", "made by", "FLOPs", "frozen because"),
        *(
            (str(r.group), str(r.channels), str(r.members), str(r.flops_share), str(r.why_frozen))
            for r in short.itertuples()
        ),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            row[1].rjust(widths[1]),
            row[2].ljust(widths[2]),
            row[3].rjust(widths[3]),
            row[4],
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _plot(groups: ChannelGroups, model: str, path: pathlib.Path) -> None:
    import matplotlib.pyplot as plt
    import numpy as np

    import budgets

    ones = np.ones(len(groups))
    labels = list(groups.names)
    figure, axes = plt.subplots(
        1, 2, figsize=(11, max(2.5, 0.22 * len(labels) + 1.2)), sharey=True, layout="constrained"
    )
    for axis, cost, title in (
        (axes[0], budgets.flops(groups), "FLOPs"),
        (axes[1], budgets.params(groups), "parameters"),
    ):
        # What goes away with the whole group, everything else kept: F(1) - F(1 with alpha_k = 0).
        saved = np.array([cost(ones) - cost(ones - np.eye(len(groups))[k]) for k in range(len(groups))]) / cost.dense
        axis.barh(labels, 100 * saved, color="#3b6ea5")
        axis.set_xlabel(f"% of the network's {title} that go with the group")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", labelsize=7 if len(labels) > 30 else 9)
    axes[0].invert_yaxis()
    figure.suptitle(f"{model}: {len(groups)} channel groups")
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise DsaError(f"cannot draw {path}: {error}") from error
    finally:
        plt.close(figure)
