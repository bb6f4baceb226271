"""``dsa-hw sweep``: the front of a budget, each point certified."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import dsa_hw
from dsa_hw.cli.budget_args import expand_budgets
from dsa_hw.cli.loading import experiment_arguments, load_dense, settings_of
from dsa_hw.cli.options import (
    BUDGET_HELP,
    EXIT_CODES,
    add_command,
    add_data,
    add_method,
    add_model,
    add_out,
    add_search,
    add_training,
)  # fmt: skip
from dsa_hw.cli.output import Table, print_json, print_table, records, warn_of_random_weights
from dsa_hw.errors import InfeasibleBudgetError
from dsa_hw.pipeline.reading import Verdict
from dsa_hw.utils.text import percent

if TYPE_CHECKING:
    import pandas as pd

    from budgets import Budget

__all__ = ["add", "run"]

_EXAMPLES = """Examples:
  dsa-hw sweep --model resnet20 --data digits \\
      --budgets latency=30%..90%:7 --out front/
  dsa-hw sweep --model resnet18 --budgets latency=40% latency=60% latency=80% \\
      --target onnxruntime/cpu --out front/

OUT gets index.html (the page), front.csv, front.png and plans/. After an interruption the same
command continues. A budget that cannot be met is reported, and the larger
ones keep their points. Exit codes: 0 every budget is met, 2 invalid input,
3 a budget cannot be met or is not met, 4 a verdict is inconclusive.

--json prints an object with points, widths, dense, infeasible, target, out,
page.
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "sweep",
        run,
        summary="prune to several budgets of one kind, and draw the front",
        description="Prune a network to several budgets of one kind, from the largest down. One profile serves all "
        "points, and each allocation starts from the weights of the previous one. Every point has a certificate.",
        examples=_EXAMPLES,
        continues=True,
    )
    add_model(parser, weights="state dict of the trained dense network (default: train it, if there are data)")
    add_data(parser, " (default: synthetic inputs, and no accuracy is reported)")
    add_training(parser, f"budgets of one kind, or a range such as latency=30%%..90%%:7; {BUDGET_HELP}")
    add_method(parser)
    add_out(parser, "front")
    add_search(parser)


def run(args: argparse.Namespace) -> int:
    """Sweep, and print the front."""
    budgets = expand_budgets(args.budgets)
    model, inputs, data = load_dense(args)
    settings = settings_of(args)
    warn_of_random_weights(args, trained=data is not None and settings.train_epochs > 0)
    table = dsa_hw.sweep(
        model,
        budgets,
        data=data,
        example_inputs=inputs,
        method=args.method,
        **experiment_arguments(args, settings),
        command=args.typed,
    )
    if args.json:
        print_json({**table.attrs, "points": records(table), "out": str(args.out)})
    else:
        print_table(_front_table(table, budgets[0]))
        for asked, why in table.attrs["infeasible"].items():
            print(f"{asked}: {why}")
        print(f"saved: {args.out / 'front.csv'}, {args.out / 'front.png'}, {args.out / 'plans'}")
        print(f"page: {table.attrs['page']}")
    codes = [EXIT_CODES[Verdict(verdict)] for verdict in table["verdict"]]
    return max([*codes, InfeasibleBudgetError.exit_code] if table.attrs["infeasible"] else codes)


def _front_table(table: pd.DataFrame, budget: Budget) -> Table:
    """Return a row for each budget that can be met."""
    head = [budget.title, "limit", "measured", "used", "accuracy", "verdict"]
    rows = [
        (
            row["asked"],
            budget.format(row["limit"]),
            budget.format(row["measured"]),
            percent(row["utilisation"]),
            "" if row["accuracy"] != row["accuracy"] else percent(row["accuracy"]),
            row["verdict"],
        )
        for _, row in table.iterrows()
    ]
    return Table(head, rows, left=(5,))
