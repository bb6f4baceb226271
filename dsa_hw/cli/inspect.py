"""``dsa-hw inspect``: what can be pruned in a network, and how much each group contributes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import budgets
import dsa_hw
from dsa_hw.cli.loading import load_dense
from dsa_hw.cli.options import add_command, add_data, add_model
from dsa_hw.cli.output import Table, print_json, print_table, records
from dsa_hw.utils.files import write_figure

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from dsa_hw import ChannelGroups
    from dsa_hw.zoo.data import Data

__all__ = ["add", "groups_table", "run"]

_EXAMPLES = """Examples:
  dsa-hw inspect --model resnet18 --input 1x3x224x224
  dsa-hw inspect --model timm/convnext_atto --plot groups.png
  dsa-hw inspect --model mypackage.networks:make_net --input 1x3x32x32 --json
  dsa-hw inspect --model resnet20 --weights resnet20.pt --int8 --data cifar10

--json prints an object with model, flops, params, activation_memory, groups,
int8. The last is null without --int8.
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
    add_model(parser, weights="state dict of the network, for --int8 (default: random weights)")
    parser.add_argument(
        "--int8",
        action="store_true",
        help="also quantise each layer alone to int8, and rank layers by the output error",
    )
    add_data(parser, ", inputs for --int8 (default: inputs made up from the batch-norm statistics)")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="plot FLOPs and parameters per group to this file")
    parser.set_defaults(seed=0)


def run(args: argparse.Namespace) -> int:
    """Print the groups, and plot them."""
    model, inputs, data = load_dense(args)
    groups = dsa_hw.find_groups(model, inputs)
    frame = groups.to_frame()
    totals = {
        "flops": budgets.flops(groups).dense,
        "params": budgets.params(groups).dense,
        "activation_memory": budgets.activation_memory(groups).dense,
    }
    errors, source = _int8_errors(model, inputs, data) if args.int8 else (None, "")
    if args.json:
        layers = None if errors is None else records(errors)
        int8 = None if layers is None else {"source": source, "layers": layers}
        content = {"model": args.model, **totals, "groups": records(frame), "int8": int8}
        print_json(content)
    else:
        shapes = ", ".join("x".join(map(str, shape)) for shape in groups.inputs)
        many = "channel group" if len(groups) == 1 else "channel groups"
        print(f"{args.model} on {shapes}: {len(groups)} {many} that can be pruned\n")
        print_table(groups_table(frame))
        print(
            f"\n{totals['flops'] / 1e9:.3f} GFLOPs, {totals['params'] / 1e6:.3f} M parameters, "
            f"{totals['activation_memory'] / 2**20:.1f} MiB of activations at the peak"
        )
        if errors is not None:
            print(f"\nrelative error of the outputs with one layer in int8 ({source}):")
            for layer, error in zip(errors["layer"], errors["error"], strict=True):
                print(f"  {error:8.3%}  {layer}")
    if args.plot:
        _plot(groups, args.model, args.plot)
    return 0


def _int8_errors(model: nn.Module, inputs: tuple[Any, ...], data: Data | None) -> tuple[pd.DataFrame, str]:
    """Return the error of each layer in int8, and what it was measured on."""
    from dsa_hw.pipeline.quantised import calibration_inputs
    from profilers.profiling.sensitivity import int8_sensitivity

    found = calibration_inputs(model, inputs, [("training data", data.train if data else None)], 0)
    return int8_sensitivity(model, inputs, [tuple(x[:32] for x in found.inputs)]), found.source


def groups_table(frame: pd.DataFrame) -> Table:
    """Return the table of `ChannelGroups.to_frame` for a terminal."""
    rows = [
        (
            str(r.group),
            str(r.channels),
            str(r.members) if len(str(r.members)) <= 40 else _first_of(str(r.members)),
            f"{r.flops_share:6.1%}",
            str(r.why_frozen),
        )
        for r in frame.itertuples()
    ]
    return Table(("group", "channels", "produced by", "FLOPs", "frozen because"), rows, left=(0, 2, 4))


def _first_of(members: str) -> str:
    return f"{members.split(', ')[0]} + {members.count(', ')} more"


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
