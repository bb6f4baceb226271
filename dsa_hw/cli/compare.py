"""``dsa-hw compare``: what each budget gives, also at equal measured latency, as a report."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import dsa_hw
from dsa_hw.cli.budget_args import expand_budgets
from dsa_hw.cli.loading import experiment_arguments, load_dense, settings_of
from dsa_hw.cli.options import (
    BUDGET_HELP,
    METHODS,
    add_command,
    add_data,
    add_model,
    add_out,
    add_search,
    add_training,
)  # fmt: skip
from dsa_hw.cli.output import Table, print_json, print_table, records, warn_of_random_weights

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["add", "comparison_data", "comparison_table", "run"]

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
    add_model(parser, shape=False, weights="state dict of the trained dense network (default: train it)")
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
    add_out(parser, "report", "the report")
    add_search(parser, models=False)


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
        methods=args.methods,
        **experiment_arguments(args, settings),
        equal=not args.no_equal,
        command=args.typed,
    )
    if args.json:
        print_json(comparison_data(table))
    else:
        print_table(comparison_table(table))
        print(f"\n{table.attrs['headline']}\nreport: {table.attrs['report']}")
    return 0


def comparison_data(table: pd.DataFrame) -> dict[str, Any]:
    """Return the table of `dsa_hw.compare` as plain data."""
    return {"networks": records(table), **{str(name): value for name, value in table.attrs.items()}}


def comparison_table(table: pd.DataFrame) -> Table:
    """Return the table of `dsa_hw.compare` for a terminal."""
    head = ("network", "latency [ms]", "MFLOPs", "k params", "before [%]", "accuracy [%]", "verdict")
    rows = []
    for _, row in table.iterrows():
        name = "dense" if row["kind"] == "dense" else f"{row['kind']} {row['asked']}, {row['method']}"
        before = row["accuracy_before"]
        rows.append(
            (
                name + (" at equal latency" if row["matches"] else ""),
                f"{1e3 * row['seconds']:.4g}",
                f"{row['flops'] / 1e6:.1f}",
                f"{row['params'] / 1e3:.1f}",
                "" if before != before else f"{100 * before:.1f}",
                f"{100 * row['accuracy']:.1f}",
                row["verdict"],
            )
        )
    return Table(head, rows, left=(0, 6))
