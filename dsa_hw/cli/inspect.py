"""``dsa-hw inspect``: what can be pruned in a network, and how much each group contributes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import budgets
import dsa_hw
from dsa_hw.cli.options import add_command, add_json, add_model, model_and_inputs
from dsa_hw.utils.files import write_figure

if TYPE_CHECKING:
    import pandas as pd

    from dsa_hw import ChannelGroups

__all__ = ["add", "groups_text", "run"]

_EXAMPLES = """Examples:
  dsa-hw inspect --model resnet18 --input 1x3x224x224
  dsa-hw inspect --model timm/convnext_atto --plot groups.png
  dsa-hw inspect --model mypackage.networks:make_net --input 1x3x32x32 --json

--json prints an object with model, flops, params, activation_memory, groups.
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "inspect",
        run,
        summary="show the channel groups of a network: what can be pruned, what cannot and why",
        description="Show the channel groups of a network: what can be pruned, what is frozen and why, and the FLOPs "
        "and parameters of each group.",
        examples=_EXAMPLES,
    )
    add_model(parser)
    parser.add_argument("--plot", type=Path, metavar="PATH", help="plot FLOPs and parameters per group to this file")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the groups, and plot them."""
    model, inputs = model_and_inputs(args)
    groups = dsa_hw.find_groups(model, inputs)
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
        many = "channel group" if len(groups) == 1 else "channel groups"
        print(f"{args.model} on {shapes}: {len(groups)} {many} that can be pruned\n")
        print(groups_text(frame))
        print(
            f"\n{totals['flops'] / 1e9:.3f} GFLOPs, {totals['params'] / 1e6:.3f} M parameters, "
            f"{totals['activation_memory'] / 2**20:.1f} MiB of activations at the peak"
        )
    if args.plot:
        _plot(groups, args.model, args.plot)
    return 0


def groups_text(frame: pd.DataFrame) -> str:
    """Return the table of `ChannelGroups.to_frame` for a terminal."""
    short = frame.assign(
        members=[m if len(m) <= 40 else f"{m.split(', ')[0]} + {m.count(', ')} more" for m in frame["members"]],
        flops_share=[f"{share:6.1%}" for share in frame["flops_share"]],
    )
    rows = [
        ("group", "channels", "produced by", "FLOPs", "frozen because"),
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


def _plot(groups: ChannelGroups, model: str, path: Path) -> None:
    import matplotlib.pyplot as plt
    import numpy as np

    ones = np.ones(len(groups))
    labels = list(groups.names)
    figure, axes = plt.subplots(
        1, 2, figsize=(11, max(2.5, 0.22 * len(labels) + 1.2)), sharey=True, layout="constrained"
    )
    for axis, cost, title in (
        (axes[0], budgets.flops(groups), "FLOPs"),
        (axes[1], budgets.params(groups), "parameters"),
    ):
        # What is saved without the whole group, everything else kept: F(1) - F(1 with alpha_k = 0).
        saved = np.array([cost(ones) - cost(ones - np.eye(len(groups))[k]) for k in range(len(groups))]) / cost.dense
        axis.barh(labels, 100 * saved, color="#3b6ea5")
        axis.set_xlabel(f"% of the network's {title} saved without the group")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", labelsize=7 if len(labels) > 30 else 9)
    axes[0].invert_yaxis()
    figure.suptitle(f"{model}: {len(groups)} channel groups")
    try:
        write_figure(path, figure, dpi=110)
    finally:
        plt.close(figure)
