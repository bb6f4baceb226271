"""dsa-hw: the command line. Each subcommand is a small module with ``add`` (its options) and ``run``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import dsa_hw
from dsa_hw.cli.packages import OWN, why_hidden
from dsa_hw.errors import DsaError
from dsa_hw.utils.commands import run_command

__all__ = ["build_parser", "main"]

_COMMANDS = ("inspect", "profile", "fit", "allocate", "compare", "sweep", "verify", "export", "setup", "doctor")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``dsa-hw`` with every command."""
    parser = argparse.ArgumentParser(
        prog="dsa-hw",
        description="Prune a PyTorch network to a budget in the unit that counts, on the device that counts.",
        epilog="example: dsa-hw inspect --model resnet18 --input 1x3x224x224",
    )
    parser.add_argument("--version", action="version", version=f"dsa-hw {dsa_hw.__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is done, with tracebacks")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name in _COMMANDS:  # imported here: `main` first checks that the packages they need are ours
        importlib.import_module(f"dsa_hw.cli.{name}").add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; exit codes: 0 done, 2 wrong input, 3 budget infeasible, 4 measurement cannot be trusted."""
    if hidden := next(filter(None, map(why_hidden, OWN)), None):
        print(f"dsa-hw: {hidden}", file=sys.stderr)
        return DsaError.exit_code
    args = build_parser().parse_args(argv)
    return run_command(f"dsa-hw {args.command}", lambda: args.run(args), verbose=args.verbose)


if __name__ == "__main__":
    sys.exit(main())
