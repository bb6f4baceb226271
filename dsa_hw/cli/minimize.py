"""``dsa-hw minimize``: the lowest cost whose accuracy drops by at most a given amount."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dsa_hw
from dsa_hw.cli.budget_args import parse_budget, parse_budgets
from dsa_hw.cli.options import (
    BUDGET_HELP,
    DEFAULT_TARGET,
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
plan.json (with the certificate), model.safetensors (weights), widths.csv,
front.csv and front.png (all networks that were tried) and the measurements.
After an interruption the same command continues. Exit codes: 0 cost and drop
are certified, 2 invalid input, 3 no network is within the drop or a budget
cannot be met, 4 the test images or the measurements are inconclusive.

--json prints an object with model, certificate, widths, front, out.
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
    add_model(
        parser,
        shape=False,
        weights="state dict of the trained dense network (default: train it)",
        pretrained=PRETRAINED_HELP,
    )
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
    option("--method", default="dsa", metavar="NAME", help=f"method that finds keep ratios: {', '.join(METHODS)}")
    option(
        "--recovery", choices=("none", "refit", "distil"), default="refit",
        help="refit the weights that remain to the dense network's outputs; distil also trains them on these outputs",
    )  # fmt: skip
    add_training(parser)
    option("--out", type=Path, default=Path("minimum"), metavar="DIR", help="folder of the results")
    add_search(parser, "profile store (.sqlite) or fitted cost model (.json) to use instead of measuring")
    option("--force", action="store_true", help="use a cost model of another network, target or runtime version")


def run(args: argparse.Namespace) -> int:
    """Minimise, and print the networks that were tried and the certificate."""
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
        val=replace(data.val, shuffle=False),  # every network is judged on all images
        test=data.test,
        budgets=parse_budgets(args.budget),
        example_inputs=inputs,
        target=args.target,
        method=args.method,
        recovery=args.recovery,
        tolerance=args.tolerance,
        most=args.most,
        confidence=args.drop_confidence,
        settings=settings,
        profiling=profile_options(args),
        refinement=refinement_options(args),
        out=args.out,
        progress=not args.json,
        listener=step_listener(args),
    )
    if args.json:
        content = {
            "model": args.model,
            "certificate": found.certificate.to_dict(),
            "widths": {str(name): int(width) for name, width in found.widths.items()},
            "front": json.loads(found.front.to_json(orient="records")),
            "out": str(args.out),
        }
        print(json.dumps(content, indent=1))
    else:
        print(f"{_front_text(found.front, cost)}\n{found}")
        check = ["dsa-hw", "verify", str(args.out / "plan.json"), "--model", args.model]
        if args.target != DEFAULT_TARGET:
            check += ["--target", args.target]
        print(f"saved: {args.out}\nnext: {shlex.join(check)}")
    return EXIT_CODES[found.certificate.verdict]


def _front_text(front: pd.DataFrame, cost: Budget) -> str:
    """Return a line for each network that was tried."""
    lines = []
    for _, row in front.iterrows():
        drop = f"drop {percent(row['drop'], 2)} [{percent(row['drop_low'], 2)}, {percent(row['drop_high'], 2)}]"
        tuned = f", {row['epochs']:g} epochs of fine-tuning" if row["epochs"] else ""
        verdict = "small enough" if row["passes"] else "too large"
        lines.append(f"{row['asked']:>8}: {cost.format(row['measured'])}, {drop} on validation data, {verdict}{tuned}")
    return "\n".join(lines)
