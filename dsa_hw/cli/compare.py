"""dsa-hw compare: what each budget gives, also at equal measured latency, as one page."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from dsa_hw.cli.options import add_measuring, measuring_rules, read_weights, warn_of_random_weights
from dsa_hw.cli.sweep import expand
from dsa_hw.errors import ModelError

_EXAMPLES = """examples:
  dsa-hw compare --model resnet20 --data digits --budgets flops=50% latency=50% params=50% --out report/
  dsa-hw compare --model resnet20 --data digits --budgets flops=30%..70%:3 latency=30%..70%:3 --out fronts/
  dsa-hw compare --model resnet20_a --weights resnet20.pt --data cifar10 --data-path cifar10.npz \\
      --budgets flops=50% latency=50% --out report/

Interrupted, the same command goes on where it was. The report is OUT/index.html.
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "compare",
        help="what each budget gives, also at equal measured latency, as one page",
        description="Allocate under several budgets, fine-tune, measure all networks together, and write a report.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_training(parser)
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["dsa", "uniform"],
        metavar="NAME",
        help="how keep ratios are found (%(default)s)",
    )
    parser.add_argument("--no-equal", action="store_true", help="leave out the networks at equal measured latency")
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="(%(default)s)")
    parser.set_defaults(run=run)


def add_training(parser: argparse.ArgumentParser, data_required: bool = True) -> None:
    """Model, data, budgets, training and measuring: the same for ``compare`` and ``sweep``."""
    from dsa_hw.experiments.settings import ExperimentSettings

    default = ExperimentSettings()
    option = parser.add_argument
    option(
        "--model", required=True, metavar="NAME", help="resnet20, torchvision name, timm/NAME or package.module:factory"
    )
    option("--weights", type=Path, metavar="PT", help="state dict of the trained dense network, instead of training it")
    option("--data", required=data_required, metavar="NAME", help="digits or cifar10")
    option("--data-path", type=Path, metavar="PATH", help="where the data are (CIFAR-10: its .npz)")
    option(
        "--budgets", nargs="+", required=True, metavar="COST=AMOUNT",
        help="flops=50%%, latency=5ms, params=2M, memory=60%%, or a range: latency=30%%..90%%:7",
    )  # fmt: skip
    option("--train-epochs", type=float, metavar="N", help="for the dense network (20; 0 with --weights)")
    option("--epochs", type=float, default=default.epochs, help="for allocating (%(default)g)")
    option("--finetune-epochs", type=float, default=default.finetune_epochs, metavar="N", help="(%(default)g)")
    option("--lr", type=float, default=default.lr, help="learning rate of the dense network (%(default)g)")
    option("--finetune-lr", type=float, default=default.finetune_lr, metavar="LR", help="(%(default)g)")
    option("--precision", default=default.precision, choices=("fp32", "bf16"), help="of training (%(default)s)")
    option("--samples", type=int, default=40, help="configurations to profile (%(default)s)")
    option("--time-limit", type=float, default=600.0, metavar="SECONDS", help="for the profile (%(default)g)")
    option("--seed", type=int, default=0)
    add_measuring(parser)


def settings_of(args: argparse.Namespace) -> Any:
    """The training settings that were typed."""
    from dsa_hw.experiments.settings import ExperimentSettings

    epochs = (0.0 if args.weights or not args.data else 20.0) if args.train_epochs is None else args.train_epochs
    return ExperimentSettings(
        train_epochs=epochs, epochs=args.epochs, finetune_epochs=args.finetune_epochs, lr=args.lr,
        finetune_lr=args.finetune_lr, precision=args.precision, seed=args.seed,
    )  # fmt: skip


def profiling_of(args: argparse.Namespace) -> Any:
    """Return how to profile, as typed."""
    from dsa_hw.pipeline.options import ProfileOptions

    return ProfileOptions(
        samples=args.samples, time_limit=args.time_limit, rules=measuring_rules(args), name=args.model
    )


def model_and_data(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model (its name, or the module with ``--weights``) and the loaded data."""
    from dsa_hw.zoo import data, models

    loaded = data.load_data(args.data, args.data_path, seed=args.seed) if args.data else None
    if not args.weights:
        return args.model, loaded
    module, _ = models.load_model(args.model, loaded.shape if loaded else None)
    try:
        module.load_state_dict(read_weights(args.weights))
    except RuntimeError as error:
        raise ModelError(f"{args.weights} does not fit {args.model}: {' '.join(str(error).split())[:200]}") from error
    return module, loaded


def tell(args: argparse.Namespace) -> Any:
    """Where lines of progress go."""
    return (lambda text: None) if args.json else (lambda text: print(text, file=sys.stderr, flush=True))


def typed(args: argparse.Namespace, command: str) -> str:
    """The command as it can be typed again: what differs from the defaults."""
    parts = ["dsa-hw", command, "--model", args.model]
    for name in ("weights", "data", "data_path"):
        if getattr(args, name):
            parts += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    parts += ["--budgets", *args.budgets, "--target", str(args.target)]
    if getattr(args, "methods", None) not in (None, ["dsa", "uniform"]):
        parts += ["--methods", *args.methods]
    plain = argparse.ArgumentParser()
    add_training(plain, data_required=False)
    for name in ("train_epochs", "epochs", "finetune_epochs", "lr", "finetune_lr", "precision", "samples", "seed"):
        if getattr(args, name) != plain.get_default(name):
            parts += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    if args.allow != plain.get_default("allow"):
        parts += ["--allow", f"{100 * args.allow:g}%"]
    return shlex.join([*parts, "--out", str(args.out)])


def run(args: argparse.Namespace) -> int:
    """Compare, and say what came out and where the page is."""
    from dsa_hw.experiments.compare import compare

    budgets = expand(args.budgets)
    model, loaded = model_and_data(args)
    settings = settings_of(args)
    warn_of_random_weights(args, trained=settings.train_epochs > 0)
    table = compare(
        model, loaded, budgets, target=args.target, methods=args.methods, settings=settings, out=args.out,
        equal=not args.no_equal, profiling=profiling_of(args), progress=not args.json, listener=tell(args),
        command=typed(args, "compare"),
    )  # fmt: skip
    if args.json:
        rows = json.loads(table.to_json(orient="records"))
        print(json.dumps({**table.attrs, "networks": rows}, indent=1))
        return 0
    print(text_of(table))
    print(f"\n{table.attrs['headline']}\nreport: {table.attrs['report']}")
    return 0


def text_of(table: Any) -> str:
    """The table for a terminal."""
    import pandas as pd

    shown = pd.DataFrame(
        {
            "network": [
                "dense" if k == "dense" else f"{k} {a}, {m}" + (" at equal latency" if t else "")
                for k, a, m, t in zip(table["kind"], table["asked"], table["method"], table["matches"], strict=True)
            ],
            "latency [ms]": (1e3 * table["seconds"]).map("{:.4g}".format),
            "MFLOPs": (table["flops"] / 1e6).map("{:.1f}".format),
            "k params": (table["params"] / 1e3).map("{:.1f}".format),
            "before [%]": [("" if b != b else f"{100 * b:.1f}") for b in table["accuracy_before"]],
            "accuracy [%]": (100 * table["accuracy"]).map("{:.1f}".format),
            "verdict": table["verdict"],
        }
    )
    return shown.to_string(index=False)
