"""dsa-hw sweep: the front of a budget, each point certified."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsa_hw.cli.budget_args import parse_budget
from dsa_hw.cli.options import EXIT_CODES, warn_of_random_weights
from dsa_hw.errors import BudgetError, InfeasibleBudgetError

if TYPE_CHECKING:
    from budgets import Budget

_EXAMPLES = """examples:
  dsa-hw sweep --model resnet20 --data digits --budgets latency=30%..90%:7 --out front/
  dsa-hw sweep --model resnet18 --budgets latency=40% latency=60% latency=80% --target onnxruntime/cpu --out front/

Interrupted, the same command goes on where it was. A budget that cannot be kept ends the front. Exit
codes: 0 every budget is met, 3 one is not or cannot be, 4 for one it cannot be told.
"""
_RANGE = re.compile(
    r"(?P<low>[\d.]+?)\s*(?P<unit>[^\d.\s]*)\.\.(?P<high>\d[\d.]*)\s*(?P<end>[^\d.\s:]+):(?P<count>\d+)"
)
_MOST = 100


def expand(texts: Sequence[str]) -> list[Budget]:
    """Budgets as typed; ``latency=30%..90%:7`` are seven, evenly from 30 % to 90 %."""
    found = []
    for text in texts:
        kind, _, amount = text.partition("=")
        if ".." not in amount:
            found.append(parse_budget(text))
            continue
        match = _RANGE.fullmatch(amount.strip())
        if match is None or match["unit"] not in ("", match["end"]):
            raise BudgetError(f"budgets {text!r}: write a range as latency=30%..90%:7 or latency=2ms..8ms:4")
        low, high, count = float(match["low"]), float(match["high"]), int(match["count"])
        if not (low < high and 2 <= count <= _MOST):
            raise BudgetError(
                f"budgets {text!r}: a range goes up and has 2 to {_MOST} points, as in latency=30%..90%:7"
            )
        steps = (low + (high - low) * i / (count - 1) for i in range(count))
        found += [parse_budget(f"{kind}={step:.6g}{match['end']}") for step in steps]
    return found


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    from dsa_hw.cli.compare import add_training

    parser = subparsers.add_parser(
        "sweep",
        help="the front of a budget: one profile, warm-started allocations, each point certified",
        description="Allocate from the largest budget down, each from the weights of the one before; certify each.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_training(parser, data_required=False)
    parser.add_argument("--method", default="dsa", help="how keep ratios are found (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("front"), metavar="DIR", help="(%(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Sweep, and print the front."""
    from dsa_hw.cli.compare import model_and_data, profiling_of, settings_of, tell
    from dsa_hw.experiments.sweep import sweep

    budgets = expand(args.budgets)
    model, loaded = model_and_data(args)
    settings = settings_of(args)
    warn_of_random_weights(args, trained=loaded is not None and settings.train_epochs > 0)
    table = sweep(
        model, budgets, data=loaded, target=args.target, method=args.method, settings=settings, out=args.out,
        profiling=profiling_of(args), progress=not args.json, listener=tell(args),
    )  # fmt: skip
    if args.json:
        rows = json.loads(table.to_json(orient="records"))
        print(json.dumps({**table.attrs, "points": rows, "out": str(args.out)}, indent=1))
    else:
        say = budgets[0].format
        for _, row in table.iterrows():
            accuracy = "" if row["accuracy"] != row["accuracy"] else f", accuracy {100 * row['accuracy']:.1f} %"
            used = f"{100 * row['utilisation']:.1f} % of {say(row['limit'])}"
            print(f"{row['asked']:>8}: {say(row['measured'])}, {used}, {row['verdict']}{accuracy}")
        for asked, why in table.attrs["infeasible"].items():
            print(f"{asked:>8}: {why}")
        print(f"saved: {args.out / 'front.csv'}, {args.out / 'front.png'}, {args.out / 'plans'}")
    codes = [EXIT_CODES[verdict] for verdict in table["verdict"]]
    return max([*codes, InfeasibleBudgetError.exit_code] if table.attrs["infeasible"] else codes)
