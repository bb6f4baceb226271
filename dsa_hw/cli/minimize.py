"""``dsa-hw minimize``: the lowest cost whose accuracy drops by at most a given amount."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import dsa_hw
from dsa_hw.cli.budget_args import parse_budget, parse_budgets
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
from dsa_hw.cli.output import (
    Table,
    print_json,
    print_table,
    print_text,
    records,
    verify_command,
    warn_of_random_weights,
)
from dsa_hw.utils.arguments import confidence, positive_integer, share
from dsa_hw.utils.files import refuse_overwriting
from dsa_hw.utils.text import percent

if TYPE_CHECKING:
    import pandas as pd

    from budgets import Budget

__all__ = ["add", "run"]

_EXAMPLES = """Examples:
  dsa-hw minimize --model resnet20 --data digits \\
      --cost latency --max-drop 4% --out fast/
  dsa-hw minimize --model resnet20 --weights resnet20.pt \\
      --data cifar10:cifar10.npz --cost flops --max-drop 0.5% --budget params=60%
  dsa-hw minimize --model resnet20 --data digits --cost latency.p95=8ms \\
      --max-drop 5% --epochs 0 --finetune-epochs 2

A drop is met where the upper end of its confidence interval is at most
--max-drop, in percentage points of accuracy on the test images. OUT gets
index.html (the page), plan.json (with the certificate), model.safetensors (weights), widths.csv,
front.csv and front.png (all networks that were tried) and the measurements.
After an interruption the same command continues. Exit codes: 0 cost and drop
are certified, 2 invalid input, 3 no network is within the drop or a budget
cannot be met, 4 the test images or the measurements are inconclusive.

--json prints an object with model, certificate, widths, front, out, page.
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "minimize",
        run,
        summary="prune as far as a largest drop of accuracy allows",
        description="Find the network of the lowest cost whose accuracy drops by at most --max-drop. Limits on the "
        "cost are bisected; at each one the network is pruned, recovered, fine-tuned if it has to be, and measured. "
        "The best network is certified for its cost and its accuracy.",
        examples=_EXAMPLES,
        continues=True,
    )
    add_model(parser, shape=False, weights="state dict of the trained dense network (default: train it)")
    add_data(parser, required=True)
    option = parser.add_argument
    option(
        "--cost", required=True, metavar="COST",
        help="what to minimise: latency, latency.p95, energy, estimated_energy, flops, params or memory; "
        "latency=5ms also limits it",
    )  # fmt: skip
    option(
        "--max-drop", type=share, required=True, metavar="SHARE",
        help="largest drop of accuracy in percentage points, for example 1%%",
    )  # fmt: skip
    option(
        "--budget", action="append", default=[], metavar="COST=AMOUNT",
        help=f"further limit: {BUDGET_HELP}; may be repeated",
    )  # fmt: skip
    option(
        "--tolerance", type=share, default="2%", metavar="SHARE",
        help="stop where limits that are met and not met are this close, as a share of the dense cost",
    )  # fmt: skip
    option("--most", type=positive_integer, default=6, metavar="N", help="networks to try, at most")
    option(
        "--drop-confidence", type=confidence, default=0.95, metavar="P",
        help="confidence of the interval of the drop",
    )  # fmt: skip
    add_method(parser)
    option(
        "--recovery", choices=("none", "refit", "distil"), default="refit",
        help="refit the weights that remain to the dense network's outputs; distil also trains them on these outputs",
    )  # fmt: skip
    add_training(parser)
    add_out(parser, "minimum")
    add_search(parser)


def run(args: argparse.Namespace) -> int:
    """Minimise, and print the networks that were tried and the certificate."""
    from dsa_hw.zoo.data import in_order

    refuse_overwriting(args.out / "model.safetensors", args.weights)
    cost = parse_budget(args.cost if "=" in args.cost else f"{args.cost}=100%")
    model, inputs, data = load_dense(args)
    assert data is not None  # --data is required
    settings = settings_of(args)
    warn_of_random_weights(args, trained=settings.train_epochs > 0)
    found = dsa_hw.minimize(
        model,
        cost,
        args.max_drop,
        train=data.train,
        val=in_order(data.val),  # every network is judged on all images
        test=data.test,
        budgets=parse_budgets(args.budget),
        example_inputs=inputs,
        method=args.method,
        recovery=args.recovery,
        tolerance=args.tolerance,
        most=args.most,
        confidence=args.drop_confidence,
        **experiment_arguments(args, settings),
        command=args.typed,
    )
    if args.json:
        content = {
            "model": args.model,
            "certificate": found.certificate.to_dict(),
            "widths": {str(name): int(width) for name, width in found.widths.items()},
            "front": records(found.front),
            "out": str(args.out),
            "page": str(args.out / "index.html"),
        }
        print_json(content)
    else:
        print_table(_front_table(found.front, cost))
        print_text(f"\n{found}")
        print(f"saved: {args.out}\npage: {args.out / 'index.html'}\nnext: {verify_command(args)}")
    return EXIT_CODES[found.certificate.verdict]


def _front_table(front: pd.DataFrame, cost: Budget) -> Table:
    """Return a row for each network that was tried."""
    head = (cost.title, "measured", "drop", "interval", "fine-tuning", "within the drop")
    rows = [
        (
            row["asked"],
            cost.format(row["measured"]),
            percent(row["drop"], 2),
            f"{percent(row['drop_low'], 2)} to {percent(row['drop_high'], 2)}",
            f"{row['epochs']:g} epochs",
            "yes" if row["passes"] else "no",
        )
        for _, row in front.iterrows()
    ]
    return Table(head, rows, left=())
