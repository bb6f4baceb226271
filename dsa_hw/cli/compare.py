"""``dsa-hw compare``: what each budget gives, also at equal measured latency, as a report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dsa_hw
from dsa_hw.cli.budget_args import expand_budgets
from dsa_hw.cli.options import (
    BUDGET_HELP,
    METHODS,
    PRETRAINED_HELP,
    add_command,
    add_data,
    add_model,
    add_search,
    add_training,
    load_dense,
    profile_options,
    refinement_options,
    settings_of,
    step_listener,
    target_of,
    warn_of_random_weights,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["add", "comparison_text", "run"]

_EXAMPLES = """Examples:
  dsa-hw compare --model resnet20 --data digits \\
      --budgets flops=50% latency=50% params=50% --out report/
  dsa-hw compare --model resnet20 --data digits \\
      --budgets flops=30%..70%:3 latency=30%..70%:3 --out fronts/
  dsa-hw compare --model resnet20 --weights resnet20.pt \\
      --data cifar10:cifar10.npz --budgets flops=50% latency=50% --out report/

The report is OUT/index.html. After an interruption the same command
continues. Exit codes: 0 the report is written, 2 invalid input, 3 a budget
cannot be met, 4 a measurement is less precise than --require.

--json prints an object with networks, widths, headline, report.
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "compare",
        run,
        summary="compare budgets and methods, also at equal measured latency, in a report",
        description="Prune a network under several budgets with several methods, fine-tune and measure all networks "
        "together, and write a report. Networks of FLOPs budgets are also brought to the measured latency of the "
        "latency-budget networks.",
        examples=_EXAMPLES,
        continues=True,
    )
    add_model(
        parser,
        shape=False,
        weights="state dict of the trained dense network (default: train it)",
        pretrained=PRETRAINED_HELP,
    )
    add_data(parser, required=True)
    add_training(parser, f"{BUDGET_HELP}, or a range: latency=30%%..90%%:7")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["dsa", "uniform"],
        metavar="NAME",
        help=f"methods that find keep ratios: {', '.join(METHODS)} (default: dsa uniform)",
    )
    parser.add_argument("--no-equal", action="store_true", help="leave out the networks at equal measured latency")
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="folder of the report")
    add_search(parser, "profile store (.sqlite) to use instead of measuring")


def run(args: argparse.Namespace) -> int:
    """Compare, and print the table and the path of the report."""
    budgets = expand_budgets(args.budgets)
    model, _, data = load_dense(args)
    assert data is not None  # --data is required
    settings = settings_of(args)
    warn_of_random_weights(args, trained=settings.train_epochs > 0)
    table = dsa_hw.compare(
        model,
        data,
        budgets,
        target=target_of(args),
        methods=args.methods,
        settings=settings,
        profiling=profile_options(args),
        refinement=refinement_options(args),
        out=args.out,
        equal=not args.no_equal,
        progress=not args.json,
        listener=step_listener(args),
        command=args.typed,
    )
    if args.json:
        rows = json.loads(table.to_json(orient="records"))
        print(json.dumps({**table.attrs, "networks": rows}, indent=1))
    else:
        print(f"{comparison_text(table)}\n\n{table.attrs['headline']}\nreport: {table.attrs['report']}")
    return 0


def comparison_text(table: pd.DataFrame) -> str:
    """Return the table of `dsa_hw.compare` for a terminal."""
    import pandas as pd

    networks = zip(table["kind"], table["asked"], table["method"], table["matches"], strict=True)
    shown = {
        "network": [
            "dense" if kind == "dense" else f"{kind} {asked}, {method}" + (" at equal latency" if matches else "")
            for kind, asked, method, matches in networks
        ],
        "latency [ms]": (1e3 * table["seconds"]).map("{:.4g}".format),
        "MFLOPs": (table["flops"] / 1e6).map("{:.1f}".format),
        "k params": (table["params"] / 1e3).map("{:.1f}".format),
        "before [%]": [("" if b != b else f"{100 * b:.1f}") for b in table["accuracy_before"]],
        "accuracy [%]": (100 * table["accuracy"]).map("{:.1f}".format),
        "verdict": table["verdict"],
    }
    return pd.DataFrame(shown).to_string(index=False)
