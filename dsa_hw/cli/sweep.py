"""``dsa-hw sweep``: the front of a budget, each point certified."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dsa_hw
from dsa_hw.cli.budget_args import expand_budgets
from dsa_hw.cli.options import (
    BUDGET_HELP,
    EXIT_CODES,
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

OUT gets front.csv, front.png and plans/. After an interruption the same
command continues. A budget that cannot be met is reported, and the larger
ones keep their points. Exit codes: 0 every budget is met, 2 invalid input,
3 a budget cannot be met or is not met, 4 a verdict is inconclusive.

--json prints an object with points, widths, infeasible, target, out.
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
    add_model(
        parser,
        weights="state dict of the trained dense network (default: train it, if there are data)",
        pretrained=PRETRAINED_HELP,
    )
    add_data(parser, " (default: synthetic inputs, and no accuracy is reported)")
    add_training(parser, f"budgets of one kind, or a range such as latency=30%%..90%%:7; {BUDGET_HELP}")
    parser.add_argument(
        "--method", default="dsa", metavar="NAME", help=f"method that finds keep ratios: {', '.join(METHODS)}"
    )
    parser.add_argument("--out", type=Path, default=Path("front"), metavar="DIR", help="folder of the results")
    add_search(parser, "profile store (.sqlite) or fitted cost model (.json) to use instead of measuring")
    parser.add_argument(
        "--force", action="store_true", help="use a cost model of another network, target or runtime version"
    )


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
        target=target_of(args),
        method=args.method,
        settings=settings,
        profiling=profile_options(args),
        refinement=refinement_options(args),
        out=args.out,
        progress=not args.json,
        listener=step_listener(args),
    )
    if args.json:
        rows = json.loads(table.to_json(orient="records"))
        print(json.dumps({**table.attrs, "points": rows, "out": str(args.out)}, indent=1))
    else:
        print(_front_text(table, budgets[0]))
        print(f"saved: {args.out / 'front.csv'}, {args.out / 'front.png'}, {args.out / 'plans'}")
    codes = [EXIT_CODES[Verdict(verdict)] for verdict in table["verdict"]]
    return max([*codes, InfeasibleBudgetError.exit_code] if table.attrs["infeasible"] else codes)


def _front_text(table: pd.DataFrame, budget: Budget) -> str:
    """Return a line for each budget."""
    lines = []
    for _, row in table.iterrows():
        accuracy = "" if row["accuracy"] != row["accuracy"] else f", accuracy {percent(row['accuracy'])}"
        used = f"{percent(row['utilisation'])} of {budget.format(row['limit'])}"
        lines.append(f"{row['asked']:>8}: {budget.format(row['measured'])}, {used}, {row['verdict']}{accuracy}")
    return "\n".join([*lines, *(f"{asked:>8}: {why}" for asked, why in table.attrs["infeasible"].items())])
