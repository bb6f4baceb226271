"""dsa-hw allocate: a smaller network within a budget, measured and certified."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from dsa_hw.cli.budget_args import parse_budgets
from dsa_hw.cli.inspect import add_model_options
from dsa_hw.cli.options import (
    DEFAULT_TARGET,
    EXIT_CODES,
    add_measuring,
    measuring_rules,
    model_and_inputs,
    read_weights,
    warn_of_random_weights,
)
from dsa_hw.errors import ModelError

_EXAMPLES = """examples:
  dsa-hw allocate --model resnet18 --budget latency=50% --out small/
  dsa-hw allocate --model resnet20 --data digits --budget latency=60% --budget flops=80% --epochs 4 --out small/
  dsa-hw allocate --model resnet18 --budget latency=12ms --profile profile.sqlite --allow 5%

Interrupted, the same command goes on where it was. Exit codes: 0 the budget is met, 2 wrong input, 3 it cannot be met
or was not, 4 the measurement cannot be trusted.
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "allocate",
        help="prune a network to a budget, measured and certified",
        description="Prune a network to a budget: profile, fit, allocate, shrink, measure, correct, certify.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    option = parser.add_argument
    option("--weights", type=Path, metavar="PT", help="state dict of the dense network (random weights without it)")
    option(
        "--budget",
        action="append",
        required=True,
        metavar="COST=AMOUNT",
        help="latency=5ms, latency=50%%, latency.p95=8ms, flops=50%%, params=2M, memory=64MiB, energy=40mJ; repeatable",
    )
    add_measuring(parser)
    option("--data", metavar="NAME", help="digits or cifar10, to guide the allocation (made-up inputs without it)")
    option("--data-path", type=Path, metavar="PATH", help="where the data are")
    option("--method", default="dsa", help="how keep ratios are found (%(default)s)")
    option("--epochs", type=float, help="how long the method may train (its own choice)")
    option("--finetune", type=float, default=0.0, metavar="EPOCHS", help="train the small network afterwards (0)")
    option("--profile", type=Path, help="store, or fitted model (.json), to use instead of profiling")
    option(
        "--force",
        action="store_true",
        help="use a fitted model of another network, target or runtime version; the difference becomes a note in it",
    )
    option("--samples", type=int, default=40, help="configurations to profile (%(default)s)")
    option("--grid", default="auto", help="widths to use: auto finds what the target likes, N: multiples (%(default)s)")
    option("--time-limit", type=float, default=600.0, metavar="SECONDS", help="for the profile (%(default)s)")
    option("--out", type=Path, default=Path("allocation"), metavar="DIR", help="results and store (%(default)s)")
    option("--seed", type=int, default=0)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Allocate, save, and say what came out."""
    from dsa_hw.pipeline.allocate import allocate
    from dsa_hw.pipeline.options import ProfileOptions
    from dsa_hw.utils.files import refuse_overwriting
    from dsa_hw.zoo import data as datasets

    refuse_overwriting(args.out / "model.pt", args.weights)
    budgets = parse_budgets(args.budget)
    loaded = datasets.load_data(args.data, args.data_path, seed=args.seed) if args.data else None
    if args.finetune and loaded is None:
        raise ModelError("--finetune needs --data to train on")
    model, inputs = model_and_inputs(args, loaded.shape if loaded else None)
    if args.weights:
        try:
            model.load_state_dict(read_weights(args.weights))
        except RuntimeError as error:
            raise ModelError(
                f"{args.weights} does not fit {args.model}: {' '.join(str(error).split())[:200]}"
            ) from error
    warn_of_random_weights(args)
    result = allocate(
        model,
        budgets,
        example_inputs=inputs,
        train=loaded.train if loaded else None,
        val=loaded.val if loaded else None,
        target=args.target,
        method=args.method,
        options={} if args.epochs is None else {"epochs": args.epochs},
        seed=args.seed,
        out=args.out,
        progress=not args.json,
        profiling=ProfileOptions(
            source=args.profile,
            samples=args.samples,
            grid=args.grid,
            time_limit=args.time_limit,
            rules=measuring_rules(args),
            force=args.force,
            name=args.model,
        ),
    )
    accuracy = _accuracy(model, result, loaded, args) if loaded else {}
    certificate = result.certificate
    if args.json:
        content = {
            "model": args.model,
            "certificate": certificate.to_dict(),
            "widths": {str(name): int(width) for name, width in result.widths.items()},
            "accuracy": accuracy,
            "out": str(args.out),
        }
        print(json.dumps(content, indent=1))
    else:
        print(result)
        for name, value in accuracy.items():
            print(f"  accuracy {name}: {100 * value:.1f} %")
        target = "" if args.target == DEFAULT_TARGET else f" --target {shlex.quote(args.target)}"
        print(f"saved: {args.out}\nnext: dsa-hw verify {args.out / 'plan.json'} --model {args.model}{target}")
    return EXIT_CODES[certificate.verdict]


def _accuracy(model: Any, result: Any, loaded: Any, args: argparse.Namespace) -> dict[str, float]:
    """Of the dense and of the small network on the test set; fine-tuned weights replace the saved ones."""
    from dsa_hw.training.finetune import finetune
    from dsa_hw.training.metrics import accuracy

    found = {"dense": accuracy(model, loaded.test), "pruned": accuracy(result.model, loaded.test)}
    if args.finetune:
        finetune(result.model, loaded.train, args.finetune, progress=not args.json)
        found["fine-tuned"] = accuracy(result.model, loaded.test)
        result.save(args.out)
    return found
